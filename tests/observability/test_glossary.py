"""The glossary of metrics; `tests/trainer/test_algorithm_matrix.py` checks that it has every metric of real runs."""

from pathlib import Path

from lockstep.observability.curves import DEFAULT_METRICS
from lockstep.observability.glossary import explain, page
from lockstep.observability.step_line import FIELDS

PAGE = Path(__file__).parents[2] / "docs/metrics.md"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `make docs-config`"


def test_names_and_placeholders() -> None:
    assert (explain("critic/score/max") or "").startswith("score of a response")
    assert (explain("reward/reward_failed/mean") or "").startswith("fraction of responses whose scoring failed")
    assert "further number" in (explain("reward/acc/mean") or "")
    assert "pass@n" in (explain("val-core/openai/gsm8k/acc/best@8/mean") or "")
    assert explain("critic/score/median") is None and explain("actor/pg_loss2") is None


def test_metrics_of_console_and_plots_are_explained() -> None:
    shown = [name for patterns in DEFAULT_METRICS.values() for name in patterns if "*" not in name]
    shown += [name for field in FIELDS for name in field.keys if name != "train/time(s)"]  # of verl's SFT
    assert [name for name in shown if explain(name) is None] == []
