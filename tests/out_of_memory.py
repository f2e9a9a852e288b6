"""Plants out of memory on CPU: passes of training engines fail on too many tokens, in the forward or amid the backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from lockstep.engines.train.token_engine import TokenEngine
from lockstep.models.token_models import TokenModel

Where = Literal["forward", "backward"]
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB."


class Memory:
    """most: tokens of a micro-batch, with its padding, that a pass has room for.

    where: the pass fails in its forward, or in the middle of its backward.
    updates_only: passes without a gradient always have room.
    num_failures: passes that had none.
    """

    def __init__(self, most: int, where: Where = "forward", *, updates_only: bool = False) -> None:
        self.most = most
        self.where = where
        self.updates_only = updates_only
        self.num_failures = 0
        self.in_pass = False

    def allocate(self, num_tokens: int) -> None:
        if num_tokens > self.most:
            self.num_failures += 1
            raise torch.OutOfMemoryError(MESSAGE)


@contextmanager
def limited(memory: Memory) -> Iterator[Memory]:
    """All training engines of this process have this memory; loading and checking a model need none."""
    rows_of, call_of = TokenEngine._rows, TokenModel.__call__

    def rows(self: Any, *args: Any, **options: Any) -> Any:
        memory.in_pass = True
        return rows_of(self, *args, **options)

    def call(self: Any, rows: Any, **options: Any) -> Any:
        in_pass, memory.in_pass = memory.in_pass, False
        num_tokens = rows.input_ids.numel()
        has_gradient = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        if not in_pass or (memory.updates_only and not has_gradient):
            return call_of(self, rows, **options)
        if memory.where == "forward" or not has_gradient:
            memory.allocate(num_tokens)
            return call_of(self, rows, **options)

        def fail(gradient: Tensor) -> None:
            memory.allocate(num_tokens)

        def after(module: Any, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(fail)

        transformer = self.transformer
        layers = (transformer if hasattr(transformer, "layers") else transformer.get_decoder()).layers
        hook = layers[len(layers) // 2 - 1].register_forward_hook(after)
        try:
            return call_of(self, rows, **options)
        finally:
            hook.remove()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenEngine, "_rows", rows)
        patch.setattr(TokenModel, "__call__", call)
        yield memory
