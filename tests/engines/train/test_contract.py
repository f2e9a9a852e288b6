"""What every training engine must do, by its interface alone: `lockstep/engines/train/train_engine.py`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lockstep.config.deepspeed import DeepSpeedEngineConfig
from lockstep.config.megatron import McoreEngineConfig
from lockstep.config.model import FSDPEngineConfig, HFModelConfig
from lockstep.engines.train import TRAIN_ENGINES, EngineModel, MicroBatching, TrainEngine, create_train_engine
from tests.engines.train.cases import CLIP_GRAD, CPU, NUM_REAL, OPTIM, TEMPERATURE, Reference, make_batch, summed_loss
from tests.tiny import save_tiny_model, tiny_tokenizer

PLUGIN = Path(__file__).parents[3] / "examples" / "plugins" / "training_engine.py"
ENGINES = ["fsdp", "megatron", f"{PLUGIN}:PlainEngine", pytest.param("deepspeed", marks=pytest.mark.deepspeed)]
SETTINGS = {"megatron": McoreEngineConfig(seed=3), "deepspeed": DeepSpeedEngineConfig(seed=3)}
SPLITS = [MicroBatching(), MicroBatching(num_rows=2), MicroBatching(max_tokens=24)]

pytestmark = pytest.mark.parametrize("name", ENGINES, ids=["fsdp", "megatron", "plugin", "deepspeed"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def create(name: str, folder: Path, kind: Any = "policy", *, trained: bool = True) -> TrainEngine:
    if package := TRAIN_ENGINES.info(name).package:
        pytest.importorskip(package)
    spec = EngineModel(
        HFModelConfig(path=str(folder)),
        "actor_rollout_ref.model",
        kind,
        SETTINGS.get(name, FSDPEngineConfig(seed=3)),
        optim=OPTIM if trained else None,
        clip_grad=CLIP_GRAD,
    )
    return create_train_engine(name, spec, CPU)


def options(kind: str) -> dict[str, object]:
    return {"temperature": TEMPERATURE, "with_entropy": True} if kind == "policy" else {}


def step(engine: TrainEngine, kind: str, number: int, micro: MicroBatching) -> tuple[float, float]:
    """Loss and gradient norm of one optimizer step."""
    rows = make_batch(number)
    (num_tokens,) = engine.global_sum(float(rows["response_mask"].sum()))

    def loss_fn(outputs: dict[str, Tensor], part: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        share = summed_loss(outputs, part) / num_tokens
        return share, {"loss": share}

    engine.onload(optimizer=True, ahead=True)
    metrics = engine.forward_backward(rows, loss_fn, micro, **options(kind))
    norm = engine.optimizer_step()
    engine.schedule_step()
    engine.offload()
    return metrics["loss"], norm


def weights_of(engine: TrainEngine) -> dict[str, np.ndarray]:
    return {name: weight.cpu().numpy().copy() for name, weight in engine.weights()}


@pytest.mark.parametrize("micro", SPLITS, ids=str)
@pytest.mark.parametrize("kind", ["policy", "value"])
def test_outputs_steps_and_weights_equal_transformers(name: str, kind: str, micro: MicroBatching, folder: Path) -> None:
    """Log-probs, entropy and values; losses, clipped gradients, the schedule and AdamW, over three steps."""
    expected = Reference(folder, "policy" if kind == "policy" else "scalar").run()
    engine = create(name, folder, kind)
    outputs = engine.forward(make_batch(0), micro, **options(kind))
    for output, values in expected["outputs"].items():
        np.testing.assert_allclose(outputs[output][:NUM_REAL], values, atol=1e-5, rtol=1e-5)
    steps = [step(engine, kind, number, micro) for number in range(3)]
    np.testing.assert_allclose(steps, expected["steps"], atol=1e-5, rtol=1e-5)
    weights = weights_of(engine)
    prefix = "model." if kind == "value" else ""
    assert {n.removeprefix(prefix) for n in weights} == {n.removeprefix(prefix) for n in expected["weights"]}
    for weight, values in zip(weights.values(), expected["weights"].values(), strict=True):
        assert np.abs(weight - values).mean() < 1e-5


def test_the_learning_rate_follows_the_schedule(name: str, folder: Path) -> None:
    engine = create(name, folder)
    rates = [engine.learning_rate]
    for _ in range(2):
        engine.schedule_step()
        rates.append(engine.learning_rate)
    assert rates == pytest.approx([OPTIM.lr, 0.9 * OPTIM.lr, 0.8 * OPTIM.lr])


def test_a_checkpoint_restores_the_next_step_bit_for_bit(name: str, folder: Path, tmp_path: Path) -> None:
    engine = create(name, folder)
    step(engine, "policy", 0, SPLITS[1])
    engine.onload(optimizer=True)
    engine.save(tmp_path)
    engine.offload()
    expected, weights = step(engine, "policy", 1, SPLITS[1]), weights_of(engine)
    resumed = create(name, folder)
    resumed.onload(optimizer=True)
    resumed.load(tmp_path)
    resumed.offload()
    assert resumed.learning_rate == pytest.approx(0.9 * OPTIM.lr)
    assert step(resumed, "policy", 1, SPLITS[1]) == expected
    got = weights_of(resumed)
    assert all(np.array_equal(weights[parameter], got[parameter]) for parameter in weights)


def test_the_rollout_gets_the_current_weights(name: str, folder: Path) -> None:
    engine = create(name, folder)
    module = engine.rollout_module()
    step(engine, "policy", 0, SPLITS[0])
    with engine.lend_weights(module):
        for parameter, weight in engine.weights():
            assert torch.equal(module.get_parameter(parameter), weight), parameter


def test_shapes_announce_the_weights_that_are_sent(name: str, folder: Path) -> None:
    engine = create(name, folder)
    assert engine.weight_shapes(merged=True) == [(n, tuple(w.shape)) for n, w in engine.merged_weights()]
    assert engine.weight_shapes(merged=False) == [(n, tuple(w.shape)) for n, w in engine.weights(trained=True)]


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_an_exported_folder_opens_in_transformers_with_the_same_weights(
    name: str, kind: str, folder: Path, tmp_path: Path
) -> None:
    engine = create(name, folder, kind)
    step(engine, kind, 0, SPLITS[0])
    engine.export(tmp_path, tiny_tokenizer())
    cls = AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification
    opened = dict(cls.from_pretrained(tmp_path / "huggingface", dtype=torch.float32).named_parameters())
    weights = dict(engine.weights())
    assert opened.keys() == weights.keys()
    assert all(torch.equal(opened[parameter], weight) for parameter, weight in weights.items())


def test_a_model_that_only_computes_scores_sequences_at_their_end(name: str, folder: Path, tmp_path: Path) -> None:
    critic = create(name, folder, "value")
    critic.export(tmp_path, tiny_tokenizer())
    engine = create(name, tmp_path / "huggingface", "reward", trained=False)
    batch = make_batch(0)
    score = engine.forward(batch, SPLITS[0], at_end=True)["score"]
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "huggingface", dtype=torch.float32)
    for row, got in zip(batch[:NUM_REAL], score):
        ids = row["input_ids"][row["attention_mask"].bool()]
        with torch.no_grad():
            expected = classifier(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None]).logits[0, 0]
        assert float(got) == pytest.approx(float(expected), abs=1e-5)


def test_a_folder_without_a_head_is_no_reward_model(name: str, folder: Path) -> None:
    with pytest.raises(ValueError, match="has no one-label `score` head"):
        create(name, folder, "reward", trained=False)


def test_a_gradient_that_is_not_finite_is_an_error_and_changes_nothing(name: str, folder: Path) -> None:
    engine = create(name, folder)
    before = weights_of(engine)
    engine.forward_backward(make_batch(0), lambda out, rows: (out["log_probs"].sum() * float("nan"), {}), SPLITS[0])
    with pytest.raises(FloatingPointError, match="gradient norm is nan"):
        engine.optimizer_step()
    after = weights_of(engine)
    assert all(np.array_equal(before[parameter], after[parameter]) for parameter in before)


def test_the_config_knows_what_the_engine_can_do(name: str, folder: Path) -> None:
    assert TRAIN_ENGINES.problem(name) is None
    assert TRAIN_ENGINES.info(name) == TRAIN_ENGINES.get(name).info == create(name, folder, trained=False).info
