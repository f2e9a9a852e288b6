"""verl.trainer.main_eval: as a program (`-m`) the same as `lockstep eval`."""

import sys

from lockstep.trainer.main_eval import main

if __name__ == "__main__":
    sys.exit(main())
