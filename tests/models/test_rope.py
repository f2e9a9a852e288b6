"""Frequencies of dynamic and longrope do not depend on what else is in a batch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from lockstep.models.attention import ATTENTION_NAME, PackedAttention, no_mask
from lockstep.models.known_models import install_decoder_layers
from lockstep.models.rope import fix_rope, rope_limit
from lockstep.models.shared_weights import rollout_module, share_weights
from tests.tiny import tiny_config

ORIGINAL = 16
ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 6.0],
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}


def model_with(rope: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    longest = ORIGINAL if rope == "dynamic" else 4 * ORIGINAL
    config = tiny_config("llama", rope_parameters=ROPES[rope], max_position_embeddings=longest)
    return LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()


@torch.no_grad()
def packed_logits(model: LlamaForCausalLM, *rows: Tensor) -> list[Tensor]:
    lengths = [len(row) for row in rows]
    out = model(
        input_ids=torch.cat(rows)[None],
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        attention_mask=no_mask(torch.device("cpu")),
        use_cache=False,
        lockstep_context=PackedAttention(lengths, torch.device("cpu")),
    )
    return list(out.logits[0].split(lengths))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("max_length", [ORIGINAL, 40])
def test_a_row_has_the_same_values_beside_a_longer_one(rope: str, max_length: int) -> None:
    model = model_with(rope)
    long, short = (torch.randint(3, 200, (n,), generator=torch.Generator().manual_seed(n)) for n in (max_length, 9))
    with torch.no_grad():
        expected = model(input_ids=long[None]).logits[0]  # transformers, for a row of the run's longest length
    model.set_attn_implementation(ATTENTION_NAME)
    install_decoder_layers(model)
    fix_rope(model, max_length)
    assert rope_limit(model) == max_length
    torch.testing.assert_close(packed_logits(model, long)[0], expected, atol=1e-4, rtol=1e-4)
    alone, beside = packed_logits(model, short)[0], packed_logits(model, short, long)[0]
    torch.testing.assert_close(alone, beside, atol=1e-5, rtol=1e-5)
    module = rollout_module(model)
    share_weights(module, model)
    torch.testing.assert_close(packed_logits(module, short, long)[0], alone, atol=1e-5, rtol=1e-5)


def test_other_ropes_have_no_limit() -> None:
    model = LlamaForCausalLM(tiny_config("llama"))
    fix_rope(model, 8)
    assert rope_limit(model) is None
