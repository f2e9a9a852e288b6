"""Weights that one product serves lie side by side, and stay what they were."""

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from lockstep.kernels.joined import together
from lockstep.models.adjacent import joined, lay_adjacent


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Qwen2ForCausalLM(Qwen2Config(**shape, num_key_value_heads=2, vocab_size=50))


def test_values_and_parameters_stay(model: nn.Module) -> None:
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    lay_adjacent(model)
    for name, parameter in model.named_parameters():
        same, values = before[name]
        assert parameter is same and torch.equal(parameter, values)


def test_a_second_call_moves_nothing(model: nn.Module) -> None:
    lay_adjacent(model)
    places = [p.data_ptr() for p in model.parameters()]
    lay_adjacent(model)
    assert [p.data_ptr() for p in model.parameters()] == places


def test_what_lies_side_by_side_is_seen_as_one(model: nn.Module) -> None:
    attention, mlp = model.get_submodule("model.layers.1.self_attn"), model.get_submodule("model.layers.1.mlp")
    groups = [
        [attention.get_parameter(f"{name}_proj.weight") for name in "qkv"],
        [mlp.get_parameter(f"{name}_proj.weight") for name in ("gate", "up")],
    ]
    expected = [torch.cat([w.detach() for w in weights]) for weights in groups]
    for weights, one in zip(groups, expected):
        assert joined(weights) is None
        assert torch.equal(together(weights), one)
    lay_adjacent(model)
    for weights, one in zip(groups, expected):
        joint = joined(weights)
        assert joint is not None and torch.equal(joint, one)
        assert together(weights).data_ptr() == weights[0].data_ptr()
    biases = [attention.get_parameter(f"{name}_proj.bias") for name in "qkv"]
    assert joined(biases) is not None
    assert joined([biases[1], biases[0]]) is None
    assert joined([None, None]) is None
