"""Weight transfer to a rollout in other processes: buckets, fingerprints, both transports, the audit."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig, CheckpointEngineConfig
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.single_controller import Future, FutureList
from lockstep.single_controller.local import LocalFuture
from lockstep.trainer.ppo.weight_sync import WeightSync
from lockstep.utils.audit import AuditError
from lockstep.utils.fingerprint import PERIOD, fingerprint
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker
from lockstep.workers.weight_transfer import (
    BroadcastGroup,
    fingerprint_of,
    layout_of,
    open_store,
    pack_buckets,
    unpack_bucket,
)

SHAPES = [("a", (3, 5)), ("b", (7,)), ("c", ()), ("d", (2, 2))]


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
    buckets = list(pack_buckets(iter(sent.items()), layout))
    received = dict(pair for flat, bucket in zip(buckets, layout) for pair in unpack_bucket(flat, bucket))
    assert received.keys() == sent.keys()
    for name, tensor in received.items():
        assert tensor.dtype == dtype and torch.equal(tensor, sent[name].to(dtype))


def test_unaligned_tensor_is_read() -> None:
    layout = layout_of([("odd", (3,)), ("x", (2,))], torch.bfloat16, 1 << 20)
    layout[0][1] = replace(layout[0][1], dtype=torch.float32)
    sent = {"odd": torch.ones(3), "x": torch.tensor([1.5, -2.5])}
    (flat,) = pack_buckets(iter(sent.items()), layout)
    received = dict(unpack_bucket(flat, layout[0]))
    assert torch.equal(received["x"], sent["x"])


def test_wrong_weight_order_is_refused() -> None:
    layout = layout_of(SHAPES, torch.float32, 1 << 20)
    with pytest.raises(ValueError, match="weight order mismatch: expected 'a', got 'b'"):
        list(pack_buckets(iter(reversed(list(weights().items())[:2])), layout))


def test_fingerprint_depends_on_every_bit_and_position() -> None:
    flat = torch.arange(11, dtype=torch.uint8)
    for i in range(11):
        for bit in range(8):
            changed = flat.clone()
            changed[i] ^= 1 << bit
            assert fingerprint(changed) != fingerprint(flat)
    assert fingerprint(flat.roll(2)) != fingerprint(flat), "moved words count"
    assert fingerprint(torch.zeros(0, dtype=torch.uint8)) == 0


def test_fingerprint_of_a_large_bucket_is_the_sum_over_its_words() -> None:
    words = torch.randint(-(2**15), 2**15, (64 * PERIOD + 1000,), dtype=torch.int16)
    place = torch.arange(len(words)) % PERIOD + 1
    assert fingerprint(words.view(torch.uint8)) == int((words.long() * place).sum())


def test_fingerprint_of_a_model_equals_that_of_its_buckets() -> None:
    model = torch.nn.Linear(3, 2)
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    layout = layout_of(shapes, torch.float32, 16)
    sent = sum(fingerprint(flat) for flat in pack_buckets(model.named_parameters(), layout))
    assert fingerprint_of(model, layout) == sent
    with torch.no_grad():
        model.bias[1] += 1e-7
    assert fingerprint_of(model, layout) != sent


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


class OneWorker:
    """A worker as a group of one; asynchronous calls run when their result is requested."""

    world_size = 1

    def __init__(self, worker: ActorRolloutRefWorker) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            output = getattr(self.worker, name)(*(arg.get() if isinstance(arg, Future) else arg for arg in args))
            return FutureList([LocalFuture(output)]) if name in ("weight_bucket", "load_bucket") else [output]

        return call


@pytest.fixture(scope="module")
def workers(tiny_run_files: Path) -> tuple[ActorRolloutRefWorker, ActorRolloutRefWorker]:
    """A separate actor and rollout, with buckets of at most a megabyte."""
    overrides = [
        f"actor_rollout_ref.model.path={tiny_run_files}/model",
        f"data.train_files={tiny_run_files}/train.parquet",
    ]
    config: ActorRolloutRefConfig = load_config(PPOConfig, overrides).actor_rollout_ref
    engine = CheckpointEngineConfig(backend="naive", update_weights_bucket_megabytes=1)
    config = replace(config, rollout=replace(config.rollout, checkpoint_engine=engine))
    made = [ActorRolloutRefWorker(config, role, "cpu") for role in ("actor", "rollout")]
    for worker in made:
        worker.init_model()
    return made[0], made[1]


def test_update_reaches_the_rollout(workers: tuple[ActorRolloutRefWorker, ActorRolloutRefWorker]) -> None:
    actor, rollout = workers
    sync = WeightSync(OneWorker(actor), OneWorker(rollout), "naive")  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in actor.actor.model.parameters():
            parameter.add_(0.01)
    sync.run(3)
    assert rollout.rollout.policy_version == 3
    sent = dict(actor.actor.weights())
    state = rollout.generator.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in sent.items())
    assert len(sent) == len(list(rollout.generator.parameters()))


def test_corrupt_bucket_stops_the_run(
    workers: tuple[ActorRolloutRefWorker, ActorRolloutRefWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, rollout = workers
    sync = WeightSync(OneWorker(actor), OneWorker(rollout), "naive")  # type: ignore[arg-type]
    load = rollout.load_bucket

    def load_changed(index: int, flat: np.ndarray) -> None:
        flat = flat.copy()
        flat[7] ^= 1
        load(index, flat)

    monkeypatch.setattr(rollout, "load_bucket", load_changed)
    with pytest.raises(AuditError, match=r"differ from the actor's after update 4 on 1 of 1 ranks \(first: rank 0\)"):
        sync.run(4)


def test_read_only_bucket_is_loaded(workers: tuple[ActorRolloutRefWorker, ActorRolloutRefWorker]) -> None:
    """As received from an object store."""
    actor, rollout = workers
    actor.weight_layout()
    rollout.expect_weights(actor._layout)
    for index in range(len(actor._layout)):
        flat = actor.weight_bucket(index)
        assert flat is not None
        flat.flags.writeable = False
        rollout.load_bucket(index, flat)
    assert rollout.weights_fingerprint(5) == actor.sent_fingerprint()
