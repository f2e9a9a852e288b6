"""The rollout's twin holds the trainer's own tensors, and lets go of them."""

import torch
from transformers import Qwen2ForCausalLM

from lockstep.models.attention import ATTENTION_NAME, PackedAttention
from lockstep.models.twin import make_twin, release, share
from tests.tiny import tiny_config


def tied_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM._from_config(tiny_config(tie_word_embeddings=True), attn_implementation=ATTENTION_NAME)


def test_an_update_of_the_model_is_seen_by_the_twin() -> None:
    model = tied_model().train()
    twin = make_twin(model)
    share(twin, model)
    for mine, theirs in zip(twin.parameters(), model.parameters()):
        assert mine.data_ptr() == theirs.data_ptr()
    ids = torch.tensor([[5, 6, 7]])
    inputs = {"input_ids": ids, "position_ids": torch.arange(3)[None], "use_cache": False}
    context = PackedAttention([3], ids.device)
    with torch.no_grad():
        before = twin(**inputs, lockstep_context=context).logits
        model.lm_head.weight.mul_(1.5)
        after = twin(**inputs, lockstep_context=context).logits
        torch.testing.assert_close(after, model.eval()(**inputs, lockstep_context=context).logits)
    assert not torch.allclose(before, after)
    assert not twin.training


def test_release_leaves_no_reference_to_the_weights() -> None:
    model = tied_model()
    twin = make_twin(model)
    share(twin, model)
    release(twin)
    assert all(p.is_meta for _, p in twin.named_parameters(remove_duplicate=False))
    assert not any(p.is_meta for p in model.parameters())
    share(twin, model)
    assert twin.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()
