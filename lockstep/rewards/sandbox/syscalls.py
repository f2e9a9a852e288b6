"""The seccomp filter of a sandbox: system calls that a namespace or Landlock leaves open, refused with EPERM.

Calls that need a capability are not listed: a sandboxed process has none and cannot make a user namespace to get one.
"""

import platform
import struct

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

DENIED: dict[str, tuple[int, int]] = {
    # network: the network namespace is empty; Landlock does not cover UDP and named Unix sockets
    "socket": (41, 198),
    # memory that belongs to no process, which the memory limit would not see
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # new namespaces, and kernel interfaces with a history of privilege escalation
    "unshare": (272, 97),
    "setns": (308, 268),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
}
"""Numbers on x86-64 and ARM64."""

DENIED_METADATA: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
}
"""Mode, owner and attributes of files, which Landlock does not restrict."""

OWN_PROCESS_ONLY = {"prlimit64": (302, 261), "sched_setaffinity": (203, 122)}
"""Allowed with pid 0, the caller."""
CLONE = (56, 220)
CLONE3 = (435, 435)
CLONE_NEW = 0x7E020080
"""All CLONE_NEW* flags."""
X32_BIT = 0x40000000

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
OFFSET_NUMBER, OFFSET_ARCH, OFFSET_ARGUMENT_0 = 0, 4, 16

Instruction = tuple[int, int | str, int | str, int]
"""Operation, jump if true, jump if false (a distance or the label `deny`), operand."""


def machine() -> str:
    """`x86_64` or `aarch64`; an error elsewhere."""
    name = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    if name not in AUDIT_ARCH:
        raise OSError(f"the sandbox supports x86_64 and aarch64, not {name}")
    return name


def seccomp_filter(metadata: bool) -> bytes:
    """The filter as an array of `struct sock_filter`; `metadata` also denies changes of file modes and owners."""
    column = list(AUDIT_ARCH).index(machine())
    denied = [numbers[column] for numbers in (DENIED | (DENIED_METADATA if metadata else {})).values()]
    program: list[Instruction] = [
        (LOAD, 0, 0, OFFSET_ARCH),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine()]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, OFFSET_NUMBER),
        (JUMP_AT_LEAST, "deny", 0, X32_BIT),
        (JUMP_EQUAL, 0, 1, CLONE3[column]),  # its flags are in memory; libc then falls back to clone
        (RETURN, 0, 0, ENOSYS),
    ]
    program += [(JUMP_EQUAL, "deny", 0, number) for number in denied if number is not None]
    for numbers in OWN_PROCESS_ONLY.values():
        program += _if_called(numbers[column], (JUMP_EQUAL, 0, "deny", 0))
    program += _if_called(CLONE[column], (JUMP_ANY_BIT, "deny", 0, CLONE_NEW))
    program += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, EPERM)]
    return b"".join(_encode(index, len(program) - 1, item) for index, item in enumerate(program))


def _if_called(number: int, test_of_argument_0: Instruction) -> list[Instruction]:
    return [(JUMP_EQUAL, 0, 3, number), (LOAD, 0, 0, OFFSET_ARGUMENT_0), test_of_argument_0, (RETURN, 0, 0, ALLOW)]


def _encode(index: int, deny: int, instruction: Instruction) -> bytes:
    operation, if_true, if_false, operand = instruction
    jumps = [deny - index - 1 if jump == "deny" else int(jump) for jump in (if_true, if_false)]
    return struct.pack("HBBI", operation, *jumps, operand)
