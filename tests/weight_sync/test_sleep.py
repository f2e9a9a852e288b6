"""An engine in the actor's process may drop its weights while it sleeps: the worker sends them again before the next request."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.engines.rollout import ROLLOUT_ENGINES, GenerationRequest, SamplingParams
from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from lockstep.utils.audit import AuditError
from lockstep.weight_sync import CANARY_METRIC, WeightSync, canary_bound
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker
from tests.tiny import save_tiny_model, write_rows
from tests.weight_sync.copies import OneWorker


class Dropping(EmbeddedEngine):
    """Holds a copy in the actor's process; `sleep` clears it if its owner allows."""

    info = replace(EmbeddedEngine.info, shares_weights=False, takes_adapters=False)
    num_loads = 0

    def sleep(self) -> None:
        super().sleep()
        if self.drops_weights:
            with torch.no_grad():
                for parameter in self.module.parameters():
                    parameter.zero_()
            self.has_weights = False

    def begin_update(self) -> None:
        self.num_loads += 1


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActorRolloutRefWorker]:
    monkeypatch.setitem(ROLLOUT_ENGINES._entries, "dropping", Dropping)
    save_tiny_model(tmp_path / "model")
    write_rows(tmp_path / "train.parquet")
    overrides = [
        f"actor_rollout_ref.model.path={tmp_path}/model",
        f"data.train_files={tmp_path}/train.parquet",
        "data.max_prompt_length=40",
        "data.max_response_length=8",
        "trainer.device=cpu",
    ]
    config = load_config(PPOConfig, overrides).actor_rollout_ref
    config = replace(config, rollout=replace(config.rollout, name="dropping"))
    made = ActorRolloutRefWorker(config, "actor_rollout", "cpu")
    made.init_model()
    yield made


def complete(worker: ActorRolloutRefWorker) -> Any:
    request = GenerationRequest([5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True))
    return worker._complete([request])[0]


def sync_of(worker: ActorRolloutRefWorker) -> WeightSync:
    group: Any = OneWorker(worker)
    return WeightSync(group, group, "in_process", canary_bound(torch.float32))


def test_dropped_weights_are_sent_again(worker: ActorRolloutRefWorker) -> None:
    engine: Any = worker.rollout
    assert not engine.has_weights, "asleep until the first update"
    metrics = sync_of(worker).run(3)
    assert metrics[CANARY_METRIC] < 1e-4 and metrics["weight_sync/gb"] > 0
    assert engine.has_weights and engine.num_loads == 1, "the canary leaves the engine awake for the rollout"
    first = complete(worker)
    assert not engine.has_weights and engine.num_loads == 1
    again = complete(worker)
    assert engine.num_loads == 2 and again == first and again.policy_versions == [3] * 6


def test_weights_that_have_changed_are_not_sent_as_the_old_version(worker: ActorRolloutRefWorker) -> None:
    sync_of(worker).run(0)
    complete(worker)
    worker.has_trained = True
    with pytest.raises(RuntimeError, match="the actor has trained since its weights were last sent"):
        complete(worker)


def test_metrics_do_not_keep_the_engine_alive(worker: ActorRolloutRefWorker) -> None:
    """vLLM's engines of one process share its process groups, which the last one takes with it."""
    engine = weakref.ref(worker.rollout)
    worker.memory.subtract(worker.rollout.released_bytes)
    del worker.rollout
    gc.collect()
    assert engine() is None


def test_weights_sent_again_are_checked(worker: ActorRolloutRefWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    sync_of(worker).run(0)
    complete(worker)
    update = worker.rollout.update_weights
    dropped = "model.norm.weight"
    monkeypatch.setattr(worker.rollout, "update_weights", lambda ws: update(w for w in ws if w[0] != dropped))
    with pytest.raises(AuditError, match=r"model\.norm\.weight differs"):
        complete(worker)
