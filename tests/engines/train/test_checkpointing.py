"""Which layers keep their activations, by hand-computed cases; the engine and the plan count the same gathered layers."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lockstep.config.model import HFModelConfig
from lockstep.engines.train.checkpointing import LayerCheckpointing
from lockstep.kernels.activation_memory import gathered_bytes, kept_layers
from lockstep.models import state_layer
from lockstep.models.attention import ATTENTION_NAME
from lockstep.models.known_models import install_decoder_layers
from lockstep.models.loading import load_causal_lm
from lockstep.models.token_models import PolicyModel
from lockstep.plan.model_shape import ModelShape
from tests.models.architectures import tiny_model
from tests.tiny import save_tiny_model


@pytest.mark.parametrize(
    ("free", "gathered", "kept"),
    [
        (80, 0, 8),  # all: 8 * 5 of 80 - 10
        (60, 0, 5),  # what leaves 35 free
        (80, 40, 4),  # 30 are left: 8 streams, a layer that is recomputed, and 4 * (5 - 1)
        (60, 40, 0),
        (10, 0, 0),
    ],
)
def test_kept_layers(free: float, gathered: float, kept: int) -> None:
    assert kept_layers(total=100, free=free, num_layers=8, layer=5, stream=1, gathered=gathered) == kept


def test_gathered_layers_are_counted_as_in_the_plan(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    cpu = torch.device("cpu")
    model = PolicyModel(load_causal_lm(HFModelConfig(path=str(tmp_path)), "m", torch.float32, cpu))
    checkpointing = LayerCheckpointing(model, cpu, torch.bfloat16, every_layer=False)
    shape = ModelShape.from_folder(tmp_path)
    layer, outside = shape.layer_parameters, shape.parameters - shape.layers * shape.layer_parameters
    assert checkpointing._gathered_bytes(model) == gathered_bytes(layer, outside, max(layer, outside), 2)
    assert checkpointing._gathered == 0  # it is not sharded


@pytest.mark.parametrize(
    ("has_kernels", "free", "checkpointed"),
    [(True, 10**9, [False, False, True]), (False, 10**9, [True, False, True]), (True, 10**6, [True, True, True])],
)
def test_layers_of_unknown_size_are_checkpointed_and_others_if_they_do_not_fit(
    has_kernels: bool, free: int, checkpointed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer with a state, one with attention, and one with experts, whose size is not known."""
    types = ["linear_attention", "full_attention", "linear_attention"]
    hybrid = tiny_model("qwen3_next", num_hidden_layers=3, layer_types=types, mlp_only_layers=[0, 1])
    hybrid.set_attn_implementation(ATTENTION_NAME)
    assert install_decoder_layers(hybrid)
    model, cpu = PolicyModel(hybrid.requires_grad_(False)), torch.device("cpu")
    checkpointing = LayerCheckpointing(model, cpu, torch.bfloat16, every_layer=False)
    monkeypatch.setattr(checkpointing, "_adapts", True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=10**9))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(state_layer, "trains_with_kernels", lambda: has_kernels)
    checkpointing.plan(1000)
    assert [layer.gradient_checkpointing for layer in hybrid.get_decoder().layers] == checkpointed
