"""Audits: what becomes of what they find; the gap between the rollout's log-probs and the trainer's with the bound on it."""

import logging
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.utils.device import HostCopy
from lockstep.utils.metrics import MaxOverRanks

logger = logging.getLogger(__name__)

GAP_METRIC = "training/rollout_log_probs_gap"


class AuditError(RuntimeError):
    """A step broke an invariant; the message names it."""


class Audits:
    """What becomes of what the audits of this process find.

    levels: audit -> off | warn | stop, the fields of `trainer.audit`; one that is missing stops.
    """

    def __init__(self, levels: Mapping[str, str]) -> None:
        self.levels = dict(levels)
        self._counts: Counter[str] = Counter()
        self._new: dict[str, str] = {}

    def checks(self, name: str) -> bool:
        """Whether the audit runs."""
        return self.levels.get(name, "stop") != "off"

    def found(self, name: str, message: str) -> None:
        """Audit `name` found something wrong: AuditError, or a finding that the controller logs (the 1st, 2nd, 4th, 8th … time)."""
        if not self.checks(name):
            return
        if self.levels.get(name, "stop") == "stop":
            raise AuditError(f"{message} (audit {name}; trainer.audit.{name}=warn goes on)")
        self._new.setdefault(name, message)

    def take_findings(self) -> dict[str, str]:
        """What a worker found since the last call, for the controller: audit -> message."""
        taken, self._new = self._new, {}
        return taken

    def add(self, findings: Mapping[str, str]) -> None:
        """Those of a worker."""
        self._new = dict(findings) | self._new

    def log(self) -> dict[str, float]:
        """On the controller, at the end of a step: warn of what was found. Returns metrics: in how many steps so far."""
        for name, message in self.take_findings().items():
            self._counts[name] += 1
            if self._counts[name].bit_count() == 1:
                times = f" (found in {self._counts[name]} steps)" if self._counts[name] > 1 else ""
                logger.warning("audit %s: %s%s", name, message, times)
        return {f"audit/{name}": float(count) for name, count in self._counts.items()}


class GapBound:
    """The largest mean |log p_rollout - log p_trainer| that a run allows; it lives as long as the run.

    The first step's gap is what the two forwards differ by on this model. It must stay below a cap, and later gaps below a
    multiple of it. A floor keeps a first gap of nearly zero from being held against later batches.
    dtype: the compute type.
    """

    MULTIPLE = 4.0

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # With the same weights float32 forwards differ by 1e-6 to 1e-4 per token (TF32: 1e-3), bfloat16 and float16 by 1e-3 to
        # 3e-2. A wrong temperature or unrelated weights differ by 0.1 and more.
        self.floor, self.cap = (1e-3, 0.01) if dtype == torch.float32 else (0.03, 0.1)
        self.bound: float | None = None

    def check(self, metrics: dict[str, float]) -> None:
        """AuditError if the gap in the metrics of a `RolloutGap` exceeds the bound. No-op on a batch without tokens."""
        if GAP_METRIC not in metrics:
            return
        gap = metrics[GAP_METRIC]
        bound = self.cap if self.bound is None else self.bound
        if not gap <= bound:
            raise AuditError(
                f"the rollout's log-probs differ from the trainer's by {gap:.4f} per token on average; the bound for "
                f"{str(self.dtype).removeprefix('torch.')} is {bound:.4f}"
                f"{' at the first step' if self.bound is None else ''}. Likely causes: the rollout's weights are not in sync, "
                "a different temperature, or a model whose rollout and training forwards differ. If the difference is "
                "expected, set algorithm.rollout_correction.rollout_is or rollout_rs: then it is corrected and only reported"
            )
        if self.bound is None:
            self.bound = max(self.floor, self.MULTIPLE * gap)


class RolloutGap:
    """Distance between the rollout's probabilities and the trainer's, summed over parts of a batch.

    Also how often their experts differ, if the rollout recorded its own.
    """

    def __init__(self) -> None:
        self._has_routes = False
        self._sums: list[HostCopy] = []
        self._largest: list[HostCopy] = []

    @torch.no_grad()
    def add(self, rollout: Tensor, trainer: Tensor, mask: Tensor, route_mismatch: Tensor | None = None) -> None:
        """Log-probs of one part, of any shape, and the share of layers with other experts."""
        chosen = mask.bool()
        distance = (rollout - trainer).abs().masked_fill(~chosen, 0.0)
        difference = (rollout.exp() - trainer.exp()).abs().masked_fill(~chosen, 0.0)
        self._has_routes = route_mismatch is not None
        rerouted = torch.zeros_like(distance) if route_mismatch is None else route_mismatch * chosen
        sums = torch.stack([chosen.sum(), distance.sum(), difference.sum(), (difference**2).sum(), rerouted.sum()])
        self._sums.append(HostCopy(sums))
        self._largest.append(HostCopy(difference.max()))

    def restart(self) -> None:
        """Drop all parts: they are computed again."""
        self._sums.clear()
        self._largest.clear()

    def sums(self) -> list[float]:
        """The arguments of `metrics`, summed over this rank's parts; sum them over ranks as well."""
        if not self._sums:
            return [0.0] * 5
        values: list[float] = torch.stack([part.read() for part in self._sums]).double().sum(0).tolist()
        return values

    def metrics(
        self, count: float, distance: float, difference: float, squares: float, rerouted: float
    ) -> dict[str, float]:
        """From the sums over all ranks; the largest difference is this rank's. Empty if there was no token."""
        if not count:
            return {}
        mean = difference / count
        variance = (squares - count * mean**2) / (count - 1) if count > 1 else 0.0
        return {
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_max": MaxOverRanks(
                max((float(part.read()) for part in self._largest), default=0.0)
            ),
            "training/rollout_probs_diff_mean": mean,
            "training/rollout_probs_diff_std": max(variance, 0.0) ** 0.5,
            GAP_METRIC: distance / count,
            **({"training/route_mismatch": rerouted / count} if self._has_routes else {}),
        }
