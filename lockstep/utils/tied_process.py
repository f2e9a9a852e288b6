"""`python -m lockstep.utils.tied_process MODULE ARGUMENT...`: runs a module, with low priority, as long as its parent lives.

Standard input is a pipe whose other end the parent holds and never writes to: it ends with the parent, however that ends.
"""

import os
import runpy
import signal
import sys
import threading
import time

NICENESS = 10
GRACE_S = 5.0


def main(module: str, *arguments: str) -> None:
    os.nice(NICENESS)
    threading.Thread(target=_end_with_parent, args=(sys.stdin.buffer.fileno(),), daemon=True).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with_parent(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
