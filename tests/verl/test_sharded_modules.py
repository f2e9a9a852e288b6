"""FSDP2, Ulysses, checkpoints and PPO updates of a program's own module: results are those of the plain module."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.protocol import object_array
from lockstep.utils.distributed import init_single_process_group
from lockstep.verl import DataProto
from lockstep.verl.protocol import all_gather_data_proto
from lockstep.verl.utils.checkpoint import FSDPCheckpointManager
from lockstep.verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from lockstep.verl.utils.fsdp_utils import (
    apply_fsdp2,
    fsdp2_clip_grad_norm_,
    fsdp2_load_full_state_dict,
    fsdp_version,
    get_fsdp_full_state_dict,
    get_fsdp_wrap_policy,
    get_init_weight_context_manager,
    init_fn,
    load_fsdp_model_to_gpu,
    load_fsdp_optimizer,
    offload_fsdp_model_to_cpu,
    offload_fsdp_optimizer,
)
from lockstep.verl.utils.ulysses import (
    gather_heads_scatter_seq,
    gather_outputs_and_unpad,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_group,
    set_ulysses_sequence_parallel_group,
    ulysses_pad_and_slice_inputs,
    validate_ulysses_config,
)
from lockstep.verl.workers.actor import DataParallelPPOActor
from lockstep.verl.workers.config import ActorConfig
from lockstep.verl.workers.sharding_manager import FSDPUlyssesShardingManager
from tests.engines.train.ranks import Ranks
from tests.tiny import random_batch, save_tiny_model

pytestmark = pytest.mark.first

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def model_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def step(model: Any, lr: float = 0.1) -> tuple[float, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model(input_ids=IDS, labels=IDS).loss.backward()
    norm = fsdp2_clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return float(norm), optimizer


def train_sharded(folder: Path) -> tuple[Any, ...]:
    """Load on rank 0 alone, shard, train a step, offload and load again; logits before and after, and the gradient norm."""
    config = AutoConfig.from_pretrained(folder)
    with get_init_weight_context_manager()():
        model: Any = model_of(folder) if dist.get_rank() == 0 else AutoModelForCausalLM.from_config(config)
    whole = model.state_dict() if dist.get_rank() == 0 else {}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True}, {"wrap_policy": {}})
    fsdp2_load_full_state_dict(model, whole, mesh)
    before = model(input_ids=IDS).logits.detach().numpy()
    norm, optimizer = step(model)
    offload_fsdp_model_to_cpu(model)
    offload_fsdp_optimizer(optimizer)
    load_fsdp_model_to_gpu(model)
    load_fsdp_optimizer(optimizer, "cpu")
    layers = sum(isinstance(m, torch.distributed.fsdp.FSDPModule) for m in model.modules())
    weights = get_fsdp_full_state_dict(model)
    return before, model(input_ids=IDS).logits.detach().numpy(), norm, fsdp_version(model), layers, len(weights)


def test_a_sharded_step_is_that_of_the_plain_module(ranks: Ranks, folder: Path) -> None:
    model = model_of(folder)
    expected = model(input_ids=IDS).logits.detach().numpy()
    expected_norm, _ = step(model)
    trained = model(input_ids=IDS).logits.detach().numpy()
    assert fsdp_version(model) == 0
    for rank, (before, after, norm, version, layers, num_weights) in enumerate(ranks.run(2, train_sharded, folder)):
        np.testing.assert_allclose(before, expected, atol=1e-5)
        np.testing.assert_allclose(after, trained, atol=1e-3)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
        assert version == 2 and layers >= 3 and (num_weights > 0) == (rank == 0)


def test_policies_and_contexts(folder: Path) -> None:
    model = model_of(folder)
    policy = get_fsdp_wrap_policy(model)
    layer = model.model.layers[0]
    assert policy is not None and policy(module=layer, recurse=False, nonwrapped_numel=0)
    assert not policy(module=model.lm_head, recurse=False, nonwrapped_numel=0)
    assert get_fsdp_wrap_policy(model, {"disable": True}) is None
    by_size = get_fsdp_wrap_policy(model, {"min_num_params": 10})
    assert by_size is not None and by_size(module=layer, recurse=False, nonwrapped_numel=100)
    with pytest.raises(ValueError, match="the model has no layer of class Absent"):
        get_fsdp_wrap_policy(model, {"transformer_layer_cls_to_wrap": ["Absent"]})
    with get_init_weight_context_manager()():
        assert nn.Linear(2, 2).weight.device.type == "cpu"  # rank 0
    assert init_fn(layer) is layer


def sliced_attention() -> tuple[Any, ...]:
    """Through the exchanges and back; the rank's part of 5 tokens, and the gradient of what was gathered."""
    set_ulysses_sequence_parallel_group(dist.group.WORLD)
    try:
        ids = torch.arange(5)[None]
        part, positions, added = ulysses_pad_and_slice_inputs(ids, ids, sp_size=2, pad_value=9)
        local = torch.arange(12.0).view(1, 3, 2, 2) + 100 * dist.get_rank()  # (batch, tokens, heads, width)
        whole = gather_seq_scatter_heads(local, seq_dim=1, head_dim=2, unpadded_dim_size=5)
        back = gather_heads_scatter_seq(whole, head_dim=2, seq_dim=1)
        x = torch.arange(3.0).add(10 * dist.get_rank()).requires_grad_()
        gathered = gather_outputs_and_unpad(x, 0, 0, padding_size=added)
        (gathered * torch.arange(5.0)).sum().backward()
        assert x.grad is not None
        assert positions is not None and torch.equal(back[:, :2], local[:, :2])
        return part.tolist(), positions.tolist(), added, tuple(whole.shape), gathered.tolist(), x.grad.tolist()
    finally:
        set_ulysses_sequence_parallel_group(None)


def test_tokens_are_split_among_ranks_and_joined(ranks: Ranks) -> None:
    first, second = ranks.run(2, sliced_attention)
    assert (first[0], second[0], first[2]) == ([[0, 1, 2]], [[3, 4, 9]], 1) and second[1] == [[3, 4, 0]]
    assert first[3] == (1, 5, 1, 2)
    assert first[4] == second[4] == [0.0, 1.0, 2.0, 10.0, 11.0]
    assert first[5] == [0.0, 2.0, 4.0] and second[5] == [6.0, 8.0, 0.0]  # times the number of ranks


def test_without_a_group_nothing_is_split() -> None:
    x = torch.arange(4.0)
    assert gather_outputs_and_unpad(x, 0) is x and gather_seq_scatter_heads(x, 0, 0) is x
    assert get_ulysses_sequence_parallel_group() is None
    validate_ulysses_config(4, 2)
    with pytest.raises(AssertionError, match="do not divide among 3"):
        validate_ulysses_config(4, 3)


def gathered_rows() -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
    rank = dist.get_rank()
    data = DataProto.from_dict({"x": torch.arange(2) + 10 * rank}, {"name": object_array([f"r{rank}"] * 2)})
    manager = FSDPUlyssesShardingManager(mesh)
    with manager:
        inside = get_ulysses_sequence_parallel_group() is not None
        data = manager.preprocess_data(data)  # type: ignore[assignment]
        joined = data.tensors["x"].tolist(), data.non_tensor_batch["name"].tolist()
        own = manager.postprocess_data(data).tensors["x"].tolist()
    other = DataProto.from_dict({"x": torch.tensor([rank])})
    all_gather_data_proto(other, dist.group.WORLD)
    return inside, joined, own, get_ulysses_sequence_parallel_group(), other.tensors["x"].tolist()


def test_ranks_of_a_sequence_group_get_the_same_rows(ranks: Ranks) -> None:
    for rank, (inside, joined, own, after, gathered) in enumerate(ranks.run(2, gathered_rows)):
        assert inside and after is None and gathered == [0, 1]
        assert joined == ([0, 1, 10, 11], ["r0", "r0", "r1", "r1"]) and own == [10 * rank, 10 * rank + 1]
    data = DataProto.from_dict({"x": torch.arange(2)})
    with FSDPUlyssesShardingManager(None) as manager:
        assert manager.postprocess_data(manager.preprocess_data(data)) is data


def save_and_load(model_folder: Path, target: Path) -> tuple[Any, ...]:
    def sharded() -> tuple[Any, Any, Any]:
        model = model_of(model_folder)
        apply_fsdp2(model, {"mesh": init_device_mesh("cpu", (2,))})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
        return model, optimizer, schedule

    def train(model: Any, optimizer: Any, schedule: Any) -> np.ndarray:
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        out: np.ndarray = model(input_ids=IDS).logits.detach().numpy()
        return out

    first = sharded()
    train(*first)
    torch.manual_seed(7)
    FSDPCheckpointManager(*first).save_checkpoint(str(target), global_step=1)
    drawn, np_drawn = torch.rand(2), np.random.rand()
    expected = train(*first)
    second = sharded()
    FSDPCheckpointManager(*second).load_checkpoint(str(target))
    same_draws = torch.equal(torch.rand(2), drawn) and np.random.rand() == np_drawn
    return expected, train(*second), same_draws, second[2].get_last_lr()


def test_a_checkpoint_continues_where_it_was_saved(ranks: Ranks, folder: Path, tmp_path: Path) -> None:
    for expected, again, same_draws, rate in ranks.run(2, save_and_load, folder, tmp_path / "step"):
        np.testing.assert_array_equal(expected, again)
        assert same_draws and rate == [0.1 / 3]
    names = {file.name for file in (tmp_path / "step").iterdir()}
    assert names >= {f"{part}_world_size_2_rank_{r}.pt" for part in ("model", "optim", "extra_state") for r in (0, 1)}
    assert (tmp_path / "step" / "huggingface" / "config.json").is_file() and "fsdp_config.json" in names


def test_a_checkpoint_of_one_rank(folder: Path, tmp_path: Path) -> None:
    init_single_process_group(torch.device("cpu"))
    model = model_of(folder)
    config = {"save_contents": ["model", "hf_model"], "load_contents": ["model"]}
    manager = FSDPCheckpointManager(model, None, checkpoint_config=config)
    for number in range(3):
        manager.save_checkpoint(str(tmp_path / str(number)), global_step=number, max_ckpt_to_keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "2" / "huggingface", dtype=torch.float32)
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)
    (tmp_path / "3").mkdir()
    with pytest.raises(FileNotFoundError, match="as many ranks as wrote it; found none"):
        manager.load_checkpoint(str(tmp_path / "3"))
    manager.load_checkpoint(str(tmp_path / "2"), del_local_after_load=True)
    assert not (tmp_path / "2").exists()
    base = BaseCheckpointManager(model)
    assert (
        base.should_save_extra
        and not base.should_save_hf_model
        and base.checkpath(None, "hdfs://x") == (False, "hdfs://x")
    )
    with pytest.raises(NotImplementedError):
        base.save_checkpoint("x")


@pytest.mark.parametrize("micro", [None, 2])
def test_updates_of_a_programs_own_module(folder: Path, micro: int | None) -> None:
    """The update does not depend on the micro-batches, and its first step is that of the loss written out."""
    rows = random_batch(4)
    batch = DataProto(rows, meta_info={"temperature": 1.0, "micro_batch_size": micro or 4})
    model = model_of(folder)
    config = ActorConfig(ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=micro, grad_clip=1e9, entropy_coeff=0.01)
    actor = DataParallelPPOActor(config, model, torch.optim.SGD(model.parameters(), lr=0.0))
    found = actor.compute_log_prob(batch, calculate_entropy=True)
    logits = model(**{n: rows[n] for n in ("input_ids", "attention_mask", "position_ids")}).logits[:, -9:-1]
    log_p = logits.log_softmax(-1)
    expected = log_p.gather(-1, rows["responses"][..., None])[..., 0]
    torch.testing.assert_close(found["log_probs"], expected.detach(), atol=1e-5, rtol=1e-4)
    entropy = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(found["entropys"], entropy.detach(), atol=1e-4, rtol=1e-4)
    batch.tensors["old_log_probs"] = found["log_probs"]
    mask = rows["response_mask"]
    surrogate = -((expected - expected.detach()).exp() * rows["advantages"] * mask).sum() / mask.sum()
    total = surrogate - 0.01 * (entropy * mask).sum() / mask.sum()
    norm = torch.nn.utils.get_total_norm(torch.autograd.grad(total, list(model.parameters())))
    metrics = actor.update_policy(batch)
    loss = -(rows["advantages"] * mask).sum() / mask.sum()  # the ratio is 1
    assert metrics["actor/pg_loss"] == [pytest.approx(float(loss), abs=1e-5)]
    assert metrics["actor/entropy"] == [
        pytest.approx((entropy.detach() * mask).sum().item() / mask.sum().item(), abs=1e-4)
    ]
    assert metrics["actor/grad_norm"] == [pytest.approx(float(norm), rel=1e-3)]
    with pytest.raises(KeyError, match="the batch has no advantages"):
        actor.update_policy(DataProto(rows.exclude("advantages"), meta_info={"temperature": 1.0}))
