"""What is wrong with a run, in words: rules on its metrics, status, plan and settings. No rule knows of a web page.

    RunView ─► rules (process, samples, updates, reward) ─► Finding: severity, sentence with numbers, evidence, what to try, page

A rule is silent unless its numbers are clear: false alarms are worse than silence. docs/dashboard.md lists the rules.
"""

from lockstep.observability.health import process, reward, samples, updates
from lockstep.observability.health.run_view import SEVERITIES, Finding, RunView

RULES = (*process.RULES, *samples.RULES, *updates.RULES, *reward.RULES)


def findings(run: RunView) -> list[Finding]:
    """The worst first."""
    found = [finding for rule in RULES if (finding := rule(run)) is not None]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
