"""Faults of parallel training that only a comparison of outputs and gradients shows, planted in this process."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.train.cases import Case, build_engine


def refusal(folder: Path, case: Case, fault: str) -> str:
    """What opening the model says with the fault in place; empty if nothing."""
    from lockstep.engines.train.megatron import check

    check._passed.clear()
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault](patch)
        try:
            build_engine(folder, case)
        except ValueError as error:
            return str(error)
        finally:
            check._passed.clear()
    return ""


def _no_sum_of_norms(patch: pytest.MonkeyPatch) -> None:
    """The gradients of norms that each rank computes for its heads are not summed."""
    gradients = sys.modules["megatron.core.distributed.finalize_model_grads"]
    patch.setattr(gradients, "_allreduce_non_tensor_model_parallel_grads", lambda *args, **options: None)


def _no_sum_of_tied_embeddings(patch: pytest.MonkeyPatch) -> None:
    """The embedding of the first stage does not get the gradient of the head on the last one."""
    gradients = sys.modules["megatron.core.distributed.finalize_model_grads"]
    patch.setattr(gradients, "_allreduce_word_embedding_grads", lambda *args, **options: None)


def _padding_in_softmax(patch: pytest.MonkeyPatch) -> None:
    """Rows that pad the vocabulary take probability."""
    from lockstep.engines.train.megatron import log_probs

    patch.setattr(log_probs, "real_entries", lambda first, num_rows, vocab_size: num_rows)


def _attention_across_rows(patch: pytest.MonkeyPatch) -> None:
    from lockstep.engines.train.megatron import model
    from lockstep.models.attention import PackedAttention

    forward_rows = model.forward_rows

    def one_row(*args: Any) -> Any:
        rows = forward_rows(*args)
        object.__setattr__(rows, "context", PackedAttention([rows.input_ids.shape[1]], rows.input_ids.device))
        return rows

    patch.setattr(model, "forward_rows", one_row)


def _norm_without_mark(patch: pytest.MonkeyPatch) -> None:
    """The gradients of norms that each rank computes for its tokens are not summed."""
    from lockstep.engines.train.megatron.layers import RmsNorm

    build = RmsNorm.__init__

    def unmarked(self: Any, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        self.weight.sequence_parallel = False

    patch.setattr(RmsNorm, "__init__", unmarked)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "no sum of head norms": _no_sum_of_norms,
    "no sum of tied embeddings": _no_sum_of_tied_embeddings,
    "padding in the softmax": _padding_in_softmax,
    "attention across rows": _attention_across_rows,
    "norm without the mark of sequence parallelism": _norm_without_mark,
}


def refusal_beside(folder: Path, first: Case, second: Case) -> str:
    """What opening `second` says while an engine of `first` is in use in the same processes."""
    engine = build_engine(folder, first)
    try:
        build_engine(folder, second)
    except ValueError as error:
        return str(error)
    finally:
        del engine
    return ""
