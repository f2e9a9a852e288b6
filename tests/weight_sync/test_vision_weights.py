"""A vision-language policy as a worker: images reach rollout and training, and updates send the tower too."""

from pathlib import Path

import pytest
import torch

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.data.image_prompts import ImageEncoder
from lockstep.data.images import read_image
from lockstep.models.processor import load_processor
from lockstep.models.vision import tower_parameters
from lockstep.protocol import DataProto, object_array
from lockstep.protocol.images import IMAGES
from lockstep.protocol.tokens import read
from lockstep.trainer.ppo.agent_rollout import with_responses
from lockstep.utils.audit import AuditError
from lockstep.weight_sync.buckets import names_of
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker
from tests.tiny import write_rows
from tests.tiny_vision import image_message, save_tiny_vision_model, tiny_image
from tests.weight_sync.copies import Copy


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ActorRolloutRefConfig:
    folder = tmp_path_factory.mktemp("policy")
    save_tiny_vision_model(folder / "model", "qwen3_vl")
    write_rows(folder / "train.parquet")
    overrides = [
        f"actor_rollout_ref.model.path={folder}/model",
        f"data.train_files={folder}/train.parquet",
        "actor_rollout_ref.rollout.name=embedded",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=naive",
        "data.max_prompt_length=96",
        "data.max_response_length=8",
        "trainer.device=cpu",
    ]
    return load_config(PPOConfig, overrides).actor_rollout_ref


def prompts(model: str) -> DataProto:
    """Two samples of each: one image, another under the same text, no image."""
    encoder = ImageEncoder(load_processor(Path(model)))
    text = encoder.processor.apply_chat_template(image_message("how many?"), add_generation_prompt=True, tokenize=False)
    rows = [encoder(text, [read_image(tiny_image(32, 48, seed=seed))]) for seed in (1, 2)]
    pairs = [rows[0], rows[0], rows[1], rows[1], ([5, 6, 7], None), ([5, 6, 7], None)]
    return DataProto.from_dict(
        tensors={"sampling_seed": torch.arange(6)},
        non_tensors={
            "raw_prompt_ids": object_array([ids for ids, _ in pairs]),
            IMAGES: object_array([images for _, images in pairs]),
        },
        meta_info={"validate": False, "greedy": False, "global_steps": 1},
    )


def assert_policies_agree(actor: ActorRolloutRefWorker, rollout: ActorRolloutRefWorker, rows: DataProto) -> None:
    """The trainer's log-probs of what the rollout sampled are those of the rollout."""
    batch = with_responses(rows[:], rollout.generate_sequences(rows))
    expected = read(batch.tensors, "rollout_log_probs")
    mask = read(batch.tensors, "response_mask").bool()
    got = read(actor.compute_log_prob(batch).tensors, "old_log_probs")
    torch.testing.assert_close(got[mask], expected[mask], atol=1e-4, rtol=0)
    responses = read(batch.tensors, "responses")
    assert not torch.equal(responses[0], responses[2])


def test_rollout_and_training_agree_on_images(config: ActorRolloutRefConfig) -> None:
    """Lent weights: the rollout's tower is the trainer's."""
    worker = ActorRolloutRefWorker(config, "actor_rollout", "cpu")
    worker.init_model()
    rows = prompts(config.model.path)
    assert_policies_agree(worker, worker, rows)
    with torch.no_grad():
        for parameter in tower_parameters(worker.actor.model.transformer).values():
            parameter.mul_(1.3)
    assert_policies_agree(worker, worker, rows)


def test_updates_send_the_tower(config: ActorRolloutRefConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [ActorRolloutRefWorker(config, role, "cpu") for role in ("actor", "rollout")]
    for worker in workers:
        worker.init_model()
    pair = Copy(*workers)
    pair.train()
    pair.update()
    tower = set(tower_parameters(pair.actor.actor.model.transformer))
    assert tower and tower <= set(names_of(pair.rollout._layout))
    assert_policies_agree(pair.actor, pair.rollout, prompts(config.model.path))
    finish = pair.engine.finish_update

    def change_tower(version: int) -> None:
        finish(version)
        next(p for n, p in pair.engine.module.named_parameters() if n in tower).data.view(-1)[0] += 1  # type: ignore[attr-defined]

    monkeypatch.setattr(pair.engine, "finish_update", change_tower)
    with pytest.raises(AuditError, match=r"model\.visual\.\S+ differs \(1 of"):
        pair.update()
