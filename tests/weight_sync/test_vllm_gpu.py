"""vLLM in the trainer's process on a GPU: sleep, staged wake-up, updates and their proof."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.engines.rollout import (
    Completion,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
    vllm_worker as in_vllm,
)
from lockstep.utils.audit import AuditError
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker
from tests.tiny import save_tiny_model, write_rows
from tests.weight_sync.copies import Copy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]
CLOSE = 0.1
"""Canary of a tiny model in bfloat16."""
MB = 2**20


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    """With CUDA graphs. vLLM can sleep in one engine per process: run each file of such tests in its own."""
    folder = tmp_path_factory.mktemp("hybrid")
    save_tiny_model(folder / "model", hidden_size=128, num_attention_heads=2, tie_word_embeddings=True)
    write_rows(folder / "train.parquet")
    overrides = [
        f"actor_rollout_ref.model.path={folder}/model",
        f"data.train_files={folder}/train.parquet",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
        "data.max_prompt_length=160",
        "data.max_response_length=32",
        "trainer.device=cuda",
    ]
    config = load_config(PPOConfig, overrides).actor_rollout_ref
    worker = ActorRolloutRefWorker(config, "actor_rollout", "cuda")
    worker.init_model()
    made = Copy(worker, worker, torch.bfloat16)
    assert not made.engine.has_weights and used() < 8 << 30, "asleep until the first update"
    assert made.update() < CLOSE
    yield made


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def requests() -> list[GenerationRequest]:
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    return [GenerationRequest(list(range(3, 3 + n)), sampling, seed=n) for n in (5, 40, 130)]


def test_cycles_with_flat_memory(hybrid: Copy) -> None:
    engine, asleep = hybrid.engine, []
    for _ in range(5):
        completions = hybrid.actor._complete(requests())
        assert all(c.policy_version == hybrid.version for c in completions)
        assert not engine.has_weights and engine.released_bytes() > 8 << 30
        asleep.append(used())
        hybrid.train()
        engine.begin_update()
        with_weights = used()
        assert with_weights < asleep[-1] + (1 << 30), "the cache still sleeps"
        assert hybrid.update() < CLOSE
        assert used() > with_weights + (8 << 30) and engine.released_bytes() == 0
    assert max(asleep[1:]) - min(asleep[1:]) <= 8 * MB
    metrics = hybrid.actor.memory.metrics()
    assert metrics["perf/max_memory_allocated_gb/gen"] > 8 > metrics["perf/max_memory_allocated_gb/update_weights"]
    assert metrics["perf/memory_used_gb/gen"] > 8 > metrics["perf/memory_used_gb/update_weights"]


def test_weights_come_back_without_an_update(hybrid: Copy) -> None:
    """Sent again by the actor, or from host memory."""
    hybrid.train()
    hybrid.update()
    engine = hybrid.engine
    expected = hybrid.actor._complete(requests())
    assert not engine.has_weights
    assert hybrid.actor._complete(requests()) == expected
    engine.drops_weights = False
    try:
        hybrid.actor.restore_weights()
        engine.sleep()
        assert engine.has_weights and engine.released_bytes() > 8 << 30
        assert hybrid.actor._complete(requests()) == expected
    finally:
        engine.drops_weights = True


def test_aborted_requests_go_on(hybrid: Copy) -> None:
    """With their tokens kept. vLLM draws the rest from another random stream, so only the first part is the same."""
    hybrid.actor.restore_weights()
    engine = hybrid.engine
    whole = engine.generate(requests())
    with engine.serving():
        for place, request in enumerate(requests()):
            engine.add(place, request)
        for _ in range(8):
            engine.step()
        parts = engine.abort(range(3))
        assert sorted(parts) == [0, 1, 2] and not engine.unfinished()
    for place, request in enumerate(requests()):
        part = parts[place]
        assert part.stop_reason == "abort" and 0 < len(part.token_ids) < 24
        rest = engine.generate([request.after(part.token_ids)])[0]
        assert part.token_ids == whole[place].token_ids[: len(part.token_ids)]
        assert rest.stop_reason == "length" and len(part.token_ids) + len(rest.token_ids) == 24


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_dropped_tensor(hybrid: Copy, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    update = hybrid.engine.update_weights
    with monkeypatch.context() as planted:
        planted.setattr(hybrid.engine, "update_weights", lambda ws: update(w for w in ws if w[0] != name))
        hybrid.train()
        with pytest.raises(AuditError, match=rf"{name} was not received \(1 of \d+ tensors\)"):
            hybrid.update()
    assert hybrid.update() < CLOSE


def test_part_of_a_fused_tensor_that_was_not_loaded(hybrid: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = in_vllm.WeightUpdates.lockstep_finish_update

    def finish_with_another_key(worker: Any) -> str:
        found = finish(worker)
        fused = worker.get_model().model.layers[1].self_attn.qkv_proj.weight
        fused.data[128].add_(0.01)  # the first row of k_proj
        return found

    with monkeypatch.context() as planted:
        planted.setattr(in_vllm.WeightUpdates, "lockstep_finish_update", finish_with_another_key)
        hybrid.train()
        with pytest.raises(AuditError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight differs \(1 of \d+"):
            hybrid.update()
    assert hybrid.update() < CLOSE


def test_stale_prefix_cache(hybrid: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    def finish_without_reset(version: int) -> None:
        hybrid.engine._on_worker("lockstep_finish_update")
        RolloutEngine.finish_update(hybrid.engine, version)

    with monkeypatch.context() as planted:
        planted.setattr(hybrid.engine, "_salt", lambda: "always the same")
        planted.setattr(hybrid.engine, "finish_update", finish_without_reset)
        hybrid.update()
        for _ in range(10):
            hybrid.train()
        with pytest.raises(AuditError, match="its prefix cache holds keys and values of earlier weights"):
            hybrid.update()
    assert hybrid.update() < CLOSE


def test_completions_are_those_of_the_trainer(hybrid: Copy) -> None:
    """The largest difference of a token's log-prob."""
    from lockstep.workers.rollout_batch import batch_of

    worker = hybrid.actor
    completions: list[Completion] = worker._complete(requests())
    rows = batch_of(requests(), completions, worker.config.rollout, worker.tokenizer.pad_token_id)
    gap = (worker.canary_log_probs(rows) - rows.tensors["rollout_log_probs"]).abs() * rows.tensors["response_mask"]
    assert gap.max() < 2 * CLOSE and gap.sum() / rows.tensors["response_mask"].sum() < CLOSE / 4
