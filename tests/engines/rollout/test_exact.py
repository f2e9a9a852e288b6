"""Exact mode: tokens and log-probs to the bit, whatever the schedule, and those of the trainer's forward."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from lockstep.engines.rollout import Completion, GenerationRequest
from lockstep.kernels import exact
from lockstep.kernels.exact import depends_on_other_rows, exact_mode, exact_product
from lockstep.kernels.linear import Activation, gated_linear, linear
from lockstep.models import exact_attention
from lockstep.models.exact_models import check_exact
from lockstep.models.layer_options import LayerOptions
from lockstep.models.packing import forward_rows
from lockstep.models.token_models import PolicyModel
from tests.engines.rollout.exact_machine import skip_unless_exact
from tests.engines.rollout.rollout_cases import DEVICES, device_or_skip, embedded, mixed_requests, tiny_model

PLAIN = ["qwen2", "qwen3", "llama", "smollm"]
ON_CPU = [*PLAIN, "granite", "gemma", "gemma2", "phi3", "olmo2"]


@pytest.fixture(scope="module", autouse=True)
def exact_machine() -> None:
    skip_unless_exact()


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return device_or_skip(request.param)


def exact_model(kind: str, device: torch.device) -> Any:
    return tiny_model(kind, device).to(torch.bfloat16 if device.type == "cuda" else torch.float32)


def as_batch(requests: list[GenerationRequest], completions: list[Completion]) -> TensorDict:
    """The rows as the trainer has them: prompts padded on the left, responses on the right."""
    prompt = max(len(r.prompt_ids) for r in requests)
    response = max(len(c.token_ids) for c in completions)
    rows = list(zip(requests, completions))
    ids = [
        [0] * (prompt - len(r.prompt_ids)) + r.prompt_ids + c.token_ids + [0] * (response - len(c.token_ids))
        for r, c in rows
    ]
    mask = [
        [0] * (prompt - len(r.prompt_ids))
        + [1] * (len(r.prompt_ids) + len(c.token_ids))
        + [0] * (response - len(c.token_ids))
        for r, c in rows
    ]
    attention = torch.tensor(mask)
    columns = {
        "input_ids": torch.tensor(ids),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp_min(0),
        "responses": torch.tensor(ids)[:, prompt:],
        "response_mask": attention[:, prompt:],
    }
    return TensorDict(columns, batch_size=len(rows))


@pytest.mark.parametrize("kind", ON_CPU)
def test_log_probs_are_the_trainers(kind: str, device: torch.device) -> None:
    if device.type == "cuda" and kind not in PLAIN:
        pytest.skip("is exact on a CPU only")
    model = exact_model(kind, device)
    requests = mixed_requests(temperature=0.7)
    completions = embedded(model, exact=True, max_num_batched_tokens=23).generate(requests)
    batch = as_batch(requests, completions)
    policy = PolicyModel(model)
    parts = [batch, batch[3:4], batch[2:7]]
    for part, first in zip(parts, (0, 3, 2)):
        for layout in ("packed", "padded"):
            out = policy(forward_rows(part, device, layout), exact=True, temperature=0.7, with_entropy=True)[
                "log_probs"
            ]
            for row, completion in zip(out.tolist(), completions[first:]):
                assert row[: len(completion.token_ids)] == completion.log_probs
    usual = policy(forward_rows(batch, device, "packed"), temperature=0.7)["log_probs"]
    exactly = policy(forward_rows(batch, device, "packed"), exact=True, temperature=0.7)["log_probs"]
    tolerance = 1e-4 if device.type == "cpu" else 0.2
    torch.testing.assert_close(exactly, usual, rtol=0, atol=tolerance)
    gradients = []
    for values in (usual, exactly):
        model.zero_grad()
        values.sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for of_usual, of_exact in zip(*gradients):
        scale = float(of_usual.abs().max()) + 1e-6
        assert float((of_usual - of_exact).abs().max()) < (1e-4 if device.type == "cpu" else 0.1) * scale


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 1, "enable_prefix_caching": False},
        {"max_num_seqs": 3, "kv_block_size": 1},
        {"max_num_batched_tokens": 7, "kv_block_size": 16},
        {"max_num_batched_tokens": 7, "enable_chunked_prefill": False},
        {"num_blocks": 20},
    ],
    ids=str,
)
def test_the_schedule_changes_no_bit(changes: dict[str, Any], device: torch.device) -> None:
    model = exact_model("qwen2", device)
    expected = embedded(model, exact=True).generate(mixed_requests())
    found = embedded(model, exact=True, **changes).generate(mixed_requests())
    assert [(c.token_ids, c.log_probs) for c in found] == [(c.token_ids, c.log_probs) for c in expected]


def test_an_aborted_request_goes_on_to_the_same_bits(device: torch.device) -> None:
    model = exact_model("qwen2", device)
    requests = mixed_requests(ignore_eos=True)
    expected = embedded(model, exact=True).generate(requests)
    for request, whole in zip(requests, expected):
        begun = len(whole.token_ids) // 2
        rest = GenerationRequest(request.prompt_ids + whole.token_ids[:begun], request.sampling, request.seed)
        found = embedded(model, exact=True).generate([rest])[0]
        num_left = len(whole.token_ids) - begun
        assert found.token_ids[:num_left] == whole.token_ids[begun:]
        assert found.log_probs[:num_left] == whole.log_probs[begun:]


def test_a_product_that_depends_on_other_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen2")

    def inexact(x: torch.Tensor, weight: torch.Tensor, dtype: Any = None, **more: Any) -> torch.Tensor:
        return x @ weight.t() + 1e-6 * x.sum()

    check_exact(model)
    monkeypatch.setattr(exact, "exact_product", inexact)
    assert depends_on_other_rows([torch.ones(3, 4)]) == (3, 4)
    with pytest.raises(ValueError, match="not possible on this machine: its product with a weight of"):
        check_exact(model)


def test_attention_that_depends_on_other_queries_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = exact_attention.exact_attention
    monkeypatch.setattr(exact_attention, "exact_attention", lambda q, *more: attend(q, *more) + 1e-6 * q.sum())
    with pytest.raises(ValueError, match="not possible on this machine: its attention gives a query another result"):
        check_exact(tiny_model("qwen2"))


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_an_mlp_of_many_rows_is_that_of_each_row(activation: Activation) -> None:
    """Enough rows for several threads, with a width that is no multiple of a vector register. The gradients are the usual ones."""
    torch.manual_seed(0)
    down = nn.Linear(100, 100, bias=False)  # passes on the bits of the activation
    gate_up = torch.cat([3 * torch.randn(1001, 100), torch.ones(1001, 100)], 1)
    with exact_mode(True), torch.no_grad():
        torch.nn.init.eye_(down.weight)
        each = torch.cat([gated_linear(row, down, activation) for row in gate_up.split(1)])
        for num_rows in range(401, 1001, 3):
            assert torch.equal(gated_linear(gate_up[:num_rows], down, activation), each[:num_rows])
    found = []
    for on in (False, True):
        x = gate_up.detach().requires_grad_()
        with exact_mode(on):
            out = gated_linear(x, down, activation)
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), x)))
    for usual, exactly in zip(*found):
        torch.testing.assert_close(exactly, usual, rtol=1e-5, atol=1e-5)


def test_a_product_with_bias_has_the_usual_gradients() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(*shape, requires_grad=True) for shape in ((2, 35, 10), (7, 10), (7,))]
    found = []
    for on in (False, True):
        with exact_mode(on):
            out = linear(*tensors)
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), tensors)))
    for usual, exactly in zip(*found):
        torch.testing.assert_close(exactly, usual, rtol=1e-5, atol=1e-5)


def test_an_activation_that_depends_on_the_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "exact_activation", lambda x, name: x + 1e-6 * x.numel())
    with pytest.raises(ValueError, match="not possible on this machine: its activation gives a row another result"):
        check_exact(tiny_model("qwen2"))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("qwen3_moe", "is not a gated MLP"), ("phi", "is not one of our decoder layers|vocabulary head")],
)
def test_models_that_are_refused(kind: str, reason: str) -> None:
    engine = embedded(tiny_model(kind), exact=True)
    with pytest.raises(ValueError, match=rf"rollout.exact=true is not possible for .*({reason}).*set .*exact=false"):
        engine.generate(mixed_requests())


def test_many_queries_attend_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 70, 16), torch.randn(2, 2, 90, 16), torch.randn(2, 2, 90, 16)
    positions = (torch.arange(70) + torch.tensor([[0], [20]])).clamp_max(89)
    arguments = query, key, value, positions, LayerOptions(0.25)
    whole = exact_attention.exact_attention(*arguments)
    monkeypatch.setattr(exact_attention, "MAX_SCORES", 1)
    assert torch.equal(exact_attention.exact_attention(*arguments), whole)


def test_the_mode_ends_with_its_block() -> None:
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    with exact_mode(True):
        assert exact.is_exact()
        with exact_mode(False):
            assert not exact.is_exact()
        assert exact.is_exact()
    assert not exact.is_exact()
    torch.testing.assert_close(exact_product(x, weight), x @ weight.t())
