"""The reference page is up to date, and every key is documented."""

from pathlib import Path

from lockstep.config.ppo import PPOConfig
from lockstep.config.reference import field_docs, reference
from lockstep.config.schema import keys

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_every_key_is_documented() -> None:
    assert [key.name for key in keys(PPOConfig).values() if not field_docs(key.owner).get(key.field)] == []


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run `make docs-config`"


def test_page_hides_internal_fields() -> None:
    assert "global_batch_info" not in reference()
    assert "| `lr` | `float`; 0 or more | `1e-05` | Peak learning rate. |" in reference()
    assert "| `response_length` | `int`; greater than 0 | follows `data.max_response_length` |" in reference()
