"""The rollout's module uses the trainer's tensors, or copies that stay where they are."""

import torch
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM

from lockstep.kernels.packed import packed_view
from lockstep.models.attention import ATTENTION_NAME, PackedAttention
from lockstep.models.shared_weights import copy_gathered, release_weights, rollout_module, share_weights
from tests.tiny import tiny_config


def tied_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM._from_config(tiny_config(tie_word_embeddings=True), attn_implementation=ATTENTION_NAME)


@torch.no_grad()
def logits_of(model: nn.Module) -> Tensor:
    ids = torch.tensor([[5, 6, 7]])
    context = PackedAttention([3], ids.device)
    out: Tensor = model(
        input_ids=ids, position_ids=torch.arange(3)[None], use_cache=False, lockstep_context=context
    ).logits
    return out


def test_the_rollout_sees_an_update_of_shared_weights() -> None:
    model = tied_model()
    module = rollout_module(model)
    share_weights(module, model)
    assert [p.data_ptr() for p in module.parameters()] == [p.data_ptr() for p in model.parameters()]
    before = logits_of(module)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    torch.testing.assert_close(logits_of(module), logits_of(model.eval()))
    assert not torch.allclose(before, logits_of(module))
    assert not module.training


def test_released_weights_are_not_referenced() -> None:
    model = tied_model()
    module = rollout_module(model)
    share_weights(module, model)
    release_weights(module)
    assert all(p.is_meta for _, p in module.named_parameters(remove_duplicate=False))
    assert not any(p.is_meta for p in model.parameters())
    share_weights(module, model)
    assert module.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()


def test_copied_weights_stay_in_place_and_packed() -> None:
    model = tied_model()
    module = rollout_module(model)
    copy_gathered(module, model.named_parameters(), model)
    addresses = [p.data_ptr() for p in module.parameters()]
    assert not set(addresses) & {p.data_ptr() for p in model.parameters()}
    assert module.lm_head.weight is module.get_input_embeddings().weight
    attention = module.get_submodule("model.layers.0.self_attn")
    assert packed_view([attention.get_parameter(f"{name}_proj.weight") for name in "qkv"]) is not None
    torch.testing.assert_close(logits_of(module), logits_of(model.eval()))
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    copy_gathered(module, model.named_parameters(), model)
    assert [p.data_ptr() for p in module.parameters()] == addresses
    torch.testing.assert_close(logits_of(module), logits_of(model))
