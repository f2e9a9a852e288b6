"""verl.trainer.main_generation: as a program (`-m`) the same as `lockstep generate`."""

import sys

from lockstep.trainer.main_generation import main

if __name__ == "__main__":
    sys.exit(main())
