"""Chunked statistics of token distributions against the plain formulas, and their gradients."""

import pytest
import torch

from lockstep.models.log_probs import VocabularyHead, token_log_probs


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_statistics_and_gradients_equal_the_plain_formulas(chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.models.log_probs.CHUNK_ELEMENTS", 11 * chunk_rows)
    torch.manual_seed(0)
    head = torch.nn.Linear(5, 11)
    hidden = torch.randn(7, 5, requires_grad=True)
    targets = torch.randint(0, 11, (7,))
    out = token_log_probs(hidden, targets, head, temperature=0.7, with_entropy=True, with_sum_pi_squared=True)
    weights = torch.randn(3, 7)
    sum(w @ v for w, v in zip(weights, out.values())).backward()
    got = [hidden.grad.clone(), head.weight.grad.clone()]
    hidden.grad = head.weight.grad = None

    p = torch.softmax(head(hidden) / 0.7, -1)
    plain = {
        "log_probs": p.log().gather(1, targets[:, None])[:, 0],
        "entropy": -(p * p.log()).sum(-1),
        "sum_pi_squared": (p**2).sum(-1),
    }
    sum(w @ v for w, v in zip(weights, plain.values())).backward()
    for name, value in plain.items():
        torch.testing.assert_close(out[name], value)
    torch.testing.assert_close(got, [hidden.grad, head.weight.grad])


def test_a_frozen_head_gets_no_gradient() -> None:
    head = torch.nn.Linear(5, 11, bias=False).requires_grad_(False)
    hidden = torch.randn(3, 5, requires_grad=True)
    token_log_probs(hidden, torch.tensor([1, 2, 3]), VocabularyHead(head))["log_probs"].sum().backward()
    expected = torch.nn.functional.one_hot(torch.tensor([1, 2, 3]), 11) - (hidden @ head.weight.t()).softmax(-1)
    torch.testing.assert_close(hidden.grad, expected @ head.weight)
    assert head.weight.grad is None


def test_only_what_is_asked_for() -> None:
    head = torch.nn.Linear(5, 11)
    assert list(token_log_probs(torch.randn(2, 5), torch.tensor([1, 2]), head)) == ["log_probs"]


def test_a_head_does_what_architectures_do_to_their_logits() -> None:
    linear = torch.nn.Linear(5, 11)
    hidden = torch.randn(3, 5)
    logits = linear(hidden)
    torch.testing.assert_close(VocabularyHead(linear)(hidden), logits)
    torch.testing.assert_close(VocabularyHead(linear, factor=0.5, divisor=4.0)(hidden), logits / 8)
    torch.testing.assert_close(VocabularyHead(linear, cap=0.3)(hidden), 0.3 * torch.tanh(logits / 0.3))


def test_hidden_states_pass_the_modules_before_the_last_one() -> None:
    first, last = torch.nn.Linear(5, 5), torch.nn.Linear(5, 11)
    hidden = torch.randn(3, 5)
    head = VocabularyHead(last, factor=2.0, before=(first, torch.nn.GELU()))
    torch.testing.assert_close(head(hidden), last(torch.nn.functional.gelu(first(hidden))) * 2.0)


def test_a_float32_stream_enters_a_head_in_half_precision() -> None:
    linear = torch.nn.Linear(5, 11, dtype=torch.bfloat16)
    hidden = torch.randn(3, 5)
    expected = linear(hidden.bfloat16()).float()
    torch.testing.assert_close(VocabularyHead(linear)(hidden), expected)
    assert VocabularyHead(linear).enter(hidden).dtype == torch.bfloat16
    # a block has no weight of its own
    block = torch.nn.Sequential(linear)
    torch.testing.assert_close(VocabularyHead(block)(hidden.bfloat16()), expected)


def test_only_a_plain_linear_head_in_half_precision_on_cuda_is_fused() -> None:
    linear = torch.nn.Linear(5, 11, dtype=torch.bfloat16)
    assert not VocabularyHead(linear).is_fused_for(torch.randn(3, 5, dtype=torch.bfloat16))


def test_no_position_gives_nothing_on_a_connected_graph() -> None:
    linear = torch.nn.Linear(5, 11)
    hidden = torch.randn(0, 5, requires_grad=True)
    out = token_log_probs(hidden, torch.zeros(0, dtype=torch.long), VocabularyHead(linear), with_entropy=True)
    (out["log_probs"].sum() + out["entropy"].sum()).backward()
    assert linear.weight.grad is not None and not linear.weight.grad.any()
