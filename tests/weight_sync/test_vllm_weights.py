"""Weight updates of vLLM in the actor's process: every planted defect stops the run with its cause. See `make test-vllm`."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.engines.rollout import GenerationRequest, RolloutEngine, SamplingParams, VllmEngine
from lockstep.engines.rollout import vllm_worker as in_vllm
from lockstep.utils.audit import AuditError
from lockstep.utils.fingerprint import fingerprint
from lockstep.weight_sync import CANARY_METRIC, WeightSync, canary_bound
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker
from tests.tiny import save_tiny_model, write_rows
from tests.weight_sync.test_weight_sync import OneWorker

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
]


class Hybrid:
    """Actor and vLLM in one worker, and the controller's side of their updates."""

    def __init__(self, worker: ActorRolloutRefWorker, dtype: torch.dtype = torch.float32) -> None:
        self.worker = worker
        group: Any = OneWorker(worker)
        self.sync = WeightSync(group, group, "in_process", canary_bound(dtype))
        self.version = 0

    @property
    def engine(self) -> VllmEngine:
        assert isinstance(self.worker.rollout, VllmEngine)
        return self.worker.rollout

    def train(self) -> None:
        """Change every parameter of the actor."""
        with torch.no_grad():
            for parameter in self.worker.actor.model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        self.worker.actor._refresh()
        self.worker.has_trained = True

    def update(self) -> float:
        self.version += 1
        return self.sync.run(self.version)[CANARY_METRIC]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hybrid]:
    folder = tmp_path_factory.mktemp("hybrid")
    save_tiny_model(folder / "model", num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=request.param)
    write_rows(folder / "train.parquet")
    overrides = [
        f"actor_rollout_ref.model.path={folder}/model",
        f"data.train_files={folder}/train.parquet",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.max_num_seqs=8",
        "actor_rollout_ref.rollout.temperature=0.7",
        "data.max_prompt_length=160",
        "data.max_response_length=8",
        "trainer.device=cpu",
    ]
    config = load_config(PPOConfig, overrides).actor_rollout_ref
    worker = ActorRolloutRefWorker(config, "actor_rollout", "cpu")
    worker.init_model()
    made = Hybrid(worker)
    made.update()  # until then the weights are vLLM's random ones
    yield made


def is_tied(hybrid: Hybrid) -> bool:
    return bool(hybrid.worker.actor.model.hf_config.tie_word_embeddings)


def test_updates_reach_vllm(hybrid: Hybrid) -> None:
    for _ in range(3):
        hybrid.train()
        assert hybrid.update() < 1e-4
        assert hybrid.engine.policy_version == hybrid.version
    assert not hybrid.engine.shares_weights and not hasattr(hybrid.worker, "generator")
    sent = {name: fingerprint(tensor) for name, tensor in hybrid.worker.actor.weights()}
    assert hybrid.engine.fingerprints(list(sent)) == sent
    request = GenerationRequest([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
    assert hybrid.engine.generate([request])[0].policy_version == hybrid.version


def test_skipped_update(hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as planted:
        planted.setattr(hybrid.engine, "update_weights", list)
        hybrid.train()
        with pytest.raises(AuditError, match=r"on rank 0, model\.embed_tokens\.weight was not received"):
            hybrid.update()
    assert hybrid.update() < 1e-4


@pytest.mark.parametrize("dropped", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_dropped_tensor(hybrid: Hybrid, dropped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    update = hybrid.engine.update_weights
    with monkeypatch.context() as planted:
        planted.setattr(hybrid.engine, "update_weights", lambda ws: update(w for w in ws if w[0] != dropped))
        hybrid.train()
        with pytest.raises(AuditError, match=rf"{dropped} was not received \(1 of \d+ tensors\)"):
            hybrid.update()
    assert hybrid.update() < 1e-4


def test_tensor_that_arrived_but_was_not_loaded(hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = in_vllm.WeightUpdates.lockstep_finish_update

    def finish_with_another_norm(worker: Any) -> str:
        found = finish(worker)
        worker.get_model().model.norm.weight.data.add_(1e-6)
        return found

    with monkeypatch.context() as planted:
        planted.setattr(in_vllm.WeightUpdates, "lockstep_finish_update", finish_with_another_norm)
        hybrid.train()
        with pytest.raises(AuditError, match=r"model\.norm\.weight differs \(1 of \d+ tensors\)"):
            hybrid.update()
    assert hybrid.update() < 1e-4


def test_head_left_tied_to_the_old_embedding(hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_tied(hybrid):
        pytest.skip("the head is not tied")
    with monkeypatch.context() as planted:
        planted.setattr(in_vllm.WeightUpdates, "lockstep_tie_head", lambda self, model: None)
        hybrid.train()
        with pytest.raises(AuditError, match=r"lm_head\.weight is .* model\.embed_tokens\.weight, to which it is tied"):
            hybrid.update()
        planted.setattr(in_vllm, "head_problem", lambda model: "")
        with pytest.raises(AuditError, match=r"canary text differ .* not those it computes with"):
            hybrid.update()
    assert hybrid.update() < 1e-4


def test_stale_prefix_cache(hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as planted:
        planted.setattr(hybrid.engine, "_salt", lambda: "always the same")
        assert hybrid.update() < 1e-4, "a reset alone is enough"

        def finish_without_reset(version: int) -> None:
            hybrid.engine._on_worker("lockstep_finish_update")
            RolloutEngine.finish_update(hybrid.engine, version)

        planted.setattr(hybrid.engine, "finish_update", finish_without_reset)
        hybrid.train()
        with pytest.raises(AuditError, match="its prefix cache holds keys and values of earlier weights"):
            hybrid.update()
        planted.undo()
        planted.setattr(hybrid.engine, "finish_update", finish_without_reset)
        hybrid.train()
        assert hybrid.update() < 1e-4, "a salt alone is enough"
