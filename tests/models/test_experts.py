"""Experts as grouped products: log-probs and every gradient against transformers' eager loop, for each family and form."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from lockstep.config.model import HFModelConfig
from lockstep.kernels import expert_rows
from lockstep.kernels.expert_rows import grouped_linear, grouped_linear_reference, sort_by_expert
from lockstep.models import experts
from lockstep.models.experts import EXPERTS_NAME, experts_forward, experts_implementation
from lockstep.models.loading import load_causal_lm
from lockstep.models.model_check import transformers_forward
from lockstep.models.shared_weights import rollout_module
from tests.models.architectures import tiny_config
from tests.tiny import save_tiny_moe

QUICK = ("qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_next")
OTHERS = ("qwen3_5_moe_text", "dots1", "granitemoe", "nemotron_h", "jamba", "minimax_m2", "olmoe", "ernie4_5_moe")


def tiny_experts(top_k: int = 2, inner: int = 24, num_experts: int = 6) -> Any:
    config = Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=inner, num_experts=num_experts, num_experts_per_tok=top_k
    )
    config._experts_implementation = "eager"
    module = Qwen3MoeExperts(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 4
    return module


def outputs_and_gradients(forward: Any, module: Any, chosen: Tensor) -> list[Tensor]:
    """The result of the experts, and the gradients of tokens, routing weights and parameters."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(chosen), 32, generator=generator).requires_grad_()
    weights = torch.rand(chosen.shape, generator=generator).requires_grad_()
    module.zero_grad()
    out = forward(x, chosen, weights)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return [out.detach(), *(t.grad.clone() for t in (x, weights, *module.parameters()))]  # type: ignore[union-attr]


def compare(got: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(b.abs().max())))


CHOICES = {
    "an expert without tokens": [[0, 1], [4, 0], [1, 5], [0, 4], [5, 1]],
    "top-1": [[2], [0], [2], [5], [0]],
    "one expert for all": [[3, 2]] * 5,
    "all experts": [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]],
    "one token": [[4, 2]],
}


@pytest.mark.parametrize("form", ["grouped", "reference"])
@pytest.mark.parametrize("case", CHOICES)
def test_outputs_and_gradients_are_those_of_the_loop(case: str, form: str) -> None:
    chosen = torch.tensor(CHOICES[case])
    inner = 22 if form == "reference" else 24  # torch's grouped product refuses rows of 88 bytes
    module = tiny_experts(chosen.shape[1], inner)
    assert expert_rows._fits_grouped_mm(module.down_proj, module.down_proj) == (form != "reference")
    got = outputs_and_gradients(lambda *args: experts_forward(module, *args), module, chosen)
    compare(got, outputs_and_gradients(module, module, chosen))


@pytest.fixture
def tiles_device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where forwards without gradients are computed by tiles: a CUDA device, or the CPU with Triton's interpreter."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a CUDA device or TRITON_INTERPRET=1")
    monkeypatch.setattr(experts, "on_gpu", lambda x: True)
    return torch.device("cpu")


def refuse(*args: object) -> Tensor:
    raise AssertionError("rows were sorted")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CHOICES)
def test_tiles_of_rows_compute_like_the_loop(
    case: str, tiles_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = torch.tensor(CHOICES[case], device=tiles_device)
    module = tiny_experts(chosen.shape[1]).to(tiles_device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(chosen), 32, generator=generator).to(tiles_device)
    weights = torch.rand(chosen.shape, generator=generator).to(tiles_device)
    with torch.no_grad():
        expected = module(x, chosen, weights)
        monkeypatch.setattr(experts, "sort_by_expert", refuse)
        compare([experts_forward(module, x, chosen, weights)], [expected])
    with pytest.raises(AssertionError, match="sorted"):
        experts_forward(module, x, chosen, weights)  # gradients need the grouped products


@pytest.mark.gpu
def test_many_rows_per_expert_are_sorted(tiles_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny_experts().to(tiles_device)
    limit = experts.FEW_ROWS_OR_LOOP * module.num_experts // 2
    x, chosen, weights = (torch.zeros(limit + 1, n, device=tiles_device) for n in (32, 2, 2))
    calls: list[int] = []
    monkeypatch.setattr(experts, "_tiled_forward", lambda module, x, *args: calls.append(len(x)) or x)
    with torch.no_grad():
        for size in (limit, limit + 1):
            out = experts_forward(module, x[:size], chosen[:size].long(), weights[:size])
            assert out.shape == (size, 32)
    assert calls == [limit]


def test_a_token_does_not_depend_on_the_others() -> None:
    module = tiny_experts()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 32, generator=generator)
    weights, chosen = torch.rand(40, 6, generator=generator).topk(2)
    whole = experts_forward(module, x, chosen, weights)
    parts = [experts_forward(module, x[i], chosen[i], weights[i]) for i in torch.arange(40).split(7)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-6, atol=1e-6)


def test_bfloat16_stays_bfloat16_and_sums_in_float32() -> None:
    module = tiny_experts().bfloat16()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(16, 32, generator=generator).bfloat16()
    weights, chosen = torch.rand(16, 6, generator=generator).topk(2)
    out = experts_forward(module, x, chosen, weights)  # DeepSeek's routers give weights in float32
    exact = experts_forward(module.float(), x.float(), chosen, weights)
    assert out.dtype == torch.bfloat16
    assert (out.float() - exact).norm() < 0.01 * exact.norm()


def test_rows_are_sorted_and_found_again() -> None:
    chosen = torch.tensor([[2, 0], [0, 3], [2, 3]])
    rows = sort_by_expert(chosen, 5)
    assert rows.expert.tolist() == [0, 0, 2, 2, 3, 3]
    assert rows.ends.tolist() == [2, 2, 4, 6, 6] and rows.ends.dtype == torch.int32
    assert rows.token.tolist() == [0, 1, 0, 2, 1, 2]
    assert rows.order[rows.place].tolist() == list(range(6))


def test_the_grouped_product_is_that_of_each_expert() -> None:
    rows = sort_by_expert(torch.tensor([[2, 0], [0, 3], [2, 3]]), 5)
    x, weight = torch.randn(6, 8), torch.randn(5, 16, 8)
    expected = torch.stack([weight[e] @ row for e, row in zip(rows.expert, x)])
    for product in (grouped_linear, grouped_linear_reference):
        torch.testing.assert_close(product(x, weight.transpose(1, 2), rows), expected, rtol=1e-5, atol=1e-5)


def log_probs_and_gradients(model: Any, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    log_probs = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    (log_probs * torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)).sum().div(ids.numel()).backward()
    return [log_probs.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)])
def test_every_family_computes_by_tiles(kind: str, tiles_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = next(
        m for m in AutoModelForCausalLM.from_config(tiny_config(kind)).modules() if hasattr(m, "is_transposed")
    ).to(tiles_device)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.2)
        x = torch.randn(6, module.down_proj.shape[1 if not module.is_transposed else 2], device=tiles_device)
        weights, chosen = torch.rand(6, module.num_experts, device=tiles_device).topk(2)
        module.config._experts_implementation = "eager"
        expected = module(x, chosen, weights)
        monkeypatch.setattr(experts, "sort_by_expert", refuse)
        module.config._experts_implementation = EXPERTS_NAME
        compare([module(x, chosen, weights)], [expected])


@pytest.mark.parametrize("kind", [*QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)])
def test_every_family_computes_like_the_loop(kind: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        tiny_config(kind), attn_implementation="eager", experts_implementation=EXPERTS_NAME
    ).eval()
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    got = log_probs_and_gradients(model, ids)
    with transformers_forward(model):
        assert model.config._experts_implementation == "eager"
        expected = log_probs_and_gradients(model, ids)
    assert model.config._experts_implementation == EXPERTS_NAME
    compare(got, expected)
    attention = model.config._attn_implementation
    with pytest.raises(ValueError), transformers_forward(model, attention="sdpa", experts="no such"):
        pass
    assert (model.config._attn_implementation, model.config._experts_implementation) == (attention, EXPERTS_NAME)


def test_models_are_loaded_with_it_and_saved_without(tmp_path: Path) -> None:
    folder = save_tiny_moe(tmp_path / "model")
    model = load_causal_lm(HFModelConfig(path=str(folder)), "model", torch.float32, torch.device("cpu"))
    assert model.config._experts_implementation == EXPERTS_NAME
    assert rollout_module(model).config._experts_implementation == EXPERTS_NAME
    model.config.save_pretrained(tmp_path)
    assert EXPERTS_NAME not in (tmp_path / "config.json").read_text()


def test_quantised_experts_are_left_to_transformers() -> None:
    config = AutoConfig.for_model("qwen3_moe")
    assert experts_implementation(config) == EXPERTS_NAME
    config.quantization_config = {"quant_method": "fp8"}
    assert experts_implementation(config) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_cuda_computes_the_same_and_decodes_without_the_host(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    chosen = torch.tensor(CHOICES["an expert without tokens"])
    module = tiny_experts()
    expected = outputs_and_gradients(module, module, chosen)

    def on_cuda(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return experts_forward(module, x.cuda().to(dtype), chosen.cuda(), weights.cuda()).cpu().float()

    module.cuda().to(dtype)
    got = [t.cpu().float() for t in outputs_and_gradients(on_cuda, module, chosen)]
    compare(got, expected, 1e-4 if dtype == torch.float32 else 0.03)
    x, weights = torch.randn(5, 32, device="cuda", dtype=dtype), torch.rand(5, 2, device="cuda", dtype=dtype)
    on_device = chosen.cuda()
    with torch.no_grad():
        eager = experts_forward(module, x, on_device, weights)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = experts_forward(module, x, on_device, weights)
    graph.replay()
    torch.testing.assert_close(captured, eager)
