"""Audits: what becomes of what they find."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)


class AuditError(RuntimeError):
    """A step broke an invariant; the message names it.

    audit: its name in `trainer.audit`; None if it is not one of these.
    """

    audit: str | None = None


class Audits:
    """What becomes of what the audits of this process find.

    levels: audit -> off | warn | stop, the fields of `trainer.audit`; one that is missing stops.
    """

    def __init__(self, levels: Mapping[str, str]) -> None:
        self.levels = dict(levels)
        self.counts: Counter[str] = Counter()
        """In how many steps so far each one found something; saved in checkpoints."""
        self._new: dict[str, str] = {}

    def checks(self, name: str) -> bool:
        """Whether the audit runs."""
        return self.levels.get(name, "stop") != "off"

    def found(self, name: str, message: str) -> None:
        """Audit `name` found something wrong: AuditError, or a finding that the controller logs (the 1st, 2nd, 4th, 8th … time)."""
        if not self.checks(name):
            return
        if self.levels.get(name, "stop") == "stop":
            error = AuditError(f"{message} (audit {name}; trainer.audit.{name}=warn goes on)")
            error.audit = name
            raise error
        self._new.setdefault(name, message)

    def take_findings(self) -> dict[str, str]:
        """What a worker found since the last call, for the controller: audit -> message."""
        taken, self._new = self._new, {}
        return taken

    def add(self, findings: Mapping[str, str]) -> None:
        """Those of a worker."""
        self._new = dict(findings) | self._new

    def log(self, keep: Callable[[str, str], str] = lambda name, message: "", *, warn: bool = True) -> dict[str, float]:
        """On the controller, at the end of a step: warn of what was found. Returns metrics: in how many steps so far.

        keep: (audit, message) -> a sentence to add to the message, such as where the batch is, or an empty string.
        warn: False only counts, on a rank whose findings another one logs.
        """
        for name, message in self.take_findings().items():
            self.counts[name] += 1
            if kept := keep(name, message):
                message += f" {kept}" if message.endswith("?") else f". {kept}"
            if warn and self.counts[name].bit_count() == 1:
                times = f" (in {self.counts[name]} steps so far)" if self.counts[name] > 1 else ""
                logger.warning("audit %s%s: %s", name, times, message)
        return {f"audit/{name}": float(count) for name, count in self.counts.items()}
