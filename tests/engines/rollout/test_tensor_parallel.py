"""Several ranks decode with one copy of the weights between them: the same tokens and log-probs as one rank, on all of them."""

from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.engines.rollout import Completion
from tests.engines.rollout.rollout_cases import assert_same, embedded, mixed_requests, tiny_model
from tests.engines.train.ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


def generate(kind: str, size: int, changes: dict[str, Any], sampling: dict[str, Any]) -> tuple[list[Completion], int]:
    """The completions, and the number of weights that this rank has."""
    model = tiny_model(kind, **changes)
    engine = embedded(model, tensor_model_parallel_size=size)
    return engine.generate(mixed_requests(**sampling)), sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "kind", ["qwen2", "qwen3", "llama", "smollm", "gemma2", "phi3", "gpt_oss", "mixtral", "qwen3_moe"]
)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_decode_as_one(kind: str, size: int, ranks: Ranks) -> None:
    expected, _ = generate(kind, 1, {}, {})
    for completions, _ in ranks.run(size, generate, kind, size, {}, {}):
        assert_same(completions, expected)
