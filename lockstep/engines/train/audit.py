"""Audits of what an engine trains and of what it must not: gradient, optimizer steps, frozen tensors, the rollout's weights.

    begin ─► for each mini-batch: check_split, forward_backward, check_loss, optimizer_step ─► schedule_step ─► end: findings

Tensors are checksummed a few at a time, others after every update, so that an update pays for megabytes, whatever the model's size.
What a rank finds is reported on every rank: one that stopped alone would leave the others in a collective.
"""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.engines.train.optimizer import local
from lockstep.engines.train.token_engine import TokenEngine
from lockstep.engines.train.train_engine import LossFn, MicroBatching, TrainEngine
from lockstep.engines.train.trial import SplitTrials, split_tolerance
from lockstep.models.shared_weights import shared_tensors
from lockstep.models.split_weights import split_of
from lockstep.protocol.columns import Batch
from lockstep.utils.audit import Audits
from lockstep.utils.distributed import merged_over_ranks, summed_over_ranks
from lockstep.utils.fingerprint import fingerprint, fingerprints

SAMPLE_TENSORS, SAMPLE_BYTES = 4, 2**26
"""Most tensors that are checksummed after an update, and the size at which no more are added."""
PIECE_BYTES = 2**24
"""Bytes of a tensor that are enough to see whether training changed it."""


class Rotation:
    """Some of many names, others at every call, all of them in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, tensors: Mapping[str, Tensor]) -> list[str]:
        names = list(tensors)
        chosen: list[str] = []
        size = 0
        while len(chosen) < min(SAMPLE_TENSORS, len(names)) and size < SAMPLE_BYTES:
            name = names[self._next % len(names)]
            chosen.append(name)
            size += tensors[name].nbytes
            self._next += 1
        return chosen


class Unchanged:
    """Tensors that keep their bits: all are checksummed once, then a few at every check."""

    def __init__(self) -> None:
        self._noted: dict[str, int] | None = None
        self._rotation = Rotation()

    @property
    def is_noted(self) -> bool:
        return self._noted is not None

    def note(self, tensors: Mapping[str, Tensor]) -> None:
        self._noted = dict(zip(tensors, fingerprints(tensors.values())))

    def changed(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Those of the sample that differ from what was noted."""
        noted = self._noted or {}
        chosen = self._rotation.choose({name: tensor for name, tensor in tensors.items() if name in noted})
        found = fingerprints(tensors[name] for name in chosen)
        return [name for name, value in zip(chosen, found) if value != noted[name]]


class Changing:
    """Tensors of which an update changes some: a few are compared, and all of them in the next update if none had changed."""

    def __init__(self) -> None:
        self._noted: dict[str, int] = {}
        self._next = 0
        self._all = False

    def note(self, tensors: Mapping[str, Tensor]) -> None:
        """Checksum the sample by which the next update is judged."""
        names = list(tensors)
        if not self._all and len(names) > 4:
            # neighbours, since one of an adapter's two matrices may have no gradient, and some far from them
            starts = (self._next, self._next + len(names) // 2)
            names = [names[(start + i) % len(names)] for start in starts for i in (0, 1)]
            self._next += 1
        self._noted = dict(zip(names, fingerprints(_piece(tensors[name]) for name in names)))

    def none_changed(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether no tensor of any rank has changed since it was noted. Collective."""
        found = fingerprints(_piece(tensors[name]) for name in self._noted)
        changed = sum(now != before for now, before in zip(found, self._noted.values()))
        num_changed, num_noted = summed_over_ranks(changed, len(self._noted))
        were_all = self._all
        self._all = num_noted > 0 and num_changed == 0
        return were_all and self._all


def _piece(tensor: Tensor) -> Tensor:
    tensor = local(tensor)
    return tensor.flatten()[: PIECE_BYTES // tensor.element_size()]


class GradientNorms:
    """Norms of the last optimizer steps, and what is wrong with the next one."""

    LENGTH, NEEDED, MULTIPLE = 64, 8, 20.0

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=self.LENGTH)

    def problem(self, norm: float, clip_grad: float, *, expected: bool) -> str | None:
        """expected: the loss has a gradient that is not zero."""
        if norm == 0.0:
            return "the gradient is zero, though the loss is not constant: nothing is trained" if expected else None
        num_last = len(self._last)
        usual = median(self._last) if num_last >= self.NEEDED else math.inf
        self._last.append(norm)
        if norm <= max(self.MULTIPLE * usual, clip_grad):
            return None
        return f"the gradient norm is {norm:.4g}, {norm / usual:.0f} times the median of the last {num_last} steps"


class UpdateAudit:
    """Audits of one engine that is trained; lives as long as it.

    dtype: in which it computes. clip_grad: gradients are clipped to this norm.
    audits: what becomes of findings; the levels come with every update.
    """

    def __init__(self, engine: TrainEngine, dtype: torch.dtype, device: torch.device, clip_grad: float) -> None:
        self.engine = engine
        self.clip_grad = clip_grad
        self.audits = Audits({})
        self._problems: dict[str, str] = {}
        self._splits = SplitTrials(engine, split_tolerance(dtype, device, experts=_has_experts(engine)))
        self._norms = GradientNorms()
        self._lent = Lent()
        self.forget()

    def forget(self) -> None:
        """A checkpoint was loaded: its tensors may be others."""
        self._frozen = Unchanged()
        self._trained = Changing()
        self._copies = Rotation()

    def begin(self, levels: Mapping[str, str], num_steps: int) -> None:
        """Before an update that takes `num_steps` optimizer steps; the engine is on its device."""
        self.audits.levels = dict(levels)
        self._promised, self._skipped = num_steps, 0
        self._largest_norm = 0.0
        self._rate = self.engine.learning_rate
        self._counts = self.engine.step_counts() if self.audits.checks("optimizer_steps") else None
        if self.audits.checks("frozen_parameters") and not self._frozen.is_noted:
            self._frozen.note(self.engine.frozen_tensors())

    def problem(self, name: str, message: str | None) -> None:
        """This rank found something wrong, unless the message is None; the first of an update is kept."""
        if message is not None:
            self._problems.setdefault(name, message)

    def check_split(self, batch: Batch, loss_fn: LossFn | None, micro: MicroBatching, **options: object) -> None:
        """Before the gradient of a mini-batch. loss_fn: without side effects; None if it is checked elsewhere. Collective."""
        if self.audits.checks("micro_batch_split"):
            self.problem("micro_batch_split", self._splits.problem(batch, loss_fn, micro, **options))

    def check_loss(self, metrics: Mapping[str, float], key: str) -> None:
        """A loss that is not a number can have a gradient of zero, which hides it."""
        if not math.isfinite(metrics[key]):
            self.problem(
                "finite",
                f"{key} is {metrics[key]}: the loss is not a finite number, so this step would train on nothing",
            )

    def optimizer_step(self, *, expects_gradient: bool) -> float:
        """Take the engine's step; returns the gradient norm. A gradient that is not finite is never applied.

        expects_gradient: the loss has a gradient, on this rank's rows at least.
        """
        self._settle()
        try:
            norm = self.engine.optimizer_step()
        except FloatingPointError as error:
            if self.audits.levels.get("finite", "stop") == "stop":
                raise
            self.problem("finite", f"{error}; the weights are unchanged, the update is skipped")
            norm = math.nan
        if not math.isfinite(norm):
            self._skipped += 1
            return norm
        self._largest_norm = max(self._largest_norm, norm)
        self.problem("gradient", self._norms.problem(norm, self.clip_grad, expected=expects_gradient))
        return norm

    def end(self) -> dict[str, str]:
        """After the schedule's step; returns the findings, the same on all ranks. Collective."""
        if self.audits.checks("optimizer_steps"):
            self.problem("optimizer_steps", self._step_problem())
        if self.audits.checks("frozen_parameters"):
            changed = self._frozen.changed(self.engine.frozen_tensors())
            if changed:
                self.problem(
                    "frozen_parameters", f"training changed {changed[0]}, which is not trained{_more(changed)}"
                )
        if self.audits.checks("weights"):
            self.problem("weights", self._copy_problem())
        self._settle()
        return self.audits.take_findings()

    def check_lent(self, module: nn.Module | None, version: int) -> None:
        """Inside `lend_weights`, before the first request after an update: the rollout's module has the engine's weights.

        module: None on a rank that does not generate. version: of the policy. Collective.
        """
        if "weights" in self.audits.levels and self.audits.checks("weights"):  # known after the first update
            self.problem("weights", self._lent.problem(self.engine, module, version))
            self._settle()

    def _step_problem(self) -> str | None:
        counts = self.engine.step_counts()
        promised = self._promised - self._skipped
        tensors = self.engine.trained_tensors()
        # smaller steps can vanish in the rounding of a weight
        moves = promised > 0 and self._rate > 1e-8 and self._largest_norm > 1e-6
        is_stuck = self._trained.none_changed(tensors) if moves else False  # collective: before any rank returns
        self._trained.note(tensors)
        if counts is not None and self._counts is not None:
            taken, scheduled = (now - before for now, before in zip(counts, self._counts))
            if taken != promised:
                skipped = f", {self._skipped} of them skipped" if self._skipped else ""
                return f"the optimizer took {taken} steps in an update of {self._promised} mini-batches{skipped}"
            if scheduled != 1:
                return f"the learning-rate schedule took {scheduled} steps in one update"
        if is_stuck:
            return (
                f"no parameter changed in an update of {promised} optimizer steps with a learning rate of {self._rate:g} and a "
                f"gradient norm of {self._largest_norm:.4g}: does the optimizer have the model's parameters?"
            )
        return None

    def _copy_problem(self) -> str | None:
        copies = self.engine.copied_tensors()
        chosen = self._copies.choose({name: copy for name, (_, copy) in copies.items()})
        wrong = [name for name in chosen if not _is_copy(*copies[name])]
        if not wrong:
            return None
        return f"the weights that compute differ from the master weights after an update: {wrong[0]}{_more(wrong)}"

    def _settle(self) -> None:
        """Report what any rank found. Collective."""
        found = merged_over_ranks(self._problems)
        self._problems.clear()
        for name in sorted(found):
            self.audits.found(name, found[name])


def _has_experts(engine: TrainEngine) -> bool:
    if not isinstance(engine, TokenEngine):
        return False
    config = engine.model.hf_config.get_text_config()
    return any((getattr(config, name, 0) or 0) > 1 for name in ("num_experts", "num_local_experts", "n_routed_experts"))


class Lent:
    """The rollout's module after an update: tensors that it shares are the engine's own, gathered ones have the same bits."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._number = 0

    def problem(self, engine: TrainEngine, module: nn.Module | None, version: int) -> str | None:
        """Collective. No-op if this version was checked."""
        if version == self._version:
            return None
        self._version = version
        own: dict[str, Any] = {}
        if module is not None:
            own = dict(shared_tensors(module))
        split = None if module is None else split_of(module)
        wrong = []
        for name, tensor in engine.lent_weights(self._number):
            if name not in own:
                wrong += [name] if own else []
                continue
            expected = tensor if split is None else split.take(name, tensor)
            if not _same(own[name], expected):
                wrong.append(name)
        self._number += 2
        if not wrong:
            return None
        return (
            f"the rollout's weights are not the trainer's after update {version}: {wrong[0]}{_more(wrong)}; its samples would "
            "not come from this policy"
        )


def _same(one: Tensor, two: Tensor) -> bool:
    """The same memory, or the same bits."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    is_shared = one.data_ptr() == two.data_ptr() and one.stride() == two.stride() and one.device == two.device
    return is_shared or fingerprint(one) == fingerprint(two)


def _is_copy(master: Tensor, copy: Tensor) -> bool:
    master, copy = local(master), local(copy)
    num = PIECE_BYTES // master.element_size()
    return torch.equal(master.flatten()[:num].to(copy.dtype), copy.flatten()[:num])


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more of those checked)" if len(names) > 1 else ""


class ReferenceAudit:
    """The reference policy computes what it computed at first: its tensors keep their bits, a few fixed rows their log-probs.

    has_own_weights: False for an actor with its adapters off, whose base `UpdateAudit` watches.
    bound: of the mean difference of log-probs.
    """

    EVERY = 20
    """Passes from one forward of the fixed rows to the next."""

    def __init__(self, engine: TrainEngine, dtype: torch.dtype, *, has_own_weights: bool) -> None:
        self.engine = engine
        self.has_own_weights = has_own_weights
        self.bound = 1e-4 if dtype == torch.float32 else 0.02  # a change of shapes or kernels gives 0.01
        self.audits = Audits({})
        self._weights = Unchanged()
        self._first: Tensor | None = None
        self._num_passes = 0

    def check(self, levels: Mapping[str, str], rows: Batch, **options: object) -> dict[str, str]:
        """In a pass of the reference, whose engine is on its device; returns the findings, the same on all ranks. Collective."""
        self.audits.levels = dict(levels)
        if not self.audits.checks("reference_policy"):
            return {}
        problems: dict[str, str] = {}
        if self.has_own_weights:
            tensors = self.engine.frozen_tensors()
            if not self._weights.is_noted:
                self._weights.note(tensors)
            if changed := self._weights.changed(tensors):
                problems["reference_policy"] = f"the reference policy's {changed[0]} changed{_more(changed)}"
        if self._num_passes % self.EVERY == 0:
            mask = rows["response_mask"]
            log_probs = self.engine.forward(rows, MicroBatching(key="reference_policy"), **options)["log_probs"] * mask
            self._first = log_probs if self._first is None else self._first
            gap = float((log_probs - self._first).abs().sum() / mask.sum())
            if not gap <= self.bound:
                problems["reference_policy"] = (
                    f"the reference policy's log-probs of a fixed text differ by {gap:.4g} on average from those at first (bound "
                    f"{self.bound:g}): it is being trained, or adapters are not off"
                )
        self._num_passes += 1
        for name, message in merged_over_ranks(problems).items():
            self.audits.found(name, message)
        return self.audits.take_findings()
