"""Routers of every mixture of experts in transformers: recorded, replayed to the bit, or refused by name; the load-balance loss."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from lockstep.models.router_replay import (
    FREE,
    RouterOutputs,
    Routing,
    balance_loss,
    check_balance_loss,
    find_routers,
    route_dtype,
)
from tests.models.architectures import tiny_config

QUICK = ("qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
READ = (
    *("afmoe", "axk1", "cohere2_moe", "deepseek_v2", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe"),
    *(
        "glm4_moe_lite",
        "granitemoe",
        "granitemoe_swa",
        "granitemoeshared",
        "hunyuan_v1_moe",
        "hy_v3",
        "laguna",
        "mellum",
    ),
    *("mimo_v2_flash", "minimax_m2", "olmoe", "solar_open"),
)
"""Types that compute on packed tokens and whose routers can be read; docs/moe.md lists them."""
REFUSED = {
    "dbrx": "the router of DbrxForCausalLM's transformer.blocks.0.ffn .* is not recognised",
    "jetmoe": "is not recognised",
    "longcat_flash": "does not choose its experts by one top-k",
    "llama": "LlamaForCausalLM has no experts",
}


def tiny(kind: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(kind), attn_implementation="eager").eval()


def logits_and_gradients(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    logits.logsumexp(-1).sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kind", [*QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in READ)])
def test_own_experts_replay_to_the_bit_and_others_are_used(kind: str) -> None:
    model = tiny(kind)
    ids = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(0))
    plain = logits_and_gradients(model, ids)
    routing = Routing(model, "key")
    routing.begin()
    assert all(torch.equal(a, b) for a, b in zip(logits_and_gradients(model, ids), plain, strict=True))
    routes = routing.end().routes()
    assert routes.shape == (12, routing.num_layers, routing.top_k)
    routing.begin(routes, replay=True)
    assert all(torch.equal(a, b) for a, b in zip(logits_and_gradients(model, ids), plain, strict=True))
    assert routing.end().mismatch().max() == 0

    others = (routes + 1) % routing.num_experts
    others[5:] = FREE
    routing.begin(others, replay=True)
    changed = logits_and_gradients(model, ids)
    outputs = routing.end()
    assert torch.equal(outputs.routes()[:5], others[:5])
    assert (outputs.routes()[5:] >= 0).all()
    assert not torch.equal(changed[0][:, :5], plain[0][:, :5])
    assert (outputs.mismatch()[:5] > 0).all() and not outputs.mismatch()[5:].any()
    routing.reset()
    assert torch.equal(logits_and_gradients(model, ids)[0], plain[0])


@pytest.mark.parametrize("kind", REFUSED)
def test_other_models_are_refused_by_name(kind: str) -> None:
    model = tiny(kind)
    with pytest.raises(ValueError, match=f"the.key: .*{REFUSED[kind]}"):
        routing = Routing(model, "the.key")
        routing.begin()
        model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)


def test_routers_are_in_the_order_of_the_layers() -> None:
    model = tiny("olmoe")
    assert find_routers(model, "key") == [layer.mlp.gate for layer in model.model.layers]


def test_the_type_of_routes_holds_all_experts() -> None:
    assert route_dtype(8) == torch.int8
    assert route_dtype(128) == torch.int8
    assert route_dtype(129) == torch.int16


def outputs_of(num_tokens: int, num_layers: int = 1, num_experts: int = 6, top_k: int = 2) -> RouterOutputs:
    generator = torch.Generator().manual_seed(1)
    logits = [torch.randn(num_tokens, num_experts, generator=generator) for _ in range(num_layers)]
    return RouterOutputs(chosen=[x.topk(top_k).indices for x in logits], logits=logits)


def balance(outputs: RouterOutputs, places: list[int], row: list[int], num_rows: int) -> Any:
    return balance_loss(outputs, torch.tensor(places), torch.tensor(row), num_rows, lambda values: values)


def test_the_loss_of_one_row_is_that_of_transformers() -> None:
    outputs = outputs_of(20)
    expected = load_balancing_loss_func((outputs.logits[0][3:18],), num_experts=6, top_k=2)
    loss, load = balance(outputs, list(range(3, 18)), [0] * 15, 1)
    torch.testing.assert_close(loss, torch.as_tensor(expected)[None])
    assert load.shape == (1, 1, 6)
    assert load.sum() == 15 * 2


def test_rows_and_layers_are_averaged_apart() -> None:
    outputs = outputs_of(20, num_layers=3)
    loss, load = balance(outputs, list(range(20)), [0] * 8 + [2] * 12, 3)
    assert loss[1] == 0 and not load[1].any()
    for row, part in ((0, slice(8)), (2, slice(8, 20))):
        expected = [load_balancing_loss_func((x[part],), num_experts=6, top_k=2) for x in outputs.logits]
        torch.testing.assert_close(loss[row], torch.stack([torch.as_tensor(x) for x in expected]).mean())


def test_an_even_load_costs_as_much_as_there_are_experts_per_token() -> None:
    chosen = torch.tensor([[0, 1], [2, 3]])
    loss, _ = balance(RouterOutputs(chosen=[chosen], logits=[torch.zeros(2, 4)]), [0, 1], [0, 0], 1)
    torch.testing.assert_close(loss, torch.tensor([2.0]))


def test_architectures_without_this_loss_are_refused() -> None:
    check_balance_loss(tiny_config("qwen3_moe"), "key")
    with pytest.raises(ValueError, match="key: deepseek_v3 has no load-balance loss in transformers; set 0"):
        check_balance_loss(tiny_config("deepseek_v3"), "key")
