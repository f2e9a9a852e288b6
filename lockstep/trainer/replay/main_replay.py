"""`lockstep replay`: compute a step of a run again and compare it with the log, with a change, or with another run.

Exit codes: 0 equal (of a dump: the finding is not there again), 1 different (of a dump: it is), 2 wrong input, 4 the finding of
a dump cannot be checked.
"""

import argparse
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from lockstep.config.errors import show
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import leaves, to_plain
from lockstep.observability.compare import different_settings, read_config
from lockstep.observability.console import LogHandler
from lockstep.observability.jsonl import METRICS_FILE, read_metrics
from lockstep.observability.rollout_files import dumps_of_run
from lockstep.observability.run_folder import AUDIT_INFO
from lockstep.trainer.replay import report
from lockstep.trainer.replay.compare import (
    TensorChange,
    compare_dumps,
    compare_metrics,
    first_different_steps,
    row_changes,
    tensor_changes,
)
from lockstep.trainer.replay.replay import ROLLOUTS, replay
from lockstep.trainer.replay.source_run import (
    SERVERS,
    JournalPart,
    SourceRun,
    StepToReplay,
    config_from,
    in_one_process,
    why_timing_matters,
    with_servers,
    wrong,
)
from lockstep.trainer.run.errors import RunError, out_of_memory_as_run_error
from lockstep.utils.untrusted import printable

logger = logging.getLogger(__name__)

NEED_EARLIER_STEPS = (
    *("gradient", "data_order", "frozen_parameters", "reference_policy", "reward_probe", "token_round_trip"),
)
"""Audits that compare with earlier steps, or with what a dump does not hold: a replay may not find again what they found."""
CANNOT_BE_CHECKED = 4
"""Exit code."""
EPILOG = """\
examples:
  lockstep replay runs/gsm8k --step 120
  lockstep replay runs/gsm8k --step 120 --set actor_rollout_ref.actor.kl_loss_coef=0.01
  lockstep replay runs/gsm8k --until-first-difference runs/gsm8k-again
  lockstep replay runs/gsm8k/audits/step_120_gradient

The run's folder is only read. It runs the code that the run ran. Exit codes: 0 equal, 1 different,
2 wrong input, 4 not to be checked. docs/replay.md
"""


class OnceFilter(logging.Filter):
    """Each message once: a command may compute several runs, which warn of the same things."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_new = message not in self._seen
        self._seen.add(message)
        return is_new


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(sys.argv[1:] if argv is None else list(argv))
    level = logging.INFO if options.verbose else logging.WARNING
    handler = LogHandler()
    handler.addFilter(OnceFilter())
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", handlers=[handler])
    try:
        with out_of_memory_as_run_error():
            return _run(options)
    except RunError as error:
        sys.stderr.write(printable(f"lockstep replay: {error}\n"))
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("stopped by the user\n")
        return 130


def _run(options: argparse.Namespace) -> int:
    """`options.servers` gets the settings of `--set` that replace the run's servers: they change no number."""
    options.servers = [change for change in options.set if change.partition("=")[0].endswith(SERVERS)]
    options.set = [change for change in options.set if change not in options.servers]
    if (options.run / AUDIT_INFO).is_file():
        if options.step is not None or options.set or options.other is not None:
            raise wrong(
                f"{options.run} is the dump of an audit: give it alone, without --step, --set or --until-first-difference"
            )
        return _replay_dump(options)
    if options.other is not None:
        if options.step is not None or options.set:
            raise wrong("--until-first-difference finds the step itself: leave --step and --set out")
        return _find_first_difference(options)
    if options.step is None:
        raise wrong("say which step: --step N, or --until-first-difference OTHER_RUN")
    return _replay_with_changes(options) if options.set else _replay_and_check(options)


def _replay_and_check(options: argparse.Namespace) -> int:
    """Replay a step and compare it with the log."""
    from lockstep.trainer.replay.recording import read_recording

    run = SourceRun(options.run)
    to_replay = _found(run, options.step, options.servers)
    local = in_one_process(to_replay.config) if options.local else {}
    _announce(to_replay)
    with _scratch(options) as folder:
        metrics = replay(to_replay, folder, local=local)
        recording = read_recording(folder)
        left_out = ["training/epoch"] if to_replay.journal is not None else []  # how far the data was drawn ahead
        left_out += ["global_seqlen/"] if local else []  # tokens per rank
        changes = compare_metrics(
            *(run.metrics[to_replay.step], metrics),
            rollout_rounds=recording.rollout_rounds,
            rounds=bool(local),
            left_out=left_out,
        )
        dumps = []
        recorded = _dump_of(run, to_replay)
        if recorded is not None:
            dumps = compare_dumps(recorded, folder / ROLLOUTS / recorded.name, rollout_rounds=recording.rollout_rounds)
    is_equal = all(change.verdict != "differs" for change in changes) and (not dumps or bool(local))
    report.say(f"step {to_replay.step}: {report.metrics_line(changes)}")
    if local:
        report.say("computed in one process instead of several: sums are in another order, so last bits may differ")
    report.show_metrics(changes, ("logged", "replayed"), most=None if options.all else report.SHOWN_METRICS)
    if recorded is not None:
        report.say(f"rows of {recorded}: {'equal' if not dumps else 'different'}")
        report.show_dumps(dumps)
    report.say(f"step {to_replay.step} is {'equal' if is_equal else 'different'}")
    return 0 if is_equal else 1


def _replay_with_changes(options: argparse.Namespace) -> int:
    """Replay a step as it was and with changed settings. Steps before it are computed once, as they were."""
    from lockstep.trainer.replay.recording import read_recording

    run = SourceRun(options.run)
    as_it_was = _found(run, options.step, options.servers)
    changed = replace(as_it_was, config=config_from(as_it_was.settings, [*options.servers, *options.set]))
    local = in_one_process(as_it_was.config) if options.local else {}
    _announce(as_it_was)
    with _scratch(options) as folder:
        old_metrics = replay(as_it_was, folder / "old", local=local, save_before=True)
        saved = folder / "old" / f"global_step_{as_it_was.step - 1}"
        if saved.is_dir():
            changed = replace(changed, checkpoint=saved, begin=as_it_was.step - 1)
        new_metrics = replay(changed, folder / "new", local=local)
        old, new = read_recording(folder / "old"), read_recording(folder / "new")
    metrics = compare_metrics(old_metrics, new_metrics, rollout_rounds=old.rollout_rounds)
    tensors = list(tensor_changes(old, new))
    before, after = (dict(leaves(to_plain(found.config))) for found in (as_it_was, changed))
    for name in [name for name in {**before, **after} if before.get(name) != after.get(name)]:
        report.say(f"{name}: {show(before.get(name, '-'))} -> {show(after.get(name, '-'))}")
    report.say(f"step {as_it_was.step}: {report.metrics_line(metrics)}")
    most = None if options.all else report.SHOWN_METRICS
    report.show_metrics(metrics, ("as recorded", "changed"), most=most)
    report.show_rows(row_changes(old, new), most=None if options.all else report.SHOWN_ROWS)
    report.show_tensors(tensors)
    return 0 if _are_equal(tensors) and all(change.verdict != "differs" for change in metrics) else 1


def _find_first_difference(options: argparse.Namespace) -> int:
    """Replay the first step at which the logs of two runs differ, and the ones after it until a tensor does."""
    from lockstep.trainer.replay.recording import read_recording

    runs = SourceRun(options.run), SourceRun(options.other)
    names = _names(*(run.folder for run in runs))
    common = [step for step in runs[0].metrics if step in runs[1].metrics and step > 0]
    if not common:
        raise wrong(f"{names[0]} and {names[1]} have no step in common")
    is_first = True
    for step in first_different_steps(runs[0].metrics, runs[1].metrics):
        report.say(f"{'the metrics first differ' if is_first else 'the metrics also differ'} at step {step}")
        to_replay = [_found(run, step, options.servers) for run in runs]
        if is_first:
            settings = [read_config(found.settings) for found in to_replay]
            report.show_settings(list(different_settings(settings)), names)
        is_first = False
        locals_ = [in_one_process(found.config) if options.local else {} for found in to_replay]
        with _scratch(options) as folder:
            for number, (found, local) in enumerate(zip(to_replay, locals_)):
                _announce(found)
                replay(found, folder / str(number), local=local)
            recordings = [read_recording(folder / str(number)) for number in (0, 1)]
        changes = compare_metrics(*(run.metrics[step] for run in runs), rollout_rounds=recordings[0].rollout_rounds)
        report.show_metrics(changes, names, most=None if options.all else report.SHOWN_METRICS)
        tensors = list(tensor_changes(*recordings))
        report.show_tensors(tensors)
        if not _are_equal(tensors):
            return 1
    if is_first:
        report.say(f"the metrics of all {len(common)} common steps are equal bit for bit")
        return 0
    report.say("the logs differ, but every tensor of these steps is equal")
    return 1


def _replay_dump(options: argparse.Namespace) -> int:
    """Compute the update of a dumped batch again."""
    from lockstep.protocol.images import IMAGES
    from lockstep.trainer.ppo.batch_dump import read_dump
    from lockstep.trainer.replay.recording import read_recording

    try:
        dump = read_dump(options.run)
    except ValueError as error:
        raise wrong(str(error)) from error
    info = dump.info
    if IMAGES in info.left_out:
        raise wrong(
            f"{options.run}: its rows have images, which a dump leaves out; lockstep replay {dump.run} --step {info.step} computes "
            "the step from the run"
        )
    report.say(f"audit {info.audit} at step {info.step}: {info.message}")
    run = SourceRun(dump.run)
    to_replay = with_servers(run.find_dumped(info.step, dump.checkpoint), options.servers)
    if (why := why_timing_matters(to_replay.config)) and to_replay.begin < info.step - 1:
        to_replay = replace(to_replay, journal=_journal_of(to_replay, info.step - 1))
        if to_replay.journal is None:
            logger.warning("%s: the steps before the dumped one are sampled again, so its weights may differ", why)
    _announce(to_replay)
    local = in_one_process(to_replay.config) if options.local else {}
    with _scratch(options) as folder:
        try:
            replay(to_replay, folder, local=local, batch=dump.folder)
        except RunError as error:
            if not (audit := re.search(r"\(audit (\w+);", str(error))):
                raise
            step = max((row["step"] for row in read_metrics(folder / METRICS_FILE)), default=to_replay.begin) + 1
            if (audit[1], step) == (info.audit, info.step):
                report.say(f"found again: {error}")
                return 1
            report.say(f"cannot be checked in a replay: it ended at step {step} with another finding: {error}")
            return CANNOT_BE_CHECKED
        findings = read_recording(folder).findings
    report.show_findings(findings)
    if info.audit in findings:
        report.say("found again")
        return 1
    if info.audit in NEED_EARLIER_STEPS:
        report.say(f"cannot be checked in a replay: audit {info.audit} compares with what only the run had")
        return CANNOT_BE_CHECKED
    report.say("not found again: the step is computed without the finding")
    return 0


def _found(run: SourceRun, step: int, servers: Sequence[str]) -> StepToReplay:
    found = with_servers(run.find(step), servers)
    why = why_timing_matters(found.config)
    if why is None:
        return found
    found = replace(found, journal=_journal_of(found, step))
    if found.journal is None:
        journal = "rollout_journal/ has the samples of steps after the last checkpoint. " if "async_mode" in why else ""
        raise wrong(
            f"--step {step}: {run.folder} was trained with {why}: which samples a step trains on depends on timing, and not all "
            f"those of steps {found.begin + 1} to {step} are kept. {journal}A batch that an audit has kept can be replayed: "
            "lockstep replay RUN/audits/step_N_NAME"
        )
    return found


def _journal_of(found: StepToReplay, last: int) -> JournalPart | None:
    """The part of the run's journal with the samples of all steps up to `last`; None if it does not have them."""
    config = found.config
    if not isinstance(config, PPOConfig) or config.trainer.async_mode not in ("colocated", "fully_async"):
        return None
    from lockstep.trainer.replay.sources import JournalSamples

    part = JournalPart(found.run, found.begin, found.checkpoint)
    missing = JournalSamples(part, config.actor_rollout_ref.rollout.n).missing(found.begin + 1, last)
    return part if missing is None else None


def _are_equal(tensors: Sequence[TensorChange]) -> bool:
    return all(change.is_rounding for change in tensors)


def _dump_of(run: SourceRun, to_replay: StepToReplay) -> Path | None:
    """The responses that the run wrote at the step."""
    config = to_replay.config
    if not isinstance(config, PPOConfig) or config.trainer.rollout_data_dir is None:
        return None
    try:
        return dumps_of_run(run.folder, validation=False).get(to_replay.step)
    except ValueError as error:
        logger.warning("the rows are not compared: %s", error)
        return None


def _announce(to_replay: StepToReplay) -> None:
    begin = to_replay.checkpoint.name if to_replay.checkpoint is not None else "the start of the run"
    steps = (
        f"steps {to_replay.begin + 1}-{to_replay.step}"
        if to_replay.begin + 1 < to_replay.step
        else f"step {to_replay.step}"
    )
    report.say(f"{to_replay.run.name}: computing {steps} from {begin}")


def _names(first: Path, second: Path) -> tuple[str, str]:
    return (first.name, second.name) if first.name != second.name else (str(first), str(second))


@contextmanager
def _scratch(options: argparse.Namespace) -> Iterator[Path]:
    with TemporaryDirectory(prefix="lockstep-replay-", dir=options.scratch) as folder:
        yield Path(folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep replay",
        description="Compute a step of a run again, and compare it with the log, with a changed setting, or with another run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN|DUMP", help="a run's folder, or the dump of an audit in it")
    parser.add_argument("--step", type=int, metavar="N", help="the step to compute again")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="also compute it with this setting; repeatable"
    )
    parser.add_argument(
        "--until-first-difference",
        type=Path,
        dest="other",
        metavar="OTHER_RUN",
        help="find the first step and the first tensor at which two runs part",
    )
    parser.add_argument("--local", action="store_true", help="compute a run of several workers in this process")
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR", help="folder for temporary files; on Ray, seen by all machines"
    )
    parser.add_argument("--all", action="store_true", help="show all metrics and rows that differ")
    parser.add_argument("--verbose", action="store_true", help="show the log of the replayed run")
    return parser


if __name__ == "__main__":
    sys.exit(main())
