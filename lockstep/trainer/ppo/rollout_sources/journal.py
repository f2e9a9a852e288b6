"""What became of every group of samples: an append-only journal in the run's folder.

    rollout_journal/journal.jsonl            one event per line, for the whole run
    rollout_journal/samples_after_N.bin      groups that finished after the checkpoint of step N, one safetensors blob each

    {"event": "start", "group": [3, 0], "step": 2}
    {"event": "finish", "group": [3, 0], "started": 2, "versions": [1, 2], "file": "samples_after_0.bin", "offset": 0, "size": 9000,
     "crc32": 1234567}
    {"event": "train", "step": 3, "groups": [[2, 5], [3, 0]]}
    {"event": "drop", "group": [3, 1], "step": 4, "reason": "stale"}
    {"event": "checkpoint", "step": 4}
    {"event": "resume", "step": 4}           undoes what was trained or dropped in later steps

A line is written when its event happens, so that it survives the death of the process. If the machine dies, what is not yet on
disk is sampled again: events are synced before the checkpoint that builds on them is complete, and samples have a checksum. A
damaged line is skipped with a warning. It costs the samples of its group at most: what was trained on is in the checkpoint.
"""

import json
import logging
import operator
import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lockstep.observability.run_folder import JOURNAL, JOURNAL_EVENTS
from lockstep.protocol import DataProto
from lockstep.protocol.images import IMAGES, with_content
from lockstep.protocol.tokens import read
from lockstep.trainer.ppo.forks import newest_earlier
from lockstep.trainer.ppo.rollout_sources.group_schedule import Group, GroupId
from lockstep.utils.state_file import from_bytes, to_bytes

logger = logging.getLogger(__name__)

NUMBERS = {
    "start": ("step",),
    "finish": ("started", "offset", "size", "crc32"),
    "train": ("step",),
    "drop": ("step",),
    "checkpoint": ("step",),
    "resume": ("step",),
}
"""Event -> its fields that are numbers."""


class Journal:
    """The journal of a run, which is in `run_dir`. Its methods may be called from several threads.

    step, policy_version: of the checkpoint that the run goes on from; 0 to start over.
    """

    def __init__(self, run_dir: Path, step: int, policy_version: int = 0) -> None:
        self.folder = run_dir / JOURNAL
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        _cut_torn_line(self.folder / JOURNAL_EVENTS)
        if step == 0:
            self._remove_samples()
        earlier = list(read_events(run_dir))
        # weights of later updates no longer exist, and neither does what they sampled
        finished = _finished_since(earlier, step) if step > 0 else {}
        self._recovered = {group: e for group, e in finished.items() if e["versions"][1] <= policy_version}
        self._events: BinaryIO = open(self.folder / JOURNAL_EVENTS, "ab")  # noqa: SIM115 - closed by `close`
        self._samples = self._open_samples(step)
        if earlier:
            self.note("resume", step=step)

    def note(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, **fields}) + "\n"
        with self._lock:
            self._events.write(line.encode())
            self._events.flush()

    def finish(self, group: Group) -> None:
        """Keep the samples of a group."""
        assert group.samples is not None
        content = to_bytes(group.samples.to_state(), owner="the samples of a prompt (trainer.async_mode keeps them)")
        with self._lock:
            place: dict[str, Any] = {"file": Path(self._samples.name).name, "offset": self._samples.tell()}
            place |= {"size": len(content), "crc32": zlib.crc32(content)}
            self._samples.write(content)
            self._samples.flush()
        first, every = (read(group.samples.tensors, name) for name in ("policy_version", "policy_versions"))
        versions = [int(first.min()), max(int(every.max()), newest_earlier(group.samples))]
        self.note("finish", group=group.id, started=group.started, versions=versions, **place)

    def recover(self, group: Group) -> DataProto | None:
        """The samples of a group that had finished before the run died; None if it must be sampled."""
        event = self._recovered.pop(group.id, None)
        if event is None:
            return None
        try:
            samples = _read_samples(self.folder, event)
        except (OSError, ValueError, KeyError) as error:
            logger.warning("%s: the samples of group %s are lost and sampled again (%s)", self.folder, group.id, error)
            return None
        if _prompt(samples) != _prompt(group.prompt):  # a sampler that learns from trained steps draws others
            return None
        group.started = min(group.started, event["started"])
        return samples

    def train(self, step: int, groups: list[Group]) -> None:
        self.note("train", step=step, groups=[group.id for group in groups])

    def sync(self) -> None:
        """Bring the events to disk."""
        with self._lock:
            os.fsync(self._events.fileno())

    def checkpoint(self, step: int) -> None:
        """The checkpoint of the step is complete: it holds the groups that finished until now."""
        with self._lock:
            self._samples.close()
            self._samples = self._open_samples(step)
        self.note("checkpoint", step=step)
        self._remove_samples(Path(self._samples.name))

    def close(self) -> None:
        self._samples.close()
        self._events.close()

    def _remove_samples(self, used: Path | None = None) -> None:
        for file in self.folder.glob("samples_after_*.bin"):
            if file != used:
                file.unlink()

    def _open_samples(self, step: int) -> BinaryIO:
        return open(self.folder / f"samples_after_{step}.bin", "ab")


def read_events(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The events of a run, first to last; a group is a (batch, row) tuple. A damaged line is skipped with a warning."""
    file = run_dir / JOURNAL / JOURNAL_EVENTS
    *lines, _ = file.read_bytes().split(b"\n") if file.exists() else [b""]  # the last one has no end: the process died
    for number, line in enumerate(lines, start=1):
        try:
            event = _event(line)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning(
                "%s, line %d is damaged and skipped (%s: %s); a group that it records is sampled again if it is not in the "
                "checkpoint",
                *(file, number, type(error).__name__, error),
            )
        else:
            yield event


def _event(line: bytes) -> dict[str, Any]:
    """ValueError, KeyError or TypeError if the line is not an event."""
    event = json.loads(line)
    for name in NUMBERS[event["event"]]:
        event[name] = operator.index(event[name])
    if event["event"] in ("start", "finish", "drop"):
        event["group"] = _pair(event["group"])
    if event["event"] == "finish":
        event["versions"] = _pair(event["versions"])  # first and last
        event["file"] = str(event["file"])
    if event["event"] == "train":
        event["groups"] = [_pair(group) for group in event["groups"]]
    return dict(event)


def _pair(pair: Any) -> tuple[int, int]:
    first, second = map(operator.index, pair)
    return first, second


def trained_groups(run_dir: Path) -> dict[int, list[GroupId]]:
    """The groups that made the run's weights, by step: without steps that a resumed run has trained again."""
    trained: dict[int, list[GroupId]] = {}
    for event in read_events(run_dir):
        if event["event"] == "train":
            trained[event["step"]] = event["groups"]
        elif event["event"] == "resume":
            trained = {step: groups for step, groups in trained.items() if step <= event["step"]}
    return trained


def finished_samples(run_dir: Path, step: int) -> Iterator[tuple[GroupId, DataProto]]:
    """The groups that finished after the checkpoint of `step`, and whose samples are still there; of a group's last ones."""
    events = list(read_events(run_dir))
    finished = _finished_since(events, step) if step > 0 else {e["group"]: e for e in events if e["event"] == "finish"}
    for group, event in finished.items():
        with suppress(OSError, ValueError, KeyError):
            yield group, _read_samples(run_dir / JOURNAL, event)


def _prompt(rows: DataProto) -> list[int]:
    """What tells the prompt of these rows from others."""
    ids = np.array(rows.non_tensor_batch["raw_prompt_ids"][0], dtype=np.int64)
    images = rows.non_tensor_batch.get(IMAGES)
    found: list[int] = with_content(ids, None if images is None else images[0]).tolist()
    return found


def _read_samples(folder: Path, event: dict[str, Any]) -> DataProto:
    """The samples of a finished group; OSError, ValueError or KeyError if they are lost."""
    with open(folder / event["file"], "rb") as file:
        file.seek(event["offset"])
        content = file.read(event["size"])
    if zlib.crc32(content) != event["crc32"]:
        raise ValueError("their checksum differs")
    return DataProto.from_state(from_bytes(content))


def _finished_since(events: list[dict[str, Any]], step: int) -> dict[GroupId, dict[str, Any]]:
    """The groups that finished after the checkpoint of `step`, up to its death."""
    marks = [i for i, event in enumerate(events) if event["event"] == "checkpoint" and event["step"] == step]
    since = events[marks[-1] :] if marks else []
    if any(event["event"] == "resume" and event["step"] < step for event in since):
        return {}  # the step was trained again, and the mark of its new checkpoint is lost
    return {event["group"]: event for event in since if event["event"] == "finish"}


def _cut_torn_line(file: Path) -> None:
    """Remove what a dying process wrote of its last line."""
    content = file.read_bytes() if file.exists() else b""
    if content and not content.endswith(b"\n"):
        os.truncate(file, content.rfind(b"\n") + 1)
