"""bfloat16 masters learn like float32 ones, a resumed run repeats its random bits, and float16 trains with a loss scale."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.config.model import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from lockstep.engines.train import optimizer as optimizer_module
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.engines.train.loss_scale import LossScale
from lockstep.engines.train.optimizer import PiecewiseAdamW, build_optimizer, write_rounded
from lockstep.engines.train.train_engine import MicroBatching
from lockstep.models.loading import load_causal_lm
from lockstep.models.token_models import PolicyModel
from tests.engines.train import cases
from tests.engines.train.cases import Case
from tests.engines.train.ranks import Ranks
from tests.tiny import random_batch, save_tiny_model

CPU = torch.device("cpu")
OPTIM = FSDPOptimizerConfig(lr=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def distance(dtype: torch.dtype, optimizer_of: Any, device: str) -> Tensor:
    """How far weights move in 50 steps with noisy gradients that have a direction."""
    torch.manual_seed(0)
    start = (torch.randn(256, 256) * 0.02).bfloat16()
    parameter = nn.Parameter(start.to(device, dtype, copy=True))
    optimizer = optimizer_of([parameter])
    direction = torch.randn(256, 256) * 1e-3
    for _ in range(50):
        parameter.grad = (direction + torch.randn(256, 256) * 1e-3).to(device, dtype)
        optimizer.step()
    return parameter.detach().float().cpu() - start.float()


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def build(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return build_optimizer(parameters, OPTIM, seed=1)


def plain(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=OPTIM.lr, fused=True)


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_masters_move_as_far_as_float32_masters(device: str) -> None:
    expected = distance(torch.float32, build, device)
    moved, stuck = (distance(torch.bfloat16, optimizer_of, device) for optimizer_of in (build, plain))

    def along(change: Tensor) -> float:
        return float((change * expected.sign()).mean() / expected.abs().mean())

    assert along(moved) == pytest.approx(1.0, abs=0.05)
    assert along(stuck) < 0.05
    # a weight of 0.02 is 1.2e-4 from the next number and moves 3e-5: it moves there with a probability of about 1/4
    assert (moved != 0).float().mean() > 10 * (stuck != 0).float().mean() > 0
    assert (moved != 0).float().mean() > 0.3


def test_second_moments_in_bfloat16_do_not_stall() -> None:
    """A first gradient of 1, then 300 of 0: with beta2 = 0.999 each step takes off 0.1 %, less than half a bfloat16 digit."""
    means = []
    for optimizer_of in (build, plain):
        parameter = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
        optimizer = optimizer_of([parameter])
        for number in range(301):
            parameter.grad = torch.full_like(parameter, float(number == 0))
            optimizer.step()
        moment = optimizer.state[parameter]["exp_avg_sq"]
        assert moment.dtype == torch.bfloat16
        means.append(float(moment.float().mean()) / 1e-3)
    assert means[0] == pytest.approx(0.999**300, rel=0.01)
    assert means[1] == pytest.approx(1.0, rel=0.01)


def test_rounding_is_unbiased_and_keeps_what_bfloat16_can_hold() -> None:
    values = torch.tensor([1.0, -3.5, 0.0, 1.0 + 2**-9, -1.0 - 2**-10, 1e-30 * (1 + 2**-10), math.inf]).repeat(20000, 1)
    target = torch.empty_like(values, dtype=torch.bfloat16)
    write_rounded(target, values, torch.Generator().manual_seed(0))
    rounded = target.double()
    assert torch.equal(rounded[:, [0, 1, 2, 6]], values[:, [0, 1, 2, 6]].double())
    near = rounded[:, 3:6]
    assert (near.amax(0) > near.amin(0)).all()  # both neighbours occur
    torch.testing.assert_close(near.mean(0) / values[0, 3:6].double(), torch.ones(3).double(), atol=1e-4, rtol=0)


def test_exact_numbers_step_as_in_float32() -> None:
    """Weights, moments and results that bfloat16 holds leave nothing to round: decay, clipping and bias corrections agree."""
    settings: dict[str, Any] = {"lr": 0.5, "betas": (0.5, 0.75), "weight_decay": 0.5, "eps": 0.0}
    ours, reference = nn.Parameter(torch.full((4,), 2.0).bfloat16()), nn.Parameter(torch.full((4,), 2.0))
    optimizer = PiecewiseAdamW([ours], seed=0, **settings)
    optimizer.grad_scale = torch.tensor(2.0)
    expected = torch.optim.AdamW([reference], **settings)
    gradient = torch.tensor([4.0, -4.0, 8.0, 1.0])
    ours.grad, reference.grad = gradient.bfloat16(), gradient / 2
    optimizer.step()
    expected.step()
    assert torch.equal(ours.detach().float(), reference.detach())
    assert ours.tolist() == [1.0, 2.0, 1.0, 1.0]  # 2 * (1 - 0.25) - 0.5 * sign
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizer.state[ours][name].float(), expected.state[reference][name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pieces_skipped_steps_and_the_global_generator(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "PIECE_SIZE", 7)
    torch.manual_seed(0)
    start, gradient = torch.randn(5, 8).to(dtype), torch.randn(5, 8).to(dtype)
    before = torch.get_rng_state()

    def run(found_inf: list[float], seed: int = 3) -> Tensor:
        parameter = nn.Parameter(start.clone())
        optimizer = PiecewiseAdamW([parameter], seed=seed, lr=1e-3)
        for value in found_inf:
            optimizer.found_inf = torch.tensor(value)
            parameter.grad = gradient.clone()
            optimizer.step()
        return parameter.detach()

    once = run([0.0])
    assert torch.equal(run([1.0]), start)
    assert torch.equal(run([1.0, 0.0, 1.0]), once)
    assert torch.equal(run([0.0], seed=4), once) == (dtype == torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    if dtype == torch.float32:
        parameter = nn.Parameter(start.clone())
        parameter.grad = gradient.clone()
        torch.optim.AdamW([parameter], lr=1e-3, fused=True).step()
        assert torch.equal(parameter.detach(), once)


def engine_of(folder: Path, masters: torch.dtype, compute: torch.dtype, lr: float = 1e-3) -> FsdpEngine:
    model = PolicyModel(load_causal_lm(HFModelConfig(path=str(folder)), "m", masters, CPU))
    optim = FSDPOptimizerConfig(lr=lr, total_training_steps=10)
    return FsdpEngine(model, FSDPEngineConfig(), optim, device=CPU, compute_dtype=compute, packed=True)


def step(engine: FsdpEngine, factor: float = 1.0) -> float:
    batch = random_batch()
    count = batch["response_mask"].sum()

    def loss(outputs: dict[str, Tensor], rows: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return (outputs["log_probs"] * rows["response_mask"]).sum() / count * factor, {}

    engine.forward_backward(batch, loss, MicroBatching())
    return engine.optimizer_step()


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_a_run_with_bfloat16_masters_resumes_bit_for_bit(folder: Path, tmp_path: Path, compute: torch.dtype) -> None:
    engine = engine_of(folder, torch.bfloat16, compute)
    for _ in range(2):
        step(engine)
    engine.save(tmp_path)
    resumed = engine_of(folder, torch.bfloat16, compute)
    resumed.load(tmp_path)
    torch.manual_seed(7)  # which does not matter
    assert [step(engine) for _ in range(2)] == [step(resumed) for _ in range(2)]
    for (name, weight), (_, other) in zip(engine.weights(), resumed.weights()):
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, other), name
    assert resumed.optimizer is not None
    assert {int(state["step"]) for state in resumed.optimizer.state.values()} == {4}


def test_ranks_with_bfloat16_masters_resume_bit_for_bit(tmp_path: Path, folder: Path) -> None:
    ranks = Ranks()
    try:
        for replicas in (1, 2):
            checkpoint = tmp_path / str(replicas)
            results = ranks.run(2, bfloat16_ranks, folder, checkpoint, 2 // replicas)
            assert all(torch.equal(a, b) for a, b in zip(results[0]["on"], results[0]["resumed"], strict=True))
            assert all(torch.equal(a, b) for a, b in zip(results[0]["on"], results[1]["on"], strict=True))
    finally:
        ranks.close()


def bfloat16_ranks(folder: Path, checkpoint: Path, fsdp_size: int) -> dict[str, list[Tensor]]:
    """Whole weights after a step past a checkpoint, uninterrupted and resumed."""

    def build_engine() -> FsdpEngine:
        model = PolicyModel(load_causal_lm(HFModelConfig(path=str(folder)), "m", torch.bfloat16, CPU))
        config = FSDPEngineConfig(fsdp_size=fsdp_size)
        return FsdpEngine(model, config, cases.OPTIM, device=CPU, compute_dtype=torch.bfloat16, packed=True)

    engine = build_engine()
    assert isinstance(engine.optimizer, PiecewiseAdamW)
    step(engine)
    engine.save(checkpoint)
    resumed = build_engine()
    resumed.load(checkpoint)
    weights = {}
    for name, one in (("on", engine), ("resumed", resumed)):
        step(one)
        weights[name] = [weight.clone() for _, weight in one.weights()]
    return weights


def test_float16_masters_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"fsdp_config\.model_dtype=float16: .*float32 or bfloat16"):
        engine_of(folder, torch.float16, torch.float16)


def test_float16_gradients_that_would_underflow_are_scaled(folder: Path) -> None:
    """A loss of 1e-6 times the usual size: most of its gradients are below 6e-8, the least that float16 holds."""
    exact, half = (engine_of(folder, torch.float32, dtype) for dtype in (torch.float32, torch.float16))
    expected, norm = step(exact, 1e-6), step(half, 1e-6)
    assert norm == pytest.approx(expected, rel=0.02)
    half = engine_of(folder, torch.float32, torch.float16)
    half._loss_scale.value = 1.0
    assert step(half, 1e-6) != pytest.approx(expected, rel=0.02)


def test_float16_skips_steps_until_the_scale_fits_and_saves_it(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(folder, torch.float32, torch.float16)
    before = {name: weight.clone() for name, weight in engine.weights()}
    norms = [step(engine, 200.0) for _ in range(2)]
    assert not any(map(math.isfinite, norms)) and engine._loss_scale.value == 2.0**14
    assert all(torch.equal(before[name], weight) for name, weight in engine.weights())
    assert "optimizer step skipped, loss scale is now 16384" in caplog.text
    while not math.isfinite(step(engine, 200.0)):
        pass
    assert not all(torch.equal(before[name], weight) for name, weight in engine.weights())
    engine.save(tmp_path)
    resumed = engine_of(folder, torch.float32, torch.float16)
    resumed.load(tmp_path)
    assert resumed._loss_scale.state_dict() == engine._loss_scale.state_dict()
    assert step(resumed) == step(engine)


def test_two_ranks_train_in_float16_as_one(folder: Path) -> None:
    alone = cases.train(folder, Case(compute=torch.float16))
    ranks = Ranks()
    try:
        result = ranks.run(2, cases.train, folder, Case(world=2, compute=torch.float16))[0]
    finally:
        ranks.close()
    for (loss, norm), (other, other_norm) in zip(result["steps"], alone["steps"]):
        assert loss == pytest.approx(other, abs=0.02) and norm == pytest.approx(other_norm, rel=0.05)


def test_the_scale_doubles_after_good_steps_and_gives_up_after_bad_ones() -> None:
    scale = LossScale(enabled=True)
    for _ in range(LossScale.GROWTH_INTERVAL):
        scale.update(1.0)
    assert scale.value == 2.0**17
    with pytest.raises(
        FloatingPointError, match=r"is inf for 18 optimizer steps in a row.*fsdp_config\.dtype=bfloat16"
    ):
        for _ in range(LossScale.MAX_SKIPPED):
            scale.update(math.inf)
    with pytest.raises(FloatingPointError, match="gradient norm is nan"):
        LossScale(enabled=False).update(math.nan)
