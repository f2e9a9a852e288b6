"""Weight updates of a rollout that holds a copy: buckets, fingerprints, transports, proof of weights."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig, CheckpointEngineConfig
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.utils.audit import AuditError
from lockstep.utils.fingerprint import PERIOD, fingerprint
from lockstep.weight_sync.broadcast import BroadcastGroup, open_store
from lockstep.weight_sync.buckets import Layout, cast_buckets, layout_of, pack_bucket, unpack_bucket
from lockstep.weight_sync.proof import measured_bound
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker
from tests.models import architectures
from tests.tiny import save_tiny_model, tiny_tokenizer, write_rows
from tests.weight_sync.copies import Copy

SHAPES = [("a", (3, 5)), ("b", (7,)), ("c", ()), ("d", (2, 2))]


def packed(weights: Iterator[tuple[str, Tensor]], layout: Layout) -> Iterator[Tensor]:
    return map(pack_bucket, cast_buckets(weights, layout))


def weights(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in SHAPES}


@pytest.mark.parametrize(
    ("max_bytes", "names"),
    [
        (1 << 20, [["a", "b", "c", "d"]]),
        (92, [["a", "b", "c"], ["d"]]),
        (40, [["a"], ["b", "c"], ["d"]]),
        (1, [["a"], ["b"], ["c"], ["d"]]),
    ],
)
def test_buckets_do_not_exceed_their_size(max_bytes: int, names: list[list[str]]) -> None:
    layout = layout_of(SHAPES, torch.float32, max_bytes)
    assert [[entry.name for entry in bucket] for bucket in layout] == names
    for bucket in layout:
        assert len(bucket) == 1 or sum(entry.num_bytes for entry in bucket) <= max_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_bytes", [1, 40, 1 << 20])
def test_unpacked_weights_have_the_rollouts_dtype(dtype: torch.dtype, max_bytes: int) -> None:
    sent = weights()
    layout = layout_of(SHAPES, dtype, max_bytes)
    buckets = list(packed(iter(sent.items()), layout))
    received = dict(pair for flat, bucket in zip(buckets, layout) for pair in unpack_bucket(flat, bucket))
    assert received.keys() == sent.keys()
    for name, tensor in received.items():
        assert tensor.dtype == dtype and torch.equal(tensor, sent[name].to(dtype))


def test_unaligned_tensor_is_read() -> None:
    layout = layout_of([("odd", (3,)), ("x", (2,))], torch.bfloat16, 1 << 20)
    layout[0][1] = replace(layout[0][1], dtype=torch.float32)
    sent = {"odd": torch.ones(3), "x": torch.tensor([1.5, -2.5])}
    (flat,) = packed(iter(sent.items()), layout)
    received = dict(unpack_bucket(flat, layout[0]))
    assert torch.equal(received["x"], sent["x"])


def test_wrong_weight_order_is_refused() -> None:
    layout = layout_of(SHAPES, torch.float32, 1 << 20)
    with pytest.raises(ValueError, match="weight order mismatch: expected 'a', got 'b'"):
        list(packed(iter(reversed(list(weights().items())[:2])), layout))


@pytest.mark.parametrize("size", [11, 16, 3])
def test_fingerprint_depends_on_every_bit_and_position(size: int) -> None:
    flat = torch.arange(size, dtype=torch.uint8)
    for i in range(size):
        for bit in range(8):
            changed = flat.clone()
            changed[i] ^= 1 << bit
            assert fingerprint(changed) != fingerprint(flat)
    assert fingerprint(torch.arange(4).roll(1)) != fingerprint(torch.arange(4)), "moved words count"
    assert fingerprint(torch.zeros(0, dtype=torch.uint8)) == 0


def test_fingerprint_of_a_large_tensor_is_the_sum_over_its_words() -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (3 * PERIOD + 1000,))
    weights = 2 * (torch.arange(len(words)) % PERIOD) + 1
    assert fingerprint(words) == int((words * weights).sum())
    assert fingerprint(words.view(torch.bfloat16)[1:]) == fingerprint(words.view(torch.bfloat16)[1:].clone())


def test_broadcast_reaches_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    _store, address, port = open_store()
    flat = torch.arange(100, dtype=torch.uint8)
    received: dict[int, Tensor] = {}

    def join(rank: int) -> None:
        group = BroadcastGroup(address, port, rank, 3, torch.device("cpu"), 30)
        if rank == 0:
            group.send(flat)
        else:
            received[rank] = group.receive(100)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert torch.equal(received[1], flat) and torch.equal(received[2], flat)


def test_an_engine_with_its_own_model_gets_the_tensors_of_a_saved_folder(tmp_path: Path) -> None:
    """vLLM loads single experts; the transformers model has those of a layer in one parameter."""
    architectures.save_tiny_model("mixtral", tmp_path / "model", vocab_size=259)
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    write_rows(tmp_path / "train.parquet")
    files = [f"actor_rollout_ref.model.path={tmp_path}/model", f"data.train_files={tmp_path}/train.parquet"]
    config = load_config(PPOConfig, [*files, "trainer.device=cpu"]).actor_rollout_ref
    actor = ActorRolloutRefWorker(replace(config, rollout=replace(config.rollout, name="vllm")), "actor", "cpu")
    actor.init_model()
    announced = [(entry.name, entry.shape) for bucket in actor.weight_layout() for entry in bucket]
    sent = [(name, tensor) for bucket in actor._buckets() for name, tensor in bucket]
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert announced == [(name, tuple(tensor.shape)) for name, tensor in sent]
    assert dict(sent).keys() == saved.keys() and any("experts.1.w2" in name for name in saved)
    assert all(torch.equal(tensor, saved[name].to(tensor.dtype)) for name, tensor in sent)


@pytest.fixture(scope="module", params=["embedded", "hf"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """Separate workers, with buckets of at most a megabyte."""
    folder = tmp_path_factory.mktemp("pair")
    save_tiny_model(folder / "model", tie_word_embeddings=True)
    write_rows(folder / "train.parquet")
    overrides = [
        f"actor_rollout_ref.model.path={folder}/model",
        f"data.train_files={folder}/train.parquet",
        f"actor_rollout_ref.rollout.name={request.param}",
        "actor_rollout_ref.rollout.temperature=0.7",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        "trainer.device=cpu",
    ]
    config: ActorRolloutRefConfig = load_config(PPOConfig, overrides).actor_rollout_ref
    engine = CheckpointEngineConfig(backend="naive", update_weights_bucket_megabytes=1)
    config = replace(config, rollout=replace(config.rollout, checkpoint_engine=engine))
    made = [ActorRolloutRefWorker(config, role, "cpu") for role in ("actor", "rollout")]
    for worker in made:
        worker.init_model()
    return Copy(*made)


def test_changed_bit_stops_the_run(pair: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    load = pair.rollout.load_bucket

    def load_changed(index: int, flat: np.ndarray) -> None:
        flat = flat.copy()
        flat[7] ^= 1
        load(index, flat)

    monkeypatch.setattr(pair.rollout, "load_bucket", load_changed)
    pair.train()
    message = r"after update 5 on 1 of 1 ranks: on rank 0, model\.embed_tokens\.weight differs \(1 of 26 tensors\)"
    with pytest.raises(AuditError, match=message):
        pair.sync.run(5)


def test_rollout_that_computes_with_other_weights_stops_the_run(pair: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fingerprints agree, the log-probs do not."""
    pair.train()
    pair.sync.run(8)
    generate = pair.rollout.rollout.generate

    def generate_with_old_weights(requests: Any) -> Any:
        norm = pair.rollout.rollout.module.get_parameter("model.norm.weight")  # type: ignore[attr-defined]
        norm.data.mul_(1.1)
        try:
            return generate(requests)
        finally:
            norm.data.div_(1.1)

    monkeypatch.setattr(pair.rollout.rollout, "generate", generate_with_old_weights)
    with pytest.raises(
        AuditError, match=r"after update 9 the rollout's log-probs of the canary text differ .* by 0\.\d+ "
    ):
        pair.sync.run(9)


def test_read_only_bucket_is_loaded(pair: Copy) -> None:
    """As received from an object store."""
    actor, rollout = pair.actor, pair.rollout
    rollout.expect_weights(actor.weight_layout())
    for index in range(len(actor._layout)):
        flat = actor.weight_bucket(index)
        assert flat is not None
        flat.flags.writeable = False
        rollout.load_bucket(index, flat)
    assert rollout.finish_update(5) == actor.sent_fingerprints()


def test_unread_tensors_are_listed_once_and_the_bound_is_measured(
    pair: Copy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unread = {"model.norm.weight": "quantised", "lm_head.weight": "quantised"}
    monkeypatch.setattr(pair.engine, "unread_weights", lambda names: unread)
    again = Copy(pair.actor, pair.rollout)
    before = again.sync.bound
    assert [again.update(), again.update()] == pytest.approx([0, 0], abs=1e-4)
    (line,) = [record.getMessage() for record in caplog.records if "bit by bit" in record.getMessage()]
    assert "2 of 26 tensors" in line and "quantised: 2" in line and "lm_head.weight, model.norm.weight" in line
    assert again.sync.bound == before / 10


@pytest.mark.parametrize(("gap", "expected"), [(0.001, 0.03), (0.01, 0.1), (0.2, 0.3)])
def test_later_gaps_are_bound_by_the_first(gap: float, expected: float) -> None:
    assert measured_bound(0.3, gap) == pytest.approx(expected)
