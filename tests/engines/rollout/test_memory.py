"""Size of the KV cache: vLLM's meaning of `gpu_memory_utilization`."""

import logging

import pytest

from lockstep.engines.rollout.embedded.model_runner import ModelRunner, kv_cache_bytes
from lockstep.kernels.activation_memory import CACHE_SHARE_OF_FREE
from tests.engines.rollout.rollout_cases import embedded, mixed_requests, tiny_model

GIB = 2**30


@pytest.mark.parametrize(
    ("utilization", "free", "weights", "cache"),
    [
        (0.5, 70, 10, 30),  # 80 * 0.5 - 10; the free memory does not matter
        (0.5, 40, 10, 30),  # nor do 30 GiB of optimizer state
        (0.9, 20, 10, 20 * CACHE_SHARE_OF_FREE),
        (1.0, 80, 0, 80 * CACHE_SHARE_OF_FREE),
    ],
)
def test_cache_gets_the_share_of_the_total_without_the_weights(
    utilization: float, free: int, weights: int, cache: float
) -> None:
    assert kv_cache_bytes(utilization, 80 * GIB, free * GIB, weights * GIB) == cache * GIB


def test_engine_logs_a_cache_smaller_than_max_num_seqs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = embedded(tiny_model(), max_num_seqs=4)
    monkeypatch.setattr(ModelRunner, "max_num_blocks", lambda self, utilization, num_slots: 20)
    with caplog.at_level(logging.INFO):
        engine.generate(mixed_requests())
    (message,) = [r.getMessage() for r in caplog.records if "KV cache" in r.getMessage()]
    assert "the KV cache has 20 blocks" in message and "gpu_memory_utilization" in message


def test_nothing_left_is_an_error_that_names_what_to_set() -> None:
    with pytest.raises(
        ValueError, match=r"gpu_memory_utilization=0\.1: .* 8\.0 GiB .* 80\.0 GiB .* set more than 0\.20"
    ):
        kv_cache_bytes(0.1, 80 * GIB, 60 * GIB, 16 * GIB)
    with pytest.raises(ValueError, match=r"none of the GPU's 80\.0 GiB are free; set .*optimizer_offload=true"):
        kv_cache_bytes(0.5, 80 * GIB, 0, 16 * GIB)
