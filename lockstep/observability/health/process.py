"""Whether the run is alive, moves on, and stays within memory and the planned time."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any, Literal

from lockstep.observability.health.run_view import RECENT, Finding, RunView, percent, show
from lockstep.observability.numbers import number
from lockstep.utils.timing import PHASES

State = Literal["running", "finished", "stopped", "failed", "silent", "killed", "unknown"]
"""Those of status.json; silent: no sign of life; killed: the process is gone; unknown: there is no status."""

SILENT_S = 60.0
"""Age of a status, which is renewed every 5 s, that means no sign of life."""
GONE_S = 15.0
"""The same if the process is known to be gone."""
LONG_PHASE_S = 120.0
"""A phase that takes less is not called stalled."""
NEAR_LIMIT = 0.93
GIB = 2**30 / 1e9
AUDIT = "audit/"
"""Begin of the metrics of audits."""

TIMERS = {phase: f"timing_s/{timer}" for timer, phase in PHASES.items()} | {
    "generate": "timing_s/gen",
    "rewards": "timing_s/reward",
    "reward model": "timing_s/reward",
    "validation": "timing_s/testing",
    "update": "timing_s/step",
}
"""Phase, as in status.json and plan.json, to the metric of its seconds."""


def state_of(run: RunView) -> State:
    status = run.status or {}
    state = status.get("state")
    if state in ("finished", "stopped", "failed"):
        return state
    written = number(status.get("time"))
    if state != "running" or written is None:
        return "unknown"
    age = run.now - written
    if run.is_alive is False and age > GONE_S:
        return "killed"
    return "silent" if age > SILENT_S else "running"


def phases_of(status: Mapping[str, Any] | None) -> list[list[dict[str, Any]]]:
    """The phases of a status, of which only well-formed ones are kept: name, began, done, total, unit."""
    threads = (status or {}).get("phases")
    found = []
    for own in threads[:50] if isinstance(threads, list) else []:
        rows = [row for row in own[:20] if isinstance(row, Mapping)] if isinstance(own, list) else []
        found.append(
            [
                {
                    "name": str(row.get("name"))[:100],
                    "began": number(row.get("began")),
                    "done": number(row.get("done")) or 0,
                    "total": number(row.get("total")),
                    "unit": str(row.get("unit") or "")[:40],
                }
                for row in rows
            ]
        )
    return [rows for rows in found if rows]


def run_ended(run: RunView) -> Finding | None:
    state, status = state_of(run), run.status or {}
    reason = str(status.get("reason") or "")[:2000]
    step = number(status.get("step")) or 0
    total = number(status.get("total_steps"))
    at = f"after step {step:.0f}" + (f" of {total:.0f}" if total else "")
    if state == "failed" and reason.startswith("no progress in "):  # the verdict of the watchdog
        verdict, _, advice = reason.partition("; the run ")
        return Finding(
            "run_hung",
            "bad",
            f"The run was stuck in {verdict.removeprefix('no progress in ').partition(' for ')[0]}",
            f"The watchdog ended it {at}: {verdict}.",
            f"The report has the stacks of all processes. The run {advice or 'ended early'}.",
            "watchdog.md",
        )
    if state == "failed":
        return Finding(
            "run_failed",
            "bad",
            "The run has failed",
            f"It ended {at}: {reason or 'the reason is in its log'}",
            "error.txt in the run's folder has the traceback, if there is one. Run the same command to resume from the last "
            "checkpoint.",
            "troubleshooting.md",
        )
    if state == "stopped":
        return Finding(
            "run_stopped",
            "info",
            "The run was stopped",
            f"It ended {at}: {reason}",
            "Run the same command to resume from the last checkpoint.",
            "training.md",
        )
    if state == "killed":
        return Finding(
            "run_killed",
            "bad",
            "The run was killed",
            f"Its process {status.get('pid')} no longer exists and did not say why; the last sign of life was {at}.",
            "Look for the out-of-memory killer (dmesg), a time limit of the scheduler, or kill -9. Run the same command to "
            "resume from the last checkpoint.",
            "reliability.md",
        )
    if state == "silent":
        age = run.now - (number(status.get("time")) or run.now)
        return Finding(
            "no_sign_of_life",
            "bad",
            "The run gives no sign of life",
            f"status.json was last written {_duration(age)} ago {at}; a living run renews it every 5 s.",
            f"Is the machine {str(status.get('host'))[:100]} up, and its disk (or NFS) reachable? If only the disk is full, "
            "the run may go on training.",
            "reliability.md",
        )
    return None


def phase_is_stuck(run: RunView) -> Finding | None:
    """The phase of a living run takes far longer than ever before."""
    if state_of(run) != "running":
        return None
    if verdict := (run.status or {}).get("stuck"):
        return Finding(
            "stalled",
            "bad",
            "The run is stuck",
            f"The watchdog says: {str(verdict)[:1000]}.",
            "The newest file in hangs/ of the run's folder has the stacks of all processes. trainer.on_hang=stop or restart ends "
            "such a run by itself.",
            "watchdog.md",
        )
    threads = phases_of(run.status)
    validates = any(phase["name"] == "validation" for own in threads for phase in own)
    for own in threads:
        for phase in own:
            if validates and phase["name"] != "validation":  # the timers of the others are those of training steps
                continue
            past = run.series(TIMERS.get(phase["name"], "")).last(100).values
            began = phase["began"]
            if len(past) < 3 or began is None:
                continue
            seconds = run.now - began
            if seconds > max(5 * max(past), LONG_PHASE_S):
                progress = (
                    f" ({phase['done']:.0f} of {phase['total']:.0f} {phase['unit']} done)" if phase["total"] else ""
                )
                return Finding(
                    "stalled",
                    "bad",
                    f"The run is stuck in “{phase['name']}”",
                    f"It has been there for {_duration(seconds)}{progress}; it took at most {_duration(max(past))} in the "
                    f"last {len(past)} steps.",
                    "Look at the log, at the workers (`ray status`, nvidia-smi) and, for rewards and tools, at the services "
                    "that they call. "
                    "`py-spy dump --pid PID` shows where a process is. trainer.max_restarts restarts dead workers.",
                    "watchdog.md",
                    (TIMERS[phase["name"]],),
                )
    return None


def was_restarted(run: RunView) -> Finding | None:
    """The workers of this command had to be restarted."""
    listed = (run.status or {}).get("restarts")
    restarts = [restart for restart in listed if isinstance(restart, Mapping)] if isinstance(listed, list) else []
    if not restarts or state_of(run) not in ("running", "silent"):
        return None
    step = number(restarts[-1].get("step")) or 0
    return Finding(
        "restarts",
        "warning",
        "The workers were restarted",
        f"{len(restarts)} times in this command, the last time after step {step:.0f}: {str(restarts[-1].get('cause'))[:500]}.",
        "restarts.jsonl in the run's folder has all causes. Work since the last checkpoint is repeated: a lower "
        "trainer.save_freq loses less. The run ends when trainer.max_restarts are used up.",
        "reliability.md",
    )


def memory_is_short(run: RunView) -> Finding | None:
    """Peak memory of tensors against the GPU's; what the allocator caches beyond that can be given back."""
    total = number((run.plan or {}).get("gpu_memory_gb"))
    peak = run.series("perf/max_memory_allocated_gb").last(1)
    if not total or not peak.values or (run.plan or {}).get("gpu") == "cpu":
        return None
    used = peak.values[0] * GIB
    planned = max(run.planned("memory_gb").values(), default=0.0)
    prefix = "perf/max_memory_allocated_gb/"
    by_phase = {
        name.removeprefix(prefix): run.series(name).last(1).values for name in run.names if name.startswith(prefix)
    }
    worst = max(((values[0], name) for name, values in by_phase.items() if values), default=None)
    where = f", in {worst[1]}" if worst else ""
    beside = f"; the plan expected at most {show(planned)} GB" if planned else ""
    if used >= NEAR_LIMIT * total:
        return Finding(
            "memory",
            "warning",
            "GPU memory is nearly full",
            f"{show(used)} of {show(total)} GB ({percent(used / total)}) were allocated at the peak{where}{beside}. Longer "
            "sequences may not fit.",
            "Lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu, actor_rollout_ref.rollout.gpu_memory_utilization or "
            "data.max_response_length, or offload "
            "(actor_rollout_ref.actor.fsdp_config.optimizer_offload=true); `lockstep plan` compares them.",
            "plan.md",
            ("perf/max_memory_allocated_gb", *(f"{prefix}{name}" for name in sorted(by_phase))),
        )
    if planned and used > 1.25 * planned and used > 0.5 * total:
        return Finding(
            "memory_beyond_plan",
            "info",
            "More memory than planned",
            f"{show(used)} GB were allocated at the peak{where}, {percent(used / planned - 1)} more than the {show(planned)} "
            "GB that the plan expected; the GPU "
            f"has {show(total)} GB.",
            "Nothing to do while it fits.",
            "plan.md",
            ("perf/max_memory_allocated_gb",),
        )
    return None


def phase_is_slow(run: RunView) -> Finding | None:
    """A phase that takes far longer than the plan for the longest sequences. Plans for CPUs are too rough for that."""
    if run.setting("trainer.async_mode") or (run.plan or {}).get("gpu") == "cpu":
        return None
    step = run.series("timing_s/step").last()
    slow = []
    for phase, seconds in run.planned("seconds").items():
        taken = run.series(TIMERS.get(phase, "")).last()
        if len(taken.values) < 5 or len(step.values) < 5 or seconds <= 0:
            continue
        usual = statistics.median(taken.values)
        if usual > 3 * seconds and usual > 0.2 * statistics.median(step.values) and usual - seconds > 2:
            slow.append((usual / seconds, phase, usual, seconds))
    if not slow:
        return None
    factor, phase, usual, seconds = max(slow)
    return Finding(
        "slow_phase",
        "warning",
        f"“{phase}” is slower than planned",
        f"It takes {_duration(usual)} per step (median of the last {RECENT}), {show(factor)} times the {_duration(seconds)} "
        "that the plan expects even for the "
        "longest sequences.",
        "Is the GPU shared with other programs, or throttled? Look at the step in the time panel, at what the phase waits "
        "for (tools, reward, disk), and at "
        "micro-batch sizes; `trainer.profile_steps` profiles a step.",
        "performance.md",
        (TIMERS[phase], "timing_s/step", "perf/throughput"),
        step.span,
    )


def audit_found(run: RunView) -> Finding | None:
    """An audit at level `warn` found something; one at `stop` ends the run."""
    found = {name: run.series(name) for name in run.names if name.startswith(AUDIT)}
    found = {name: series for name, series in found.items() if series.values and series.values[-1] > 0}
    if not found:
        return None
    counts = ", ".join(
        f"{name.removeprefix(AUDIT)} in {show(series.values[-1])}" for name, series in sorted(found.items())
    )
    first = min(series.steps[0] for series in found.values())
    advice = "The log has each message."
    if run.audit_dumps:
        folders = ", ".join(run.audit_dumps[:5]) + (", …" if len(run.audit_dumps) > 5 else "")
        advice += f" `lockstep rollouts` shows a batch, `lockstep replay` computes it again: {folders}."
    return Finding(
        "audit",
        "warning",
        f"{'An audit' if len(found) == 1 else f'{len(found)} audits'} found something",
        f"Steps in which audits found something: {counts}; the first is step {first}.",
        advice,
        "audits.md",
        tuple(sorted(found)),
        (first, max(series.steps[-1] for series in found.values())),
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


RULES: tuple[Callable[[RunView], Finding | None], ...] = (
    run_ended,
    phase_is_stuck,
    was_restarted,
    memory_is_short,
    phase_is_slow,
    audit_found,
)
