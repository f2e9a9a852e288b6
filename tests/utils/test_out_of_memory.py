"""Which errors say that memory was refused."""

import pytest

from lockstep.utils.out_of_memory import is_out_of_memory, refusal_in


def error_during(first: BaseException, second: BaseException) -> BaseException:
    with pytest.raises(type(second)) as raised:
        try:
            raise first
        finally:
            raise second
    return raised.value


def test_the_cause_counts_but_not_what_is_written_for_the_user() -> None:
    refusal = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    capture = error_during(refusal, RuntimeError("CUDA error: operation failed due to a previous error during capture"))
    assert is_out_of_memory(capture) and refusal_in(capture) is refusal
    assert is_out_of_memory(error_during(MemoryError(), KeyError("x")))
    assert not is_out_of_memory(error_during(refusal, ValueError("lower data.train_batch_size")))
    assert not is_out_of_memory(error_during(KeyError("x"), RuntimeError("CUDA error: illegal memory access")))
    hidden = RuntimeError("other")
    hidden.__cause__, hidden.__context__ = None, refusal  # raise ... from None
    assert not is_out_of_memory(hidden)
