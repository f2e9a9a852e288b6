"""Runs the command of an MCP server so that neither it nor its children outlive the process that started it.

    python mcp_child.py PARENT_PID COMMAND [ARGUMENT ...]

It must lead a process group, which is killed when the command or the parent ends. Uses only the standard library.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PARENT_ENDED = signal.SIGUSR2


def main(parent_pid: int, command: list[str]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {PARENT_ENDED, signal.SIGCHLD})
    if sys.platform == "linux":  # elsewhere a server ends when its stdin closes
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, PARENT_ENDED)
    if os.getppid() != parent_pid:  # it ended before prctl
        os._exit(1)
    pid = os.fork()
    if not pid:
        _run(command)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the group gets them too, and the command ends first
    os.close(0)
    os.close(1)
    while signal.sigwait({PARENT_ENDED, signal.SIGCHLD}) != PARENT_ENDED and not os.waitpid(pid, os.WNOHANG)[0]:
        pass
    os.killpg(0, signal.SIGKILL)


def _run(command: list[str]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        os._exit(127)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
