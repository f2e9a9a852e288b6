"""The plan's bytes of weights, optimizer state and gradients on each rank, beside those of tiny engines on CPU processes."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.config.deepspeed import DeepSpeedEngineConfig
from lockstep.config.engines import TRAIN_ENGINES
from lockstep.config.megatron import McoreEngineConfig
from lockstep.config.model import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainEngineConfig
from lockstep.engines.train import EngineModel, MicroBatching, create_train_engine
from lockstep.plan.batch_units import Lengths, batch_units
from lockstep.plan.hardware import find_device
from lockstep.plan.job import model_of
from lockstep.plan.layouts.deepspeed import BUCKET
from lockstep.plan.model_shape import ModelShape
from tests.engines.train.ranks import Ranks
from tests.tiny import random_batch, save_tiny_model

CPU = torch.device("cpu")
SECTIONS: dict[str, type[TrainEngineConfig]] = {
    "fsdp": FSDPEngineConfig,
    "deepspeed": DeepSpeedEngineConfig,
    "megatron": McoreEngineConfig,
}
SIZES = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
ROWS = 8


def live_bytes() -> dict[int, int]:
    """Storage -> bytes, of all tensors of this process; without the buffers in which DeepSpeed reduces gradients."""
    gc.collect()
    found: dict[int, int] = {}
    for value in gc.get_objects():
        if not issubclass(type(value), Tensor) or isinstance(value, DTensor) or value.device.type != "cpu":
            continue
        for tensor in (value, value.grad if value.is_leaf else None):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                if storage.nbytes() < 2 * BUCKET:
                    found[storage.data_ptr()] = storage.nbytes()
    return found


def measured(folder: Path, strategy: str, settings: dict[str, Any]) -> int:
    """Bytes of the engine on this rank, with gradients, after its first optimizer step.

    ZeRO 1 reduces gradients at the end of the backward pass; it is measured before that, with the activations of a micro-batch.
    """
    seen: list[int] = []
    before = live_bytes()
    config = HFModelConfig(path=str(folder), enable_gradient_checkpointing=False)
    optim = FSDPOptimizerConfig(lr=1e-3, total_training_steps=10)
    model = EngineModel(config, "m", "policy", SECTIONS[strategy](**settings), optim)
    engine: Any = create_train_engine(strategy, model, CPU)
    rows = random_batch(ROWS, seed=0).chunk(engine.dp_size)[engine.dp_rank]

    def loss_fn(outputs: dict[str, Tensor], part: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        if settings.get("zero_stage") == 1:
            seen.append(engine_bytes())
        share = (outputs["log_probs"] * part["response_mask"]).sum() / 100
        return share, {"loss": share.detach()}

    def engine_bytes() -> int:
        return sum(size for place, size in live_bytes().items() if place not in before)

    micro = MicroBatching(num_rows=1)
    engine.onload(optimizer=True, ahead=True)
    engine.forward_backward(rows, loss_fn, micro, temperature=1.0)
    engine.optimizer_step()
    engine.forward_backward(rows, loss_fn, micro, temperature=1.0)
    seen.append(engine_bytes())
    engine.optimizer_step()
    return max(seen)


def planned(folder: Path, world: int, strategy: str, settings: dict[str, Any]) -> float:
    config, engine = (
        HFModelConfig(path=str(folder), enable_gradient_checkpointing=False),
        SECTIONS[strategy](**settings),
    )
    shared = {"samples": 1, "lengths": Lengths(8, 8), "packed": True, "micro_rows": 2, "max_tokens": None}
    units = batch_units(
        ROWS, ranks=world, row_ranks=engine.ranks_per_row, sequence_parallel=engine.ranks_per_sequence, **shared
    )
    shape, device = ModelShape.from_folder(folder), find_device("cpu")
    model = model_of("actor", "pool", world, 1, shape, config, engine, device, update=units, updates=1)
    resident = model.layout.resident(model, is_active=True, updates=True)
    return resident.weights + resident.moments + model.layout.update(device, model, units, 0.0)["gradients"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), **SIZES)


MEGATRON: list[dict[str, Any]] = [
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"use_distributed_optimizer": False},
    {},
]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("world", "strategy", "settings"),
    [
        (2, "fsdp", {}),
        pytest.param(4, "fsdp", {"fsdp_size": 2}, marks=SLOW),
        *(pytest.param(2, "deepspeed", {"zero_stage": stage}, marks=SLOW) for stage in (0, 1, 2, 3)),
        *(pytest.param(2, "megatron", settings, marks=SLOW) for settings in MEGATRON),
        pytest.param(4, "megatron", MEGATRON[0] | MEGATRON[1], marks=SLOW),
    ],
    ids=str,
)
def test_planned_bytes_are_those_of_the_engine(
    world: int, strategy: str, settings: dict[str, Any], folder: Path, ranks: Ranks
) -> None:
    pytest.importorskip((TRAIN_ENGINES.info(strategy).package or "torch").partition(".")[0])
    found = max(ranks.run(world, measured, folder, strategy, settings))
    expected = planned(folder, world, strategy, settings)
    print(f"{world} ranks, {strategy} {settings}: planned {expected / 1e6:.2f} MB, measured {found / 1e6:.2f} MB")
    assert expected == pytest.approx(found, rel=0.1)
