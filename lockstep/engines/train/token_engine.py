"""What engines on a torch `TokenModel` share: rows become micro-batches, a loss becomes a backward pass, weights become a folder.

    batch ─► micro-batches ─► rows on the device ─► `compute` ─► outputs (B, R) ─► loss_fn ─► `_backward`

A mini-batch that runs out of memory is computed again from its beginning, in smaller micro-batches, which the run then keeps
(`micro_batch_limits.py`). On several ranks the others wait in a collective: the error goes to the caller.

How the model is sharded, its gradient reduced and its optimizer stepped is up to the subclass.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.engines.train.checkpointing import LayerCheckpointing
from lockstep.engines.train.micro_batch_limits import (
    ATTRIBUTE,
    MicroBatchFailure,
    MicroBatchLimits,
    RandomState,
    free_unused,
    halved,
)
from lockstep.engines.train.train_engine import LossFn, MicroBatching, TrainEngine
from lockstep.models.export import as_saved, save_policy, save_scalar_model
from lockstep.models.four_bit import whole_shape
from lockstep.models.known_models import computes_packed
from lockstep.models.lora import base_name, has_adapters, merge_adapters, of_adapter, save_adapter, trial_adapters
from lockstep.models.model_check import (
    check_batch,
    check_causal_outputs,
    check_outputs,
    refuse_errors,
    transformers_forward,
    use_transformers_forward,
    with_images,
    without_last,
)
from lockstep.models.packing import ForwardRows, Layout, forward_rows
from lockstep.models.rope import rope_limit
from lockstep.models.router_replay import FREE, Routing
from lockstep.models.shared_weights import rollout_module
from lockstep.models.token_models import PolicyModel, ScalarModel, TokenModel
from lockstep.models.ulysses import SequenceGroup
from lockstep.models.vision import check_images, is_vision, rope_positions, why_no_images, why_own_forward_with_images
from lockstep.protocol.columns import Batch, tensors_of
from lockstep.protocol.images import IMAGES
from lockstep.protocol.ragged import is_ragged
from lockstep.protocol.tokens import images_of, lengths_of, prompt_owners
from lockstep.utils.device import HostCopy, to_device
from lockstep.utils.distributed import current_world_size
from lockstep.utils.out_of_memory import is_out_of_memory
from lockstep.utils.progress import count, phase
from lockstep.utils.seqlen import agreed_runs
from lockstep.utils.spans import spanned
from lockstep.utils.vision import why_no_videos

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TokenEngine(TrainEngine):
    """model: its parameters have the names that checkpoints use.

    compute:  what is called on the rows: `model`, a copy of it or a wrapper around it.
    layout:   how rows are given to it.
    sequence: the ranks that share one row of packed tokens, `sp_size` of them.
    schedule: of a model that is trained.
    limits:   smaller sizes of micro-batches, after out of memory.
    """

    compute: Callable[..., Any]
    schedule: LambdaLR

    def __init__(self, model: TokenModel, *, device: torch.device, packed: bool) -> None:
        self.model = model
        self.device = device
        self.layout: Layout = "packed" if packed else "padded"
        if not computes_packed(model.transformer):
            self.layout = "aligned"
        self.world_size = current_world_size()
        self.sp_size = 1
        self.sequence: SequenceGroup | None = None
        self.checkpointing: LayerCheckpointing | None = None
        self.limits = MicroBatchLimits()
        self._max_length = rope_limit(model)
        self._current: list[int] = []
        """Rows of the micro-batch that is being computed; empty outside of micro-batches."""

    @abstractmethod
    def _backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of a micro-batch's share of the loss. is_last: of the mini-batch."""

    @abstractmethod
    def _checked_models(self) -> list[tuple[TokenModel, torch.dtype]]:
        """The modules whose forward the load-time check compares with transformers, and the dtype they compute in."""

    def _free_gathered(self) -> None:
        """Free parameters that a forward without a backward has gathered."""

    def _shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return whole_shape(parameter)

    @property
    def _can_retry(self) -> bool:
        """Whether a pass that was cut off at any point can be started again in this process."""
        return self.world_size == 1

    def forward(self, batch: Batch, micro: MicroBatching, **options: object) -> dict[str, Tensor]:
        return self._fitting(batch, micro, partial(self._forward, batch, options))

    def _forward(self, batch: Batch, options: dict[str, Any], parts: list[list[int]]) -> dict[str, Tensor]:
        """The outputs of all rows. parts: the rows of each micro-batch."""
        order: list[int] = []
        pieces: list[dict[str, Tensor]] = []
        with torch.no_grad():
            for rows in self._each(parts):
                order += rows
                on_device = self._rows(taken_rows(batch, rows), with_places=options.get("routes") == "record")
                out = self.compute(on_device, **options)
                # routes are many times larger than other results
                pieces.append({k: v.cpu() if k == "routed_experts" else v for k, v in out.items()})
                count(len(order), len(batch), "sequences")
        self._free_gathered()
        back = torch.tensor(order).argsort()
        return {name: _joined([p[name] for p in pieces]).cpu()[back] for name in pieces[0]}

    @spanned
    def forward_backward(
        self, batch: Batch, loss_fn: LossFn, micro: MicroBatching, **options: object
    ) -> dict[str, float]:
        def restart() -> None:
            free_unused(self._accumulating())
            getattr(loss_fn, "restart", lambda: None)()

        compute = partial(self._add_gradients, batch, loss_fn, options)
        values = self._fitting(batch, micro, compute, restart)
        names = self._names_on_all_ranks(sorted(values))
        return dict(zip(names, self.global_sum(*(values.get(name, 0.0) for name in names))))

    def _add_gradients(
        self, batch: Batch, loss_fn: LossFn, options: dict[str, Any], parts: list[list[int]]
    ) -> dict[str, float]:
        """Add the gradient of the micro-batches; returns this rank's metrics."""
        totals: dict[str, Tensor] = {}
        own: list[str] = []
        for number, rows in enumerate(self._each(parts), start=1):
            count(number, len(parts), "micro-batches")
            part = taken_rows(batch, rows)
            rows_on_device = self._rows(part)
            columns = self._loss_columns(part)  # before the forward: a copy after it would wait for its end
            if self.checkpointing is not None:
                self.checkpointing.plan(rows_on_device.input_ids.numel())
            outputs = self.compute(rows_on_device, **options)
            loss, metrics = loss_fn(outputs, columns)
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value.detach().float()
            own = sorted(totals)
            if number == len(parts) and own:
                copied = HostCopy(torch.stack([totals[name] for name in own]))  # known before the last backward
            self._backward(loss, is_last=number == len(parts))
        return dict(zip(own, copied.read().tolist() if own else []))

    def _fitting(
        self,
        batch: Batch,
        micro: MicroBatching,
        compute: Callable[[list[list[int]]], T],
        restart: Callable[[], None] = free_unused,
    ) -> T:
        """The result of `compute` on micro-batches that fit into memory; `restart` undoes a pass that did not."""
        random_state = RandomState(self.device)
        can_retry = self._can_retry and not self._has_gradient()
        while True:
            parts = self._partitions(batch, micro)
            self._current = []
            try:
                return compute(parts)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or not self._current:  # smaller micro-batches would not help
                    raise
                failure = self._failure(batch, micro)
                if not can_retry or (failure.smaller is None and not self._keep_fewer_activations()):
                    setattr(error, ATTRIBUTE, failure)
                    raise
            # here the error is gone, and with it the frames that hold the tensors of the pass
            if failure.smaller is not None:
                self.limits.lower(failure.key, failure.smaller)
            restart()
            random_state.restore()

    def _each(self, parts: list[list[int]]) -> Iterator[list[int]]:
        for self._current in parts:
            yield self._current
        self._current = []

    def _failure(self, batch: Batch, micro: MicroBatching) -> MicroBatchFailure:
        """The current micro-batch as one that does not fit."""
        rows, micro = self._current, self.limits.within(micro)
        prompts, responses = (lengths.tolist() for lengths in lengths_of(batch))
        owners = prompt_owners(batch) if self.layout == "packed" else list(range(len(batch)))
        prompt = sum({owners[i]: prompts[i] for i in rows}.values())
        response = sum(responses[i] for i in rows)
        smaller = None
        if len(rows) > micro.group_size:
            size, used = (micro.num_rows or len(batch)) // micro.group_size, len(rows) // micro.group_size
            if micro.max_tokens is not None:
                tokens = prompt + response
                if self.layout == "aligned":
                    tokens = len(rows) * max(prompts[i] + responses[i] for i in rows)
                size, used = micro.max_tokens, max(2, -(-tokens // self.sp_size))
            smaller = halved(size, used)
        return MicroBatchFailure(micro.limit_name, smaller, prompt, response, len(rows))

    def _keep_fewer_activations(self) -> bool:
        """Recompute the activations of all layers from now on; False if that is so already."""
        if self.checkpointing is None or not self.checkpointing.keep_nothing():
            return False
        logger.warning("out of memory: the activations of all layers are recomputed in this process from now on")
        return True

    def _accumulating(self) -> Iterator[nn.Parameter]:
        """The parameters that gradients are added to."""
        return self.model.parameters()

    def _has_gradient(self) -> bool:
        """Whether an earlier mini-batch has left its gradient, which a restart would lose."""
        return any(parameter.grad is not None for parameter in self._accumulating())

    def _names_on_all_ranks(self, own: list[str]) -> list[str]:
        """Metrics that any rank has: one with nothing but padding may have fewer."""
        if self.dp_size == 1:
            return own
        everyones: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyones, own)
        return sorted(set().union(*everyones))

    def schedule_step(self) -> None:
        self.schedule.step()

    @property
    def learning_rate(self) -> float:
        return float(self.schedule.get_last_lr()[0])

    def global_sum(self, *values: float) -> tuple[float, ...]:
        if self.dp_size == 1 or not values:
            return values
        total = torch.tensor(values, dtype=torch.float64)  # on the host, where the values are
        if self.group_rank:
            total.zero_()  # these rows are counted by the first of the ranks that share them
        dist.all_reduce(total)
        return tuple(total.tolist())

    def rollout_module(self) -> PreTrainedModel:
        return rollout_module(self.model.transformer)

    def merged_weights(self) -> Generator[tuple[str, Tensor]]:
        adapters = dict(self.weights(trained=True)) if has_adapters(self.model) else {}
        plain = merge_adapters(self.model.transformer, self.weights(), adapters)
        yield from as_saved(self.model.transformer, plain)

    def weight_shapes(self, *, merged: bool) -> list[tuple[str, tuple[int, ...]]]:
        shapes = [(self.model.hf_name(name), p) for name, p in self.model.named_parameters()]
        if merged:
            plain = [(base_name(name), self._shape(p)) for name, p in shapes if not of_adapter(name)]
            empty = ((name, torch.empty(shape, device="meta")) for name, shape in plain)
            return [(name, tuple(tensor.shape)) for name, tensor in as_saved(self.model.transformer, empty)]
        return [(name, self._shape(p)) for name, p in shapes if p.requires_grad]

    def saved_weights(self) -> Iterator[tuple[str, Tensor]]:
        """`weights`, then the buffers that a Hugging Face folder contains."""
        yield from self.weights()
        saved = self.model.state_dict()
        for name, buffer in self.model.named_buffers():
            if name in saved:
                yield self.model.hf_name(name), buffer

    def export(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        if has_adapters(self.model):
            save_adapter(self.model, self.weights(trained=True), tokenizer, folder / "lora_adapter")
            return
        save = save_scalar_model if isinstance(self.model, ScalarModel) else save_policy
        save(self.model.transformer, self.saved_weights(), tokenizer, folder / "huggingface")

    def _check_model(self) -> None:
        """Compare log-probs or values of a few random rows with transformers' own eager forward, which must be causal."""
        layouts: list[Layout] = ["packed", "padded"] if self._attends_here else ["aligned"]
        batch = check_batch(self.model.hf_config.get_text_config().vocab_size)
        images = [check_images(self.model.hf_config, seed=seed) for seed in (1, 2)]
        if self.info.reads_images and self._attends_here and images[0] is not None and images[1] is not None:
            batch = with_images(batch, images[0], images[1])
        for model, dtype in self._checked_models():
            with phase("check the model"), refuse_errors(model.transformer), torch.no_grad(), trial_adapters(model):
                rope = partial(rope_positions, model.transformer)
                with transformers_forward(model.transformer):
                    expected, later = (
                        model(forward_rows(b, self.device, "rows")) for b in (batch, without_last(batch))
                    )
                check_causal_outputs(expected, later, batch, model=model.transformer, dtype=dtype)
                got = {}
                for layout, with_gradients in product(layouts, self._gradient_modes(model)):
                    with torch.set_grad_enabled(with_gradients):
                        outputs = model(forward_rows(batch, self.device, layout, rope=rope))
                    path = f"training with {layout} rows" + (" and gradients" if with_gradients else "")
                    got[path] = {name: values.detach() for name, values in outputs.items()}
            self._free_gathered()
            for path, outputs in got.items():
                check_outputs(outputs, expected, batch, model=model.transformer, path=path, dtype=dtype)

    def _gradient_modes(self, model: TokenModel) -> tuple[bool, ...]:
        """With and without gradients, if the kernels may differ."""
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        return (False, True) if is_trained and self.device.type == "cuda" else (False,)

    def _watch_routers(self, key: str) -> None:
        """Let the policy read and replace what its routers choose; see `EngineModel.router_key`. ValueError if it cannot."""
        model, _ = self._checked_models()[-1]  # the one that computes
        assert isinstance(model, PolicyModel)
        if not self._attends_here:
            kind = model.hf_config.model_type
            raise ValueError(f"{key}: {kind} computes by its own forward, whose routers cannot be read; disable it")
        model.routing = Routing(model.transformer, key)
        batch = check_batch(model.hf_config.get_text_config().vocab_size)
        with torch.no_grad():
            model(forward_rows(batch, self.device, self.layout, with_places=True), routes="record")
        self._free_gathered()

    @property
    def _attends_here(self) -> bool:
        """Whether the model attends through our function, rather than by its own forward."""
        return self.layout in ("packed", "padded")

    def _partitions(self, batch: Batch, micro: MicroBatching) -> list[list[int]]:
        """Rows of each micro-batch, as many of them on every rank. A token budget is one rank's: `sp_size` ranks have more."""
        if (images := images_of(batch)) is not None:
            self._prepare_for_images(has_videos=any(image is not None and image.has_videos for image in images))
        micro, is_lowered = self.limits.within(micro), micro.limit_name in self.limits.sizes
        if self.layout == "rows":  # each row is one call, so that ranks call their layers equally often
            micro = replace(micro, num_rows=micro.group_size, max_tokens=None)
        if micro.max_tokens is not None:
            group = dist.group.WORLD if self.world_size > 1 else None
            before, own = (lengths.tolist() for lengths in lengths_of(batch))
            owners = prompt_owners(batch) if self.layout == "packed" else list(range(len(batch)))
            most = micro.max_tokens * self.sp_size
            how = {"aligned": self.layout == "aligned", "longer_alone": is_lowered}
            return agreed_runs(own, before, owners, most, group, micro.group_size, **how)
        size = micro.num_rows or len(batch)
        return [list(range(i, min(i + size, len(batch)))) for i in range(0, len(batch), size)]

    def _loss_columns(self, batch: TensorDict) -> TensorDict:
        """The rows on the device, without the tokens that only the forward reads."""
        columns = tensors_of(
            batch.exclude("prompts", "input_ids", "attention_mask", "position_ids", "routed_experts", IMAGES)
        )
        return TensorDict({k: to_device(v, self.device) for k, v in columns.items()}, batch_size=batch.batch_size)

    def _check_length(self, batch: TensorDict) -> None:
        """ValueError if a sequence is longer than the model can compute."""
        longest = int(batch["position_ids"].max()) + 1
        if self._max_length is not None and longest > self._max_length:
            raise ValueError(
                f"a sequence has {longest} tokens, but the rotary frequencies of {self.model.hf_config.model_type} change "
                f"beyond {self._max_length}; shorten data.max_prompt_length or data.max_response_length"
            )

    def _rows(self, batch: TensorDict, *, with_places: bool = False) -> ForwardRows:
        self._check_length(batch)
        rope = partial(rope_positions, self.model.transformer)
        return forward_rows(batch, self.device, self.layout, self.sequence, rope=rope, with_places=with_places)

    def _prepare_for_images(self, *, has_videos: bool) -> None:
        """ValueError if the model reads no images, or no videos. From the first batch with images on, one that does not pack them
        computes by its own forward."""
        config = self.model.hf_config
        if not is_vision(config):
            raise ValueError(f"the batch has images, but {config.model_type} cannot read them: {why_no_images(config)}")
        if not self.info.reads_images:
            raise ValueError(f"the batch has images: {type(self).__name__} trains on text alone; set strategy=fsdp")
        if has_videos and (problem := why_no_videos(config.model_type)):
            raise ValueError(f"the batch has videos: {problem}")
        reason = why_own_forward_with_images(config)
        if reason is None or not self._attends_here:
            return
        if self.sequence is not None:
            raise ValueError(
                f"ulysses_sequence_parallel_size={self.sp_size}: {config.model_type} computes rows with images by its own forward "
                f"({reason}), which ranks cannot share; set it to 1"
            )
        logger.warning(
            "%s computes rows with images by its own forward, one at a time: %s. This is slower than packed tokens.",
            config.model_type,
            reason,
        )
        self.layout = "rows"
        for model, _ in self._checked_models():
            use_transformers_forward(model.transformer)


def _joined(parts: list[Tensor]) -> Tensor:
    """The rows of all parts; those of routes are as long as the longest sequence of their part."""
    width = max((part.shape[1] for part in parts if part.ndim == 4), default=0)
    return torch.cat([F.pad(p, (0, 0, 0, 0, 0, width - p.shape[1]), value=FREE) if p.ndim == 4 else p for p in parts])


def taken_rows(batch: Batch, rows: list[int]) -> TensorDict:
    """These rows of the batch, padded; those of a padded batch are not copied where they follow each other."""
    start, end = rows[0], rows[-1] + 1
    part: Any = (
        batch[rows] if rows != list(range(start, end)) else batch if len(rows) == len(batch) else batch[start:end]
    )
    return part.to_tensordict() if is_ragged(part) else part
