"""Sampling against a naive implementation with the same random numbers, and against the distribution."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from lockstep.engines.rollout.embedded.sampler import SamplingBatch, inverse_cdf, sample, uniform
from lockstep.engines.rollout.rollout_engine import SamplingParams

CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def sample_rows(logits: torch.Tensor, params: list[SamplingParams], seeds: list[int], positions: list[int]) -> Any:
    return sample(logits, SamplingBatch(params, CPU), uniform(seeds, positions))


def naive_splitmix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def naive_uniform(seed: int, position: int) -> float:
    golden = 0x9E3779B97F4A7C15
    state = naive_splitmix((seed + golden) & MASK)
    return (naive_splitmix((state + (position + 1) * golden) & MASK) >> 40) * 2.0**-24


def naive_token(logits: torch.Tensor, p: SamplingParams, u: float) -> int:
    """One row in plain Python: rank, filter, renormalise, walk the vocabulary."""
    if p.temperature == 0:
        return int(logits.argmax())
    probs = torch.softmax(logits.double() / p.temperature, -1)
    ranked = sorted(range(len(probs)), key=lambda i: -probs[i])
    ranked = [i for i in ranked if probs[i] >= p.min_p * probs[ranked[0]]]
    if p.top_k > 0:
        ranked = ranked[: p.top_k]
    total = sum(float(probs[i]) for i in ranked)
    kept, mass = set(), 0.0
    for i in ranked:
        if mass >= p.top_p * total and p.top_p < 1:
            break
        kept.add(i)
        mass += float(probs[i])
    target, running = u * sum(float(probs[i]) for i in kept), 0.0
    for i in sorted(kept):
        running += float(probs[i])
        if running > target:
            return i
    raise AssertionError


def test_uniform_equals_the_integer_definition() -> None:
    seeds, positions = [0, 1, 12345, 2**63 - 1, 2**40 + 7, -1, 2**64 - 1], [0, 1, 77, 4096, 3, 5, 5]
    got = uniform(seeds, positions).tolist()
    assert got == [naive_uniform(s, p) for s, p in zip(seeds, positions)]


def test_uniform_is_uniform_over_seeds_and_over_positions() -> None:
    steps, fixed = range(100_000), [5] * 100_000
    for u in (uniform(steps, fixed), uniform(fixed, steps)):
        counts = torch.histc(u, 20, 0, 1)
        assert ((counts - 5000) ** 2 / 5000).sum() < 45  # chi-square, 19 degrees of freedom, p < 0.001
        assert abs(float(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1])) < 0.015


@pytest.mark.parametrize("top_k", [-1, 0, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 2.5])
def test_rows_equal_naive_sampling(top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(3)) * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    seeds, positions = list(range(40)), list(range(100, 140))
    tokens, log_probs = sample_rows(logits, [params] * 40, seeds, positions)
    expected = [naive_token(row, params, naive_uniform(s, p)) for row, s, p in zip(logits, seeds, positions)]
    assert tokens.tolist() == expected
    full = torch.log_softmax(logits / (temperature or 1.0), -1)
    torch.testing.assert_close(log_probs, full.gather(1, tokens[:, None])[:, 0])


def test_a_row_does_not_depend_on_other_rows() -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.5, temperature=0.7),
        SamplingParams(top_k=10, top_p=0.9),
        SamplingParams(temperature=1.3),
        SamplingParams(min_p=0.4),
    ]
    together = sample_rows(logits, params, [9] * 7, [4] * 7)
    for i in range(7):
        alone = sample_rows(logits[i : i + 1], [params[i]], [9], [4])
        assert alone[0].item() == together[0][i].item()
        assert alone[1].item() == pytest.approx(together[1][i].item(), abs=1e-6)


def test_frequencies_match_the_probabilities() -> None:
    count = 40_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0]).expand(count, 5)
    params = SamplingParams(temperature=0.8, top_k=4)
    tokens, _ = sample_rows(logits, [params] * count, list(range(count)), [17] * count)
    expected = torch.softmax(torch.tensor([2.0, 1.0, 0.0, -1.0]) / 0.8, -1)
    frequencies = torch.bincount(tokens, minlength=5) / count
    assert frequencies[4] == 0
    torch.testing.assert_close(frequencies[:4], expected, atol=0.01, rtol=0)


def test_tokens_of_probability_0_are_never_sampled() -> None:
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0, 0.0]])
    for u in (0.0, 0.1, 0.2999, 0.3001, 0.99, 1 - 2**-24):
        assert inverse_cdf(weights, torch.tensor([u])).item() in (1, 3)
    assert inverse_cdf(weights, torch.tensor([0.0])).item() == 1


def test_the_largest_uniform_stays_below_every_total() -> None:
    """The last weights are 0: a target rounded up to the total would select one of them."""
    weights = torch.rand(5000, 7, generator=torch.Generator().manual_seed(0))
    weights *= 2.0 ** torch.arange(-60, 40, 0.02)[:, None]
    weights[:, 5:] = 0
    assert (inverse_cdf(weights, torch.full((5000,), 1 - 2**-24)) == 4).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_k": -2}, "top_k=-2: must be -1 or 0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"max_tokens": 0}, "max_tokens=0"),
    ],
)
def test_wrong_parameters_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wrong)


LOGITS = st.lists(st.floats(-1e4, 1e4, width=32) | st.just(float("-inf")), min_size=7, max_size=7)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    logits=LOGITS,
    temperature=st.floats(0, 1e6),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, 2**80),
    min_p=st.floats(0, 1),
    seed=st.integers(-(2**70), 2**70),
)
def test_every_request_that_is_accepted_samples_a_possible_token(
    logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    logits[3] = 0.0  # at least one is possible
    params = SamplingParams(temperature, top_k, top_p, min_p)
    tokens, log_probs = sample_rows(torch.tensor([logits, [0.0] * 7]), [params, SamplingParams()], [seed, 0], [5, 5])
    assert 0 <= int(tokens[0]) < 7 and logits[int(tokens[0])] > float("-inf")
    assert bool(log_probs.isfinite().all()) and bool((log_probs <= 0).all())
    fields = [params.temperature, params.top_p, params.top_k]
    assert torch.tensor(fields[:2], dtype=torch.float32).tolist()[1] > 0 and torch.tensor(fields[2:]) is not None


@pytest.mark.parametrize("value", [float("nan"), -1e-9, 1e7, float("inf")])
def test_temperatures_that_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="temperature="):
        SamplingParams(temperature=value)


def test_values_that_32_bits_cannot_hold() -> None:
    assert SamplingParams(temperature=1e-40) == SamplingParams(temperature=0.0)
    assert SamplingParams(temperature=1e-40).greedy and not SamplingParams(temperature=1e-5).greedy
    assert SamplingParams(top_p=1e-300) == SamplingParams(top_p=1e-9)
    assert SamplingParams(top_k=2**80) == SamplingParams(top_k=2**31 - 1)
