"""`hangs/<time>_<phase>.txt` in a run's folder: the verdict, all processes, queues, memory, the last spans, all stacks."""

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.observability.watchdog.verdict import Culprit, Seen, Stuck

MAX_SPANS = 30
GIB = 2**30


def report_name(stuck: Stuck) -> str:
    phase = re.sub(r"\W+", "_", stuck.phases[-1].name).strip("_")[:60]
    return f"{time.strftime('%Y%m%d_%H%M%S')}_{phase}.txt"


def report_text(stuck: Stuck, found: Sequence[Culprit], processes: Sequence[Seen], gauges: Mapping[str, object]) -> str:
    """gauges: queue lengths by name."""
    parts = [
        f"{time.strftime('%Y-%m-%d %H:%M:%S')}: no progress in {' > '.join(map(str, stuck.phases))} for "
        f"{stuck.pause_s:.0f} s (deadline {stuck.deadline_s:.0f} s)",
        _section("Who is stuck", [f"{i}. {culprit}" for i, culprit in enumerate(found, 1)]),
        _section("Processes", _table(processes)),
        _section("Queues", [f"{name}: {value}" for name, value in gauges.items()]),
        _section("Memory of this machine", _memory()),
        _section("Last spans", _spans(processes)),
        *(_section(f"Stacks of {process.who}", _stacks(process)) for process in processes),
        *(
            _section(f"Stacks of {name}", text.splitlines() or ["It gave none."])
            for process in processes
            for name, text in process.dump.awaited.items()
        ),
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join(["", title, "-" * len(title), *lines]) if lines else ""


def _table(processes: Sequence[Seen]) -> list[str]:
    rows = [("role", "rank", "pid", "host", "heartbeat", "memory", "does", "waits for")]
    for process in processes:
        state = process.state
        phases = "; ".join(" > ".join(map(str, own)) for own in state.phases)
        calls = ", ".join(state.calls) or (f"has finished {state.last_call}" if state.last_call else "")
        waits = [f"{wait.kind} {wait.name} ({state.now - wait.began:.0f} s)" for wait in state.waits[:5]]
        more = [f"and {state.num_waits - 5} more"] if state.num_waits > 5 else []
        rows.append(
            (
                state.role,
                str(state.rank),
                str(state.pid),
                state.host,
                f"{process.silent_s:.0f} s ago",
                f"{state.rss / GIB:.2f} GiB",
                "; ".join(text for text in (phases, calls) if text) or "-",
                ", ".join(waits + more) or "-",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _memory() -> list[str]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return []
    wanted = ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree", "Shmem")
    fields = [line.split(":") for line in lines if line.split(":")[0] in wanted]
    return [f"{name}: {int(value.split()[0]) / 2**20:.2f} GiB" for name, value in fields]


def _spans(processes: Sequence[Seen]) -> list[str]:
    spans: list[Any] = sorted((s for process in processes for s in process.dump.spans), key=lambda s: s[4])
    return [
        f"{time.strftime('%H:%M:%S', time.localtime(end_us / 1e6))}.{end_us // 1000 % 1000:03d}  "
        f"{role} rank {rank}: {name}, {(end_us - begin_us) / 1e6:.3f} s"
        for name, role, rank, begin_us, end_us in spans[-MAX_SPANS:]
    ]


def _stacks(process: Seen) -> list[str]:
    lines = []
    if not process.dump.answers:
        lines.append("It did not answer; " + ("its stacks came by a signal." if process.dump.stacks else "no stacks."))
    for stack in process.dump.stacks:
        lines.append(f"Thread {stack.thread} (innermost first):")
        lines += [f'  File "{file}", line {line} in {name}' for file, line, name in stack.frames]
    if process.dump.native:
        lines += ["", "py-spy:", *process.dump.native.splitlines()]
    return lines
