"""What the ranks run, and the same by plain transformers in one process: the reference."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM

from lockstep.config.deepspeed import DeepSpeedEngineConfig
from lockstep.config.megatron import McoreEngineConfig
from lockstep.config.model import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from lockstep.engines.train.deepspeed import DeepSpeedEngine
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.engines.train.train_engine import EngineModel, MicroBatching, TrainEngine, create_train_engine
from lockstep.kernels.packed import packed_view
from lockstep.models.attention import PackedAttention, no_mask
from lockstep.models.four_bit import dequantized
from lockstep.models.loading import open_causal_lm, open_value_model
from lockstep.models.lora import adapter_layers, has_adapters, install_adapters
from lockstep.models.shared_weights import rollout_module
from lockstep.models.token_models import PolicyModel, ScalarModel, TokenModel
from lockstep.models.weight_source import WeightSource
from lockstep.utils.distributed import join_process_group
from tests.tiny import random_batch
from tests.value_model import load_value_model

CPU = torch.device("cpu")
TEMPERATURE = 0.8
CLIP_GRAD = 0.4
OPTIM = FSDPOptimizerConfig(lr=1e-3, lr_scheduler_type="linear", total_training_steps=10)
ONE_ROW = MicroBatching(num_rows=1)
NUM_ROWS, NUM_REAL = 8, 5
"""Rows of a batch over all ranks; those after the first five are padding: at data-parallel size 4 a rank has nothing else."""


@dataclass(frozen=True)
class Case:
    """One run: how the ranks share it, and what must not change its result.

    megatron: settings of the Megatron engine; None for FSDP.
    """

    world: int = 1
    sp: int = 1
    kind: str = "policy"
    micro: MicroBatching = ONE_ROW
    fsdp: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] | None = None
    """Settings of the DeepSpeed engine; None for the FSDP engine."""
    checkpointing: bool = False
    compute: torch.dtype = torch.float32
    packed: bool = True
    num_real: int = NUM_REAL
    frozen: str = ""
    lora: int = 0
    load_in_4bit: bool = False
    megatron: dict[str, Any] | None = None
    device: str = "cpu"

    def __str__(self) -> str:
        changed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != getattr(Case(), f.name)]
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in changed)


def make_batch(step: int, num_real: int = NUM_REAL) -> TensorDict:
    """Rows over all ranks; the first two have one prompt, and padding rows are one token that predicts nothing."""
    batch = random_batch(NUM_ROWS, seed=step)
    num_prompt = batch["prompts"].shape[1]
    for name in ("input_ids", "attention_mask"):
        batch[name][1, :num_prompt] = batch[name][0, :num_prompt]
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    batch["attention_mask"][num_real:] = 0
    batch["attention_mask"][num_real:, 0] = 1
    for name in ("response_mask", "position_ids"):
        batch[name][num_real:] = 0
    return batch


def summed_loss(outputs: dict[str, Tensor], rows: TensorDict) -> Tensor:
    """Over tokens: of a policy by its ratio and entropy, of values by their squared error."""
    if "values" in outputs:
        return ((outputs["values"] - rows["returns"]) ** 2 * rows["response_mask"]).sum()
    ratio = (outputs["log_probs"] - rows["old_log_probs"]).clamp(-2, 2).exp()
    return ((-rows["advantages"] * ratio - 0.05 * outputs["entropy"]) * rows["response_mask"]).sum()


def open_model(folder: Path, case: Case) -> tuple[TokenModel, WeightSource]:
    config = HFModelConfig(path=str(folder), lora_rank=case.lora, load_in_4bit=case.load_in_4bit)
    device = torch.device(case.device)
    dtype = case.compute if case.lora else torch.float32
    model: TokenModel
    if case.kind == "policy":
        transformer, weights = open_causal_lm(config, "m", dtype, device)
        model = PolicyModel(transformer)
    else:
        body, score, weights = open_value_model(config, "m", dtype, device, seed=3)
        model = ScalarModel(body, score)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (case.frozen and case.frozen in name))
    install_adapters(model, config, "m", dtype=torch.float32, device=device, seed=5)
    return model, weights


def build_engine(folder: Path, case: Case, *, trained: bool = True, router_key: str | None = None) -> Any:
    if case.megatron is not None:
        spec = EngineModel(
            HFModelConfig(path=str(folder), enable_gradient_checkpointing=case.checkpointing),
            "actor_rollout_ref.model",
            "policy" if case.kind == "policy" else "value",
            McoreEngineConfig(seed=3, dtype=str(case.compute).removeprefix("torch."), **case.megatron),
            optim=OPTIM if trained else None,
            clip_grad=CLIP_GRAD,
        )
        return create_train_engine("megatron", spec, torch.device(case.device))
    model, weights = open_model(folder, case)
    if case.zero is not None:
        return DeepSpeedEngine(
            model,
            DeepSpeedEngineConfig(**case.zero),
            OPTIM if trained else None,
            weights=weights,
            device=torch.device(case.device),
            compute_dtype=case.compute,
            packed=case.packed,
            clip_grad=CLIP_GRAD,
            gradient_checkpointing=case.checkpointing,
            router_key=router_key,
        )
    return FsdpEngine(
        model,
        FSDPEngineConfig(**case.fsdp),
        OPTIM if trained else None,
        weights=weights,
        device=torch.device(case.device),
        compute_dtype=case.compute,
        packed=case.packed,
        clip_grad=CLIP_GRAD,
        gradient_checkpointing=case.checkpointing,
        sequence_parallel_size=case.sp,
        router_key=router_key,
    )


def own_rows(engine: TrainEngine, batch: TensorDict) -> TensorDict:
    return batch.chunk(engine.dp_size)[engine.dp_rank]


def options(case: Case) -> dict[str, Any]:
    return {"temperature": TEMPERATURE, "with_entropy": True} if case.kind == "policy" else {}


def engine_step(engine: TrainEngine, case: Case, number: int) -> tuple[float, float]:
    """Loss and gradient norm of one optimizer step."""
    rows = own_rows(engine, make_batch(number, case.num_real))
    (num_tokens,) = engine.global_sum(float(rows["response_mask"].sum()))

    def loss_fn(outputs: dict[str, Tensor], part: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        share = summed_loss(outputs, part) / num_tokens
        return share, {"loss": share}

    engine.onload(optimizer=True, ahead=True)
    metrics = engine.forward_backward(rows, loss_fn, case.micro, **options(case))
    norm = engine.optimizer_step()
    engine.schedule_step()
    engine.offload()
    return metrics["loss"], norm


def outputs_of(engine: TrainEngine, case: Case) -> dict[str, np.ndarray]:
    """Outputs of all ranks' rows, in the order of the whole batch."""
    engine.onload()
    out = engine.forward(own_rows(engine, make_batch(0, case.num_real)), case.micro, **options(case))
    engine.offload()
    return {name: all_rows(engine, values).numpy() for name, values in out.items()}


def all_rows(engine: TrainEngine, values: Tensor) -> Tensor:
    """The rows of all data-parallel ranks in order; the ranks that share rows must have the same values."""
    if not dist.is_initialized():
        return values
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (engine.dp_rank, engine.group_rank, values))
    first = {dp_rank: rows for dp_rank, group_rank, rows in found if group_rank == 0}
    assert len(first) == engine.dp_size
    assert all(torch.equal(rows, first[dp_rank]) for dp_rank, _, rows in found)
    return torch.cat([first[dp_rank] for dp_rank in range(engine.dp_size)])


def weights_of(engine: Any) -> dict[str, np.ndarray]:
    """All of them, or the adapters of a model that has some."""
    weights = engine.weights(trained=has_adapters(engine.model))
    return {name: tensor.cpu().numpy().copy() for name, tensor in weights}


def train(folder: Path, case: Case, num_steps: int = 3) -> dict[str, Any]:
    engine = build_engine(folder, case)
    return _run(engine, case, num_steps) | {"weights": weights_of(engine)}


def train_only(folder: Path, case: Case, num_steps: int = 3) -> dict[str, Any]:
    return _run(build_engine(folder, case), case, num_steps)


def _run(engine: TrainEngine, case: Case, num_steps: int) -> dict[str, Any]:
    """Outputs before the first step, and each step's loss and gradient norm."""
    outputs = outputs_of(engine, case)
    return {"outputs": outputs, "steps": [engine_step(engine, case, number) for number in range(num_steps)]}


def scores(folder: Path, case: Case) -> np.ndarray:
    """Of a frozen model, at the last token of every row."""
    engine = build_engine(folder, case, trained=False)
    out = engine.forward(own_rows(engine, make_batch(0, case.num_real)), case.micro, at_end=True)
    return all_rows(engine, out["score"]).numpy()


def decode_then_train(folder: Path, case: Case) -> tuple[list[list[int]], tuple[float, float]]:
    """Greedy tokens of as many prompts as the rank's number (alone: of all), then one training step."""
    engine = build_engine(folder, case)
    assert isinstance(engine.model, PolicyModel)
    module = rollout_module(engine.model.model)
    prompts = torch.arange(3, 3 + 4 * 6).view(4, 6)
    mine = prompts[: dist.get_rank()] if case.world > 1 else prompts
    with engine.lend_weights(module), torch.no_grad():
        tokens = [_greedy(module, prompt) for prompt in mine]
    addresses = [p.data_ptr() for p in module.parameters()]
    step = engine_step(engine, case, 0)
    with engine.lend_weights(module):
        assert [p.data_ptr() for p in module.parameters()] == addresses  # captured graphs remain valid
        attention = module.get_decoder().layers[0].self_attn
        if not case.load_in_4bit:
            assert packed_view([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None
        for name, weight in engine.weights():
            assert torch.equal(dequantized(module.get_parameter(name)), weight), name
    return tokens, step


def _greedy(model: nn.Module, tokens: Tensor, num_new: int = 3) -> list[int]:
    for _ in range(num_new):
        context = PackedAttention([len(tokens)], CPU)
        positions = torch.arange(len(tokens))[None]
        logits = model(
            input_ids=tokens[None],
            position_ids=positions,
            attention_mask=no_mask(CPU),
            use_cache=False,
            lockstep_context=context,
        ).logits
        tokens = torch.cat([tokens, logits[0, -1:].argmax(-1)])
    return tokens[-num_new:].tolist()


def save_and_go_on(folder: Path, case: Case, checkpoint: Path) -> dict[str, Any]:
    engine = build_engine(folder, case)
    engine_step(engine, case, 0)
    torch.manual_seed(100 + engine.dp_rank)
    engine.onload(optimizer=True)
    engine.save(checkpoint)
    engine.offload()
    return _next_step(engine, case)


def load_and_go_on(folder: Path, case: Case, checkpoint: Path) -> dict[str, Any]:
    engine = build_engine(folder, case)
    engine.onload(optimizer=True)
    engine.load(checkpoint)
    engine.offload()
    return _next_step(engine, case)


def _next_step(engine: TrainEngine, case: Case) -> dict[str, Any]:
    rate = engine.learning_rate
    return {"learning_rate": rate, "step": engine_step(engine, case, 1), "weights": weights_of(engine)}


def draw_after_load(folder: Path, case: Case, checkpoint: Path) -> float:
    build_engine(folder, case).load(checkpoint)
    return float(torch.rand(()))


def not_finite(folder: Path, case: Case) -> tuple[str, bool]:
    """The error of a step whose loss is not finite on the last rank, and whether it changed weights or the next step."""
    engine, other = build_engine(folder, case), build_engine(folder, case)
    factor = float("nan") if engine.dp_rank == engine.dp_size - 1 else 1.0
    before = weights_of(engine)
    engine.forward_backward(
        own_rows(engine, make_batch(0)), lambda out, rows: (out["log_probs"].sum() * factor, {}), case.micro
    )
    try:
        engine.optimizer_step()
    except FloatingPointError as error:
        after = weights_of(engine)
        same = all(np.array_equal(before[name], after[name]) for name in before)
        return str(error), not same or engine_step(engine, case, 0) != engine_step(other, case, 0)
    return "", True


def roles_of_a_run(folder: Path, case: Case) -> dict[str, Any]:
    """An actor and a critic that train in turns beside a reference, all in the process of this rank."""
    scalar = dataclasses.replace(case, kind="scalar")
    actor, critic = build_engine(folder, case), build_engine(folder, scalar)
    frozen = build_engine(folder, case, trained=False)
    before = outputs_of(frozen, case)
    turns = [(engine_step(actor, case, n), engine_step(critic, scalar, n)) for n in range(3)]
    after = outputs_of(frozen, case)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert not list(frozen.weights(trained=True))
    steps = {kind: [turn[place] for turn in turns] for place, kind in enumerate(("policy", "scalar"))}
    return {"outputs": after, "steps": steps, "reference": weights_of(frozen)}


def zero_stage(folder: Path, case: Case) -> int:
    engine = build_engine(folder, case)
    assert isinstance(engine, DeepSpeedEngine)
    return engine.stage


def exported(folder: Path, case: Case) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in build_engine(folder, case).saved_weights()}


def refusal(folder: Path, case: Case) -> str:
    try:
        train_only(folder, case)
    except ValueError as error:
        return str(error)
    return ""


def build_only(folder: Path, case: Case) -> None:
    build_engine(folder, case)


def place(folder: Path, case: Case) -> tuple[int, int, int]:
    engine = build_engine(folder, case)
    return engine.dp_rank, engine.dp_size, engine.group_rank


def join_again() -> None:
    join_process_group(5, 8, CPU, timeout_s=1)


class Reference:
    """The same training by plain transformers and autograd: whole model, row by row, eager attention."""

    def __init__(self, folder: Path, kind: str, num_real: int = NUM_REAL, frozen: str = "", lora: int = 0) -> None:
        self.kind, self.num_real, self.lora = kind, num_real, lora
        if kind == "policy":
            self.model: nn.Module = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            )
        else:
            body = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            head = load_value_model(HFModelConfig(path=str(folder)), "m", torch.float32, CPU, seed=3)[1]
            self.model = nn.ModuleDict({"model": body, "score": head})
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not (frozen and frozen in name))
        if lora:
            self._add_adapters(folder, lora)
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad], lr=OPTIM.lr, weight_decay=OPTIM.weight_decay
        )

    def _add_adapters(self, folder: Path, rank: int) -> None:
        """peft's own layers and forward, with the initial values of the engine's adapters."""
        target: Any = self.model if self.kind == "policy" else self.model["model"]  # type: ignore[index]
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=16, target_modules="all-linear"), target)
        initial = adapter_layers(open_model(folder, Case(kind=self.kind, lora=rank))[0].transformer)
        for name, layer in adapter_layers(target).items():
            for part in ("lora_A", "lora_B"):
                getattr(layer, part).load_state_dict(getattr(initial[name], part).state_dict())

    def outputs(self, batch: TensorDict) -> dict[str, Tensor]:
        results: dict[str, list[Tensor]] = {}
        for i in range(len(batch)):
            for name, values in self._row(batch[i]).items():
                results.setdefault(name, []).append(values)
        return {name: torch.stack(values) for name, values in results.items()}

    def _row(self, row: TensorDict) -> dict[str, Tensor]:
        present = row["attention_mask"].bool()
        ids, width = row["input_ids"][present], row["responses"].shape[0]
        start = int(present[:-width].sum())
        columns = row["response_mask"].nonzero().flatten()
        if self.kind == "policy":
            logits = self.model(input_ids=ids[None]).logits[0] / TEMPERATURE
            logp = torch.log_softmax(logits[start + columns - 1], -1)
            chosen = logp.gather(-1, ids[start + columns][:, None])[:, 0]
            found = {"log_probs": chosen, "entropy": -(logp.exp() * logp).sum(-1)}
        else:
            hidden = self.model["model"](input_ids=ids[None]).last_hidden_state[0]  # type: ignore[index]
            found = {"values": self.model["score"](hidden)[start + columns - 1, 0]}  # type: ignore[index]
        return {name: torch.zeros(width).index_put((columns,), values) for name, values in found.items()}

    def step(self, number: int) -> tuple[float, float]:
        rows = make_batch(number, self.num_real)[: self.num_real]
        loss = summed_loss(self.outputs(rows), rows) / rows["response_mask"].sum()
        for group in self.optimizer.param_groups:
            group["lr"] = OPTIM.lr * (1 - number / OPTIM.total_training_steps)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_GRAD)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach()), float(norm)

    def run(self, num_steps: int = 3) -> dict[str, Any]:
        with torch.no_grad():
            outputs = {n: v.numpy() for n, v in self.outputs(make_batch(0, self.num_real)[: self.num_real]).items()}
        steps = [self.step(number) for number in range(num_steps)]
        kept = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad or not self.lora]
        weights = {name: p.detach().numpy() for name, p in kept}
        return {"outputs": outputs, "steps": steps, "weights": weights}
