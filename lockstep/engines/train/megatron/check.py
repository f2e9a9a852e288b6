"""Comparison with transformers when an engine loads a model.

layout:  a tiny random model of the same architecture, divided in the same way: outputs of packed rows and the gradient of every
         parameter. What goes wrong between ranks (a gradient that is not summed, a padded vocabulary) shows at any size.
weights: the model itself: log-probs or values of a few random rows. transformers' own eager forward gets the weights one layer at a
         time, as they are handed out, so that no rank holds the whole model.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from lockstep.engines.train.megatron import families
from lockstep.engines.train.megatron.model import Kind
from lockstep.engines.train.megatron.parallel import Layout
from lockstep.engines.train.megatron.stage import Outputs, Stage, StageSettings
from lockstep.engines.train.megatron.weights import load_slices
from lockstep.models.model_check import check_batch, check_outputs, transformers_forward
from lockstep.models.packing import forward_rows
from lockstep.models.token_models import PolicyModel, ScalarModel, TokenModel

BOUND = 1e-4
"""Largest difference of an output or a gradient in float32 that counts as rounding, relative to the largest value."""

_passed: set[tuple[Any, ...]] = set()


def check_layout(hf: PretrainedConfig, kind: Kind, settings: StageSettings, *, tied: bool) -> None:
    """ValueError if a tiny model in this layout differs from transformers. Collective; once per architecture and layout."""
    done = (hf.model_type, kind, tied, settings.layout, settings.engine.sequence_parallel, settings.trained)
    if (*done, dist.group.WORLD) in _passed:
        return
    with torch.random.fork_rng(devices=[]):
        model = _tiny_model(hf, kind, settings.layout, tied=tied)
    model.to(settings.device)
    engine = replace(settings.engine, override_transformer_config={}, override_ddp_config={})
    tiny = replace(settings, engine=engine, dtype=torch.float32, sharded=False, recompute=False)
    stage = Stage(model, kind, tiny)
    parameters = dict(model.named_parameters())

    def read(piece: Any, own: Tensor, start: int) -> None:
        own.copy_(parameters[piece.name].detach()[start : start + len(own)])

    load_slices(stage.slices, read, lambda parameter, values: parameter.data.copy_(values))
    batch = check_batch(model.hf_config.vocab_size)
    expected = model(forward_rows(batch, settings.device, "rows"), **_options(kind))
    _probe(expected, batch).backward()
    found = _outputs_and_gradients(stage, batch, kind)
    problems: list[str] = []
    if found is not None:
        problems += [_difference(f"its {name}", found[name], values) for name, values in expected.items()]
    if settings.trained:
        for piece in stage.slices:
            ours = piece.gathered(lambda parameter: parameter.main_grad, torch.float32, settings.device)  # type: ignore[attr-defined]
            theirs = parameters[piece.name].grad
            assert theirs is not None
            problems.append(_difference(f"the gradient of {piece.name}", ours, theirs))
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        everyones, [problem for problem in problems if problem]
    )  # outputs are on the last stage alone
    if any(everyones):
        raise ValueError(
            f"strategy=megatron computes {hf.model_type} differently from transformers with {settings.layout}: of a tiny model "
            f"{next(problems[0] for problems in everyones if problems)}. Set strategy=fsdp, and report this"
        )
    _passed.add((*done, dist.group.WORLD))


def _options(kind: Kind) -> dict[str, Any]:
    return {"with_entropy": True, "temperature": 0.7} if kind == "policy" else {}


def _probe(outputs: Outputs, batch: TensorDict) -> Tensor:
    """A loss that weighs every output differently."""
    total = torch.zeros((), device=next(iter(outputs.values())).device)
    for number, values in enumerate(outputs.values()):
        weights = torch.linspace(-1, 1, values.numel(), device=values.device).view(values.shape) + 0.3 * number
        total = total + (values * weights).sum()
    return total


def _outputs_and_gradients(stage: Stage, batch: TensorDict, kind: Kind) -> Outputs | None:
    """Outputs on the last pipeline stage; each data-parallel rank computes the same rows, and their mean is the gradient."""
    train = stage.settings.trained

    def use(outputs: Outputs, rows: TensorDict) -> tuple[Tensor, Outputs]:
        return _probe(outputs, rows), {name: values.detach() for name, values in outputs.items()}

    results = stage.run([batch], 1, use, _options(kind), train=train)
    return results[0] if results else None


def _difference(what: str, ours: Tensor, theirs: Tensor) -> str:
    """Empty if they differ by rounding."""
    scale = float(theirs.detach().abs().max())
    error = float((ours - theirs.detach()).abs().max())
    return (
        ""
        if error <= BOUND * scale + 1e-7
        else f"{what} differs by {error:.2g}, where its largest value is {scale:.2g}"
    )


def _tiny_model(hf: PretrainedConfig, kind: Kind, layout: Layout, *, tied: bool) -> TokenModel:
    """Small in every dimension, with a vocabulary that does not divide by the ranks, and one layer per pipeline stage."""
    config: Any = copy.deepcopy(hf)
    tp = layout.tp
    sizes = {
        "num_hidden_layers": layout.pp,
        "num_attention_heads": 2 * tp,
        "num_key_value_heads": tp,
        "head_dim": 8,
        "hidden_size": 16 * tp,
        "intermediate_size": 8 * tp * max(1, layout.expert_tp),
        "vocab_size": 24 * tp + 1,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ["full_attention"] * layout.pp,
        "tie_word_embeddings": tied,
    }
    family = families.FAMILIES[hf.model_type]
    if family.experts is not None:
        number, inner = family.experts
        sizes |= {number: 2 * layout.ep, inner: 8 * layout.expert_tp, "num_experts_per_tok": 2}
    if family.shared_expert is not None:
        sizes[family.shared_expert] = 8 * tp
    for name, value in sizes.items():
        if hasattr(config, name):
            setattr(config, name, value)
    for name in ("bos_token_id", "eos_token_id"):
        setattr(config, name, None)
    config.pad_token_id = int(check_batch(config.vocab_size)["responses"][1, 0])  # its embedding gets no gradient
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + (parameter.dim() == 1))
    if kind == "policy":
        return PolicyModel(whole)
    score = nn.Linear(config.hidden_size, 1, bias=False)
    return ScalarModel(whole.model, score)


def check_weights(
    outputs: Outputs, batch: TensorDict, model: TokenModel, weights: Iterator[tuple[str, Tensor]], dtype: torch.dtype
) -> None:
    """ValueError if the engine's outputs for `batch` differ from transformers'. Collective.

    model: without memory for its parameters. weights: every parameter by its name in `model`, in its order, whole.
    """
    device = next(iter(model.buffers())).device
    with torch.no_grad(), transformers_forward(model.transformer), _filled_while_called(model, weights):
        expected = _padded_outputs(model, batch.to(device))
    check_outputs(outputs, expected, batch, model=model.transformer, path="training with megatron", dtype=dtype)


def _padded_outputs(model: TokenModel, batch: TensorDict) -> Outputs:
    """Of all rows in one forward of transformers, which needs the weights of a layer once."""
    transformer: Any = model.transformer
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    out = transformer(**inputs, use_cache=False)
    width = batch["responses"].shape[1]
    if isinstance(model, ScalarModel):
        return {"values": model.score(out.last_hidden_state[:, -width - 1 : -1]).squeeze(-1).float()}
    log_p = out.logits[:, -width - 1 : -1].float().log_softmax(-1)
    return {"log_probs": log_p.gather(-1, batch["responses"][..., None]).squeeze(-1)}


@contextmanager
def _filled_while_called(model: TokenModel, weights: Iterator[tuple[str, Tensor]]) -> Iterator[None]:
    """Each layer, and each module outside of layers, has its parameters while it is called: in the order of `weights`."""
    transformer: Any = model.transformer
    body = transformer if isinstance(model, ScalarModel) else transformer.get_decoder()
    last = model.score if isinstance(model, ScalarModel) else transformer.lm_head
    tied = {id(last.weight)} if last.weight is body.embed_tokens.weight else set()
    kept: dict[int, Tensor] = {}

    def fill(module: nn.Module, *unused: object) -> None:
        for owner in module.modules():
            for name, parameter in list(owner._parameters.items()):
                if parameter is None:
                    continue
                if id(parameter) not in kept:
                    kept[id(parameter)] = next(weights)[1]
                filled[owner, name] = parameter
                owner._parameters[name] = nn.Parameter(kept[id(parameter)], requires_grad=False)

    def empty(module: nn.Module, *unused: object) -> None:
        for owner in module.modules():
            for name in list(owner._parameters):
                if (parameter := filled.pop((owner, name), None)) is not None:
                    owner._parameters[name] = parameter
                    if id(parameter) not in tied:
                        kept.pop(id(parameter), None)

    filled: dict[tuple[nn.Module, str], nn.Parameter] = {}
    hooks = []
    for module in (body.embed_tokens, *body.layers, body.norm, last):
        hooks += [module.register_forward_pre_hook(fill), module.register_forward_hook(empty)]
    try:
        yield
        for _ in weights:  # a rank that stops earlier would leave the others waiting
            pass
    finally:
        for hook in hooks:
            hook.remove()
        for (owner, name), parameter in filled.items():
            owner._parameters[name] = parameter
