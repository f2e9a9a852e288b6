"""Adjacent weights: the same values and parameter objects, seen as one tensor."""

import pytest
import torch
from torch import nn
from transformers import Qwen2ForCausalLM

from lockstep.kernels.packed import packed, packed_view
from lockstep.models.packed_weights import pack_weights
from tests.tiny import tiny_config


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(tiny_config())


def test_packing_keeps_values_and_parameter_objects(model: nn.Module) -> None:
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    pack_weights(model)
    for name, parameter in model.named_parameters():
        same, values = before[name]
        assert parameter is same and torch.equal(parameter, values)
    addresses = [p.data_ptr() for p in model.parameters()]
    pack_weights(model)
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_packed_weights_are_one_view(model: nn.Module) -> None:
    attention, mlp = model.get_submodule("model.layers.1.self_attn"), model.get_submodule("model.layers.1.mlp")
    groups = [
        [attention.get_parameter(f"{name}_proj.weight") for name in "qkv"],
        [attention.get_parameter(f"{name}_proj.bias") for name in "qkv"],
        [mlp.get_parameter(f"{name}_proj.weight") for name in ("gate", "up")],
    ]
    expected = [torch.cat([w.detach() for w in weights]) for weights in groups]
    for weights, joint in zip(groups, expected):
        assert packed_view(weights) is None
        assert torch.equal(packed(weights), joint)
    pack_weights(model)
    for weights, joint in zip(groups, expected):
        view = packed_view(weights)
        assert view is not None and torch.equal(view, joint)
        assert packed(weights).data_ptr() == weights[0].data_ptr()
    assert packed_view([groups[1][1], groups[1][0]]) is None
    assert packed_view([None, None]) is None
