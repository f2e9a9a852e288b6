import pytest
import torch

from lockstep.utils.masked import masked_mean, masked_sum, masked_var, masked_whiten

VALUES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
MASK = torch.tensor([[1, 0, 1], [0, 0, 1]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_sum_and_mean_by_hand(dtype: torch.dtype) -> None:
    mask = MASK.to(dtype)
    assert masked_sum(VALUES, mask).item() == 10.0
    assert masked_sum(VALUES, mask, axis=-1).tolist() == [4.0, 6.0]
    assert masked_mean(VALUES, mask).item() == pytest.approx(10 / 3)
    assert masked_mean(VALUES, mask, axis=0).tolist() == [1.0, 0.0, 4.5]


def test_variance_equals_torch_on_the_selected_values() -> None:
    selected = torch.tensor([1.0, 3.0, 6.0])
    assert masked_var(VALUES, MASK).item() == pytest.approx(selected.var().item())
    assert masked_var(VALUES, MASK, unbiased=False).item() == pytest.approx(selected.var(unbiased=False).item())


def test_whitened_values_have_mean_0_and_variance_1() -> None:
    white = masked_whiten(VALUES, MASK)
    assert masked_mean(white, MASK).item() == pytest.approx(0.0, abs=1e-6)
    assert masked_var(white, MASK).item() == pytest.approx(1.0)
    kept = masked_whiten(VALUES, MASK, shift_mean=False)
    assert masked_mean(kept, MASK).item() == pytest.approx(10 / 3)


@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
def test_masked_positions_never_reach_the_result_or_the_gradient(junk: float) -> None:
    values = VALUES.clone()
    values[0, 1] = junk
    values.requires_grad_(True)
    total = masked_mean(values, MASK) + masked_var(values, MASK)
    assert total.isfinite()
    masked_mean(values, MASK).backward()
    assert values.grad is not None and values.grad[0, 1] == 0


def test_empty_mask() -> None:
    empty = torch.zeros_like(MASK)
    assert masked_sum(VALUES, empty).item() == 0.0
    assert masked_mean(VALUES, empty).item() == 0.0
    assert masked_var(VALUES, empty, unbiased=False).item() == 0.0


@pytest.mark.parametrize("count", [0, 1])
def test_unbiased_variance_needs_two_positions(count: int) -> None:
    mask = torch.zeros_like(MASK)
    mask.view(-1)[:count] = 1
    with pytest.raises(ValueError, match=f"at least 2 positions with mask 1, the mask has {count}"):
        masked_var(VALUES, mask)
