"""Each audit of an update finds the defect that it is there for, on every engine, and nothing in healthy updates."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from lockstep.algorithms.kl import kl_penalty
from lockstep.config.deepspeed import DeepSpeedEngineConfig
from lockstep.config.megatron import McoreEngineConfig
from lockstep.config.model import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from lockstep.engines.train import TRAIN_ENGINES, EngineModel, MicroBatching, TrainEngine, create_train_engine
from lockstep.engines.train.audit import GradientNorms, ReferenceAudit, UpdateAudit
from lockstep.engines.train.compute_copy import refresh
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.engines.train.trial import SplitTrials, split_tolerance
from lockstep.models import packing
from lockstep.models.model_check import check_batch
from lockstep.utils.audit import AuditError
from tests.engines.train.cases import CPU, TEMPERATURE, make_batch, summed_loss
from tests.tiny import save_tiny_model

OPTIM = FSDPOptimizerConfig(lr=1e-3, weight_decay=0.0)
OPTIONS: dict[str, Any] = {"temperature": TEMPERATURE, "with_entropy": True, "entropy_gradient": True}
SETTINGS: dict[str, Any] = {"megatron": McoreEngineConfig(seed=3), "deepspeed": DeepSpeedEngineConfig(seed=3)}
ENGINES = ["fsdp", "megatron", pytest.param("deepspeed", marks=pytest.mark.deepspeed)]
LossFn = Callable[[dict[str, Tensor], TensorDict], tuple[Tensor, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def create(folder: Path, name: str = "fsdp", *, trained: bool = True, lora: int = 0, **settings: Any) -> Any:
    if package := TRAIN_ENGINES.info(name).package:
        pytest.importorskip(package)
    spec = EngineModel(
        HFModelConfig(path=str(folder), lora_rank=lora),
        "actor_rollout_ref.model",
        "policy",
        SETTINGS.get(name) or FSDPEngineConfig(seed=3, **settings),
        optim=OPTIM if trained else None,
    )
    return create_train_engine(name, spec, CPU)


def audit_of(engine: TrainEngine) -> UpdateAudit:
    return UpdateAudit(engine, torch.float32, CPU, clip_grad=1.0)


def sum_loss(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    share = summed_loss(outputs, rows) / 20
    return share, {"loss": share}


def mean_of_the_micro_batch(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    share = summed_loss(outputs, rows) / rows["response_mask"].sum().clamp_min(1)
    return share, {"loss": share}


def update(
    audit: UpdateAudit,
    number: int = 0,
    *,
    loss_fn: LossFn = sum_loss,
    levels: dict[str, str] | None = None,
    promised: int = 2,
    before_the_end: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Two optimizer steps; returns the findings."""
    engine = audit.engine
    engine.onload(optimizer=True, ahead=True)
    audit.begin(levels or {}, promised)
    for step in (0, 1):
        batch, micro = make_batch(2 * number + step), MicroBatching(num_rows=4)
        audit.check_split(batch, loss_fn, micro, **OPTIONS)
        metrics = engine.forward_backward(batch, loss_fn, micro, **OPTIONS)
        audit.check_loss(metrics, "loss")
        audit.optimizer_step(expects_gradient=True)
    engine.schedule_step()
    before_the_end()
    findings = audit.end()
    engine.offload()
    return findings


def weights_after(engine: TrainEngine, audited: bool) -> list[Tensor]:
    audit = audit_of(engine)
    for number in range(3):
        levels = {} if audited else {"micro_batch_split": "off"}
        assert update(audit, number, levels=levels) == {}
    assert audit._splits.num_checked == (2 if audited else 0)
    return [weight.clone() for _, weight in engine.weights()]


@pytest.mark.parametrize("name", ENGINES)
def test_healthy_updates_are_silent_and_the_same_bit_for_bit(name: str, folder: Path) -> None:
    audited, plain = (weights_after(create(folder, name), audited) for audited in (True, False))
    assert all(torch.equal(one, two) for one, two in zip(audited, plain, strict=True))


@pytest.mark.parametrize("name", ENGINES)
def test_a_mean_over_the_micro_batch_is_found(name: str, folder: Path) -> None:
    with pytest.raises(
        AuditError, match=r"loss depends on the micro-batch split: the loss of 4 .*trainer\.audit\.micro_batch_split"
    ):
        update(audit_of(create(folder, name)), loss_fn=mean_of_the_micro_batch)


def test_packing_that_leaks_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of a micro-batch sees those before it."""
    engine = create(folder)
    attention = packing.PackedAttention
    monkeypatch.setattr(packing, "PackedAttention", lambda lengths, device, _: attention([sum(lengths)], device))
    findings = update(audit_of(engine), levels={"micro_batch_split": "warn"})
    assert "log_probs depend on the micro-batch split" in findings["micro_batch_split"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_of_rounding_alone_is_no_finding(dtype: str, folder: Path) -> None:
    """A KL to the policy itself, without advantages."""
    engine, reference = create(folder, dtype=dtype), create(folder, trained=False, dtype=dtype)
    trials = SplitTrials(engine, split_tolerance(getattr(torch, dtype), CPU))
    for seed in range(2):
        batch = make_batch(seed, num_real=8)
        batch["ref_log_prob"] = reference.forward(batch, MicroBatching(), temperature=1.0)["log_probs"]

        def loss_fn(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
            kl = kl_penalty(outputs["log_probs"], rows["ref_log_prob"], "low_var_kl") * rows["response_mask"]
            return kl.sum() / 40, {}

        assert trials.problem(batch, loss_fn, MicroBatching(num_rows=4), temperature=1.0) is None
    assert trials.num_checked == 2


def test_a_trial_that_does_not_fit_is_skipped(folder: Path) -> None:
    engine = create(folder)
    engine.limits.lower("micro_batch_split", 1)
    assert engine.limits.take() == []
    assert update(audit_of(engine), loss_fn=mean_of_the_micro_batch) == {}


def test_a_loss_that_is_not_finite(folder: Path) -> None:
    def not_a_number(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        loss, _ = sum_loss(outputs, rows)
        return loss, {"loss": loss * float("nan")}

    with pytest.raises(AuditError, match="loss is nan: the loss is not a finite number"):
        update(audit_of(create(folder)), loss_fn=not_a_number)


@pytest.mark.parametrize("name", ENGINES)
def test_a_gradient_that_is_not_finite_is_never_applied(name: str, folder: Path) -> None:
    def infinite(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        return sum_loss(outputs, rows)[0] * float("inf"), {"loss": torch.zeros(())}

    engine = create(folder, name)
    before = [weight.clone() for _, weight in engine.weights()]
    audit = audit_of(engine)
    with pytest.raises(FloatingPointError, match="gradient norm is nan"):
        update(audit, loss_fn=infinite)
    findings = update(audit, loss_fn=infinite, levels={"finite": "warn"})
    assert list(findings) == ["finite"]
    assert all(torch.equal(one, two) for one, (_, two) in zip(before, engine.weights()))


def test_gradient_norms_that_explode_or_vanish() -> None:
    norms = GradientNorms()
    warm_up = [50.0, 9.0, 4.0, 2.0, 1.0, 1.5, 1.0, 0.5]
    assert not any(norms.problem(norm, 1.0, expected=True) for norm in [*warm_up, 3.0, 0.8, 1.2, 20.0])
    assert norms.problem(0.0, 1.0, expected=False) is None
    assert "gradient is zero" in str(norms.problem(0.0, 1.0, expected=True))
    assert "gradient norm is 60, 34 times the median of the last 12 steps" in str(
        norms.problem(60.0, 1.0, expected=True)
    )
    assert norms.problem(60.0, 100.0, expected=True) is None  # below the clipping


def test_a_zero_gradient_is_found(folder: Path) -> None:
    def detached(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = sum_loss(outputs, rows)
        return loss * 0, metrics

    assert (
        "gradient is zero"
        in update(audit_of(create(folder)), loss_fn=detached, levels={"gradient": "warn"})["gradient"]
    )


@pytest.mark.parametrize("name", ENGINES)
def test_optimizer_steps_are_counted(name: str, folder: Path) -> None:
    engine = create(folder, name)
    audit = audit_of(engine)
    with pytest.raises(AuditError, match="the optimizer took 2 steps in an update of 3 mini-batches"):
        update(audit, promised=3)
    with pytest.raises(AuditError, match="the learning-rate schedule took 2 steps in one update"):
        update(audit, before_the_end=engine.schedule_step)


def test_a_step_that_the_optimizer_skips_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = create(folder)
    steps = iter([engine.optimizer.step, lambda: None])
    monkeypatch.setattr(engine.optimizer, "step", lambda: next(steps)())
    with pytest.raises(AuditError, match="the optimizer took 1 steps in an update of 2 mini-batches"):
        update(audit_of(engine))


def test_parameters_that_never_change_are_found(folder: Path) -> None:
    """The optimizer steps, on clones of the model's parameters."""
    engine = create(folder)
    audit = audit_of(engine)
    engine.trained_tensors = lambda: {str(i): p.detach() for i, p in enumerate(clones)}  # type: ignore[method-assign]
    clones = [parameter.detach().clone() for parameter in engine.model.parameters()]
    for number in range(2):
        assert update(audit, number) == {}
    with pytest.raises(
        AuditError, match=r"no parameter changed in an update of 2 optimizer steps with a learning rate of 0\.001"
    ):
        update(audit, 2)


def test_an_adapters_base_that_changes_is_found(folder: Path) -> None:
    engine = create(folder, lora=4)
    audit = audit_of(engine)
    assert update(audit) == {}

    def train_the_base() -> None:
        with torch.no_grad():
            for name, parameter in engine.model.named_parameters():
                if "base_layer" in name:
                    parameter.add_(1e-3)

    with pytest.raises(AuditError, match=r"training changed .*base_layer.*, which is not trained \(and \d+ more"):
        for number in range(4):  # the sample goes round
            update(audit, number, before_the_end=train_the_base)
    audit.forget()
    assert update(audit) == {}


def test_a_buffer_that_changes_is_found(folder: Path) -> None:
    engine = create(folder)
    audit = audit_of(engine)

    def spoil() -> None:
        next(engine.model.buffers()).mul_(1.001)

    with pytest.raises(AuditError, match=r"training changed .*inv_freq, which is not trained"):
        update(audit, before_the_end=spoil)


def test_a_compute_copy_that_lags_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = create(folder, dtype="bfloat16", model_dtype="float32")
    audit = UpdateAudit(engine, torch.bfloat16, CPU, clip_grad=1.0)
    assert update(audit) == {}
    monkeypatch.setattr(FsdpEngine, "_refresh", lambda self: None)
    with pytest.raises(AuditError, match="the weights that compute differ from the master weights after an update"):
        update(audit, 1)
    refresh(engine.compute, engine.model)


@pytest.mark.parametrize("name", ENGINES)
def test_a_rollout_module_with_stale_weights_is_found(name: str, folder: Path) -> None:
    engine = create(folder, name)
    audit, module = audit_of(engine), engine.rollout_module()
    levels = {"weights": "stop"}
    for number in range(2):
        update(audit, number, levels=levels)
        with engine.lend_weights(module):
            audit.check_lent(module, number)
    with engine.lend_weights(module):
        stale = {key: value.clone() for key, value in module.named_parameters()}
    update(audit, 2, levels=levels)
    with engine.lend_weights(module):
        for key, value in stale.items():
            parent, _, leaf = key.rpartition(".")
            module.get_submodule(parent)._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
        audit.audits.levels["weights"] = "off"
        audit.check_lent(module, 3)
        audit.audits.levels["weights"] = "stop"
        with pytest.raises(AuditError, match="the rollout's weights are not the trainer's after update 3"):
            audit.check_lent(module, 3)


@pytest.mark.parametrize("name", ENGINES)
def test_a_reference_that_is_trained_is_found(name: str, folder: Path) -> None:
    reference = create(folder, name, trained=False)
    audit = ReferenceAudit(reference, torch.float32, has_own_weights=True)
    rows = check_batch(259)
    for _ in range(3):
        assert audit.check({}, rows) == {}
    for tensor in reference.frozen_tensors().values():
        tensor.mul_(1.01)
    assert audit.check({"reference_policy": "off"}, rows) == {}
    with pytest.raises(AuditError, match=r"the reference policy's .* changed \(and \d+ more"):
        audit.check({}, rows)


@pytest.mark.parametrize("is_off", [True, False])
def test_a_reference_whose_adapters_stay_on_is_found(is_off: bool, folder: Path) -> None:
    engine = create(folder, lora=4)
    reference = ReferenceAudit(engine, torch.float32, has_own_weights=False)
    reference.EVERY = 1  # type: ignore[misc]
    audit, rows = audit_of(engine), check_batch(259)
    reference.check({}, rows)
    for number in range(3):
        update(audit, number)
    found = nullcontext() if is_off else pytest.raises(AuditError, match="it is being trained, or adapters are not off")
    with found, engine.adapters_off() if is_off else nullcontext():
        reference.check({}, rows)
