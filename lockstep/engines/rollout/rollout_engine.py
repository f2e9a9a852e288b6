"""The interface of rollout engines: base class and registry; and what all engines share."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig, RolloutConfig
from lockstep.config.engines import ROLLOUT_ENGINES, RolloutEngineInfo
from lockstep.config.model import HFModelConfig
from lockstep.config.train_engines import engine_settings
from lockstep.models.loading import open_causal_lm, resolve_dtype
from lockstep.models.lora import install_adapters
from lockstep.models.model_check import check_causal, check_log_probs, reference_log_probs
from lockstep.models.packed_weights import pack_weights
from lockstep.models.placeholders import placeholder_ids
from lockstep.models.shared_weights import leave_empty
from lockstep.models.split_weights import split_of
from lockstep.models.tensor_group import tensor_group
from lockstep.models.token_models import PolicyModel
from lockstep.models.vision import check_images, why_no_images
from lockstep.protocol.generation import Completion, GenerationRequest, Outcome, SamplingParams
from lockstep.protocol.images import ImageInputs, check_placeholders
from lockstep.utils.fingerprint import fingerprint
from lockstep.utils.out_of_memory import refusal_in
from lockstep.utils.progress import count
from lockstep.utils.step_stop import generation_stopped
from lockstep.utils.vision import why_no_videos


class RolloutEngine(ABC):
    """Generates completions, with the tensors of a bound module or with its own copy of the weights.

        with engine.serving():
            engine.add(id, request)          at any time
            finished = engine.step()         goes on with all requests that were added
            partial = engine.abort([id])

    Its weights are the trainer's tensors (`bind`), or a copy (`load`) that every update replaces: `begin_update`,
    `update_weights` with one bucket after another, `finish_update`.

    info:           what it can do.
    policy_version: of the weights.
    drops_weights:  set by the owner, who then sends all weights again before the next request: `sleep` may drop them.
    has_weights:    False after such a `sleep`, until the next update.
    """

    config: RolloutConfig
    max_model_len: int
    info: ClassVar[RolloutEngineInfo] = RolloutEngineInfo()
    policy_version: int = 0
    drops_weights: bool = False
    has_weights: bool = True

    def bind(self, model: nn.Module) -> None:
        """Use this module's parameters, with the values they have at each later call."""
        raise TypeError(f"rollout.name={self.config.name} holds its own copy of the weights: call load")

    @abstractmethod
    def load(self, model: HFModelConfig, key: str, dtype: torch.dtype, device: torch.device) -> None:
        """Load an own copy of the model. key: its config section, for messages."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """The completions of `requests`, in their order."""
        if not requests:
            return []
        for request in requests:
            check_request(request, self.max_model_len)
        with self.serving():
            return self._run(requests)

    def _run(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        for place, request in enumerate(requests):
            self.add(place, request)
        completions: dict[int, Completion] = {}
        # the ranks of a tensor-parallel group must take the same steps
        can_stop = self.config.tensor_model_parallel_size == 1
        while len(completions) < len(requests):
            completions |= responses_of(self.step())
            count(len(completions), len(requests), "sequences")
            if can_stop and generation_stopped.is_set():  # the responses are for a step that is discarded
                completions |= self.abort(self.unfinished())
                return [completions.get(place, Completion([], [], "abort", [])) for place in range(len(requests))]
        return [completions[place] for place in range(len(requests))]

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Requests are served inside; those left unfinished at the end are dropped. Weights must not change inside."""
        self.wake()
        try:
            yield
        finally:
            self.abort(self.unfinished())

    def prompt_like(self, token_ids: list[int]) -> list[int]:
        """A prompt that the engine can take: `token_ids`, or other tokens of about the same text if it takes text."""
        return token_ids

    def canaries(self, request: GenerationRequest) -> list[Completion]:
        """The request's completion by every copy of the weights that the engine has."""
        return self.generate([request])

    @abstractmethod
    def add(self, request_id: int, request: GenerationRequest) -> None:
        """Accept a request, which fits (`check_request`); ValueError if the engine refuses this one.

        request_id: not that of an unfinished one.
        """

    @abstractmethod
    def step(self) -> Mapping[int, Outcome]:
        """Go on with the unfinished requests, of which there are some, for a short while; returns those that finished."""

    @abstractmethod
    def unfinished(self) -> list[int]:
        """Ids of the requests that were added and have not finished."""

    @abstractmethod
    def abort(self, request_ids: Collection[int]) -> dict[int, Completion]:
        """End unfinished requests; returns what each has so far. Ids of other requests are ignored."""

    def takes_weights(self) -> bool:
        """Whether its copy of the weights can be updated."""
        return True

    def begin_update(self) -> None:  # noqa: B027
        """Prepare for new weights."""

    @abstractmethod
    def update_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load some of the parameters, by Hugging Face name; tied ones come once.

        Names and shapes are those of a transformers model if `info.takes_adapters`, otherwise those of its safetensors files.
        """

    def finish_update(self, version: int) -> None:
        """All parameters have come; they are those of `version`. Nothing computed with earlier ones may be used again."""
        self.policy_version = version
        self.has_weights = True

    @abstractmethod
    def fingerprints(self, names: Sequence[str]) -> dict[str, int]:
        """Checksums of the bits of these parameters, as they compute or, of those in `unread_weights`, as they were received last.

        A parameter that the engine lacks is left out.
        """

    def unread_weights(self, names: Sequence[str]) -> dict[str, str]:
        """Parameters whose bits cannot be read back from the engine, and why; depends on its structure, not on their values.

        Known after the first update.
        """
        return {}

    def drop_cached_prefixes(self) -> None:  # noqa: B027
        """Forget the KV cache of earlier prompts."""

    def sleep(self) -> None:  # noqa: B027
        """Free the KV cache, and what else the engine can do without, until `wake`, an update or the next request."""

    def wake(self) -> None:  # noqa: B027
        """Undo `sleep`; the next request does so too."""

    def lowered_limits(self) -> dict[str, float]:
        """As metrics: what the engine does less of at once than configured, since it ran out of memory."""
        return {}

    def draft_metrics(self) -> dict[str, float]:
        """What drafts from history did since the last call (`rollout.history_drafts`)."""
        return {}

    def mark_state(self) -> None:  # noqa: B027
        """Remember what `saved_state` gives now; what follows may be discarded."""

    def saved_state(self, *, marked: bool = False) -> dict[str, Any] | None:
        """What a checkpoint keeps of the engine, as plain data for `utils.state_file`; None for nothing.

        marked: as it was at the last `mark_state`, if there was one.
        """
        return None

    def load_states(self, own: Iterable[dict[str, Any]], others: Iterable[dict[str, Any]]) -> None:  # noqa: B027
        """Restore `saved_state` of the engines of all ranks.

        own: those of ranks that are gone, then that of this rank. others: those that other ranks go on with.
        """

    def released_bytes(self) -> int:
        """Device memory that torch counts as allocated although `sleep` released it."""
        return 0


class ModuleEngine(RolloutEngine):
    """An engine that runs a transformers module in this process."""

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The module given to `bind`."""

    def load(self, model: HFModelConfig, key: str, dtype: torch.dtype, device: torch.device) -> None:
        alone = self.config.tensor_model_parallel_size == 1
        policy, weights = open_causal_lm(model, key, dtype, device, longest_sequence(self.config), alone=alone)
        install_adapters(PolicyModel(policy), model, key, dtype=dtype, device=device, seed=self.config.seed)
        self.bind(policy)
        weights.fill(policy, device)
        pack_weights(policy)

    def update_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        copy_weights(self.module, weights)

    def fingerprints(self, names: Sequence[str]) -> dict[str, int]:
        """Collective if ranks hold the weights together."""
        state = self.module.state_dict()
        split = split_of(self.module)
        found = {name: state[name] for name in names if name in state}
        return {name: fingerprint(own if split is None else split.whole(name, own)) for name, own in found.items()}


class IdleEngine(RolloutEngine):
    """The engine of a rank that does not generate (`rollout.n_gpus`): it takes part in what is collective, and holds no weights.

    Its responses are empty; those of a rank that generates the same rows are collected.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self.info = ROLLOUT_ENGINES.info(config.name)  # type: ignore[misc]
        self.max_model_len = longest_sequence(config)

    def bind(self, model: nn.Module) -> None:
        tensor_group(self.config.tensor_model_parallel_size)
        leave_empty(model)

    def load(self, model: HFModelConfig, key: str, dtype: torch.dtype, device: torch.device) -> None:
        raise TypeError("an engine that does not generate holds no copy of the weights")

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        return [Completion([], [], "abort", []) for _ in requests]

    def add(self, request_id: int, request: GenerationRequest) -> None:
        """Ignored: another rank has it too."""

    def step(self) -> Mapping[int, Outcome]:
        return {}

    def unfinished(self) -> list[int]:
        return []

    def abort(self, request_ids: Collection[int]) -> dict[int, Completion]:
        return {}

    def update_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for _ in weights:
            pass

    def fingerprints(self, names: Sequence[str]) -> dict[str, int]:
        return {}


def create_rollout_engine(config: RolloutConfig, eos_token_ids: Sequence[int], pad_token_id: int) -> RolloutEngine:
    """The engine named `config.name`; call `bind` or `load` before generating."""
    engine: RolloutEngine = ROLLOUT_ENGINES.get(config.name)(config, eos_token_ids, pad_token_id)
    return engine


def stop_tokens(sampling: SamplingParams, eos_token_ids: Sequence[int]) -> frozenset[int]:
    return frozenset() if sampling.ignore_eos else frozenset(eos_token_ids) | frozenset(sampling.stop_token_ids)


def check_request(request: GenerationRequest, max_model_len: int) -> None:
    prompt, new = len(request.prompt_ids), request.sampling.max_tokens
    if prompt == 0:
        raise ValueError("a request's prompt has no tokens")
    if prompt + new > max_model_len:
        raise ValueError(
            f"{prompt} prompt tokens + max_tokens {new} = {prompt + new} exceed max_model_len={max_model_len}; raise "
            "actor_rollout_ref.rollout.max_model_len or shorten the prompt or max_tokens"
        )


def check_request_images(request: GenerationRequest, hf_config: PretrainedConfig) -> None:
    """ValueError if the model cannot read the request's images, or if they do not fit its placeholders."""
    if request.images is not None and (reason := why_no_images(hf_config)):
        raise ValueError(f"the prompt has images, which {hf_config.model_type} cannot read: {reason}")
    if request.images is not None and request.images.has_videos and (reason := why_no_videos(hf_config.model_type)):
        raise ValueError(f"the prompt has videos: {reason}")
    check_request_placeholders(request, placeholder_ids(hf_config))


def check_request_placeholders(request: GenerationRequest, known: Collection[int]) -> None:
    """ValueError if the prompt has other placeholders than those of its images. known: all of the model."""
    own = () if request.images is None else request.images.placeholders
    if others := [token for token in request.prompt_ids if token in known and token not in own]:
        what = "but no image" if request.images is None else f"whose placeholder is token {' or '.join(map(str, own))}"
        raise ValueError(f"the prompt has {len(others)} placeholder tokens ({others[0]}) of an image or video, {what}")
    if request.images is not None:
        check_placeholders(sum(map(request.prompt_ids.count, own)), request.images)


def responses_of(outcomes: Mapping[int, Outcome]) -> dict[int, Completion]:
    """The responses; raises if a request has none."""
    found = {}
    for request_id, outcome in outcomes.items():
        if isinstance(outcome, Exception):
            raise outcome
        found[request_id] = outcome
    return found


def longest_sequence(config: RolloutConfig) -> int:
    if config.max_model_len is not None:
        return config.max_model_len
    return config.prompt_length + config.response_length


def rollout_dtype(config: ActorRolloutRefConfig, device: torch.device) -> torch.dtype:
    """The type in which the rollout holds its weights: the actor's, or `rollout.dtype` of an engine that reads it."""
    own = "auto" if "dtype" in ROLLOUT_ENGINES.info(config.rollout.name).unread else config.rollout.dtype
    return resolve_dtype(own if own != "auto" else engine_settings(config.actor).dtype, device)


def copy_weights(model: nn.Module, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Copy whole values into the parameters and buffers of `model` by name; of split ones, this rank's share."""
    state = model.state_dict()
    split = split_of(model)
    with torch.no_grad():
        for name, value in weights:
            if name not in state:
                raise ValueError(f"update_weights: the rollout model has no parameter {name!r}")
            shape = tuple(state[name].shape) if split is None else split.whole_shape(name, state[name])
            if shape != tuple(value.shape):
                raise ValueError(
                    f"update_weights: {name} has shape {tuple(value.shape)}, but {shape} in the rollout model"
                )
            state[name].copy_(value if split is None else split.take(name, value))


def shortage_of(call: Callable[[], object]) -> str | None:
    """Why memory did not suffice for the call; None if it did. What the call had allocated is free when this returns."""
    try:
        call()
    except (RuntimeError, MemoryError) as error:
        if (refusal := refusal_in(error)) is None:
            raise
        return str(refusal).partition("\n")[0].partition(". GPU ")[0] or "MemoryError"
    return None


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout and no gradient checkpointing inside; each module gets its own mode back afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def check_against_transformers(
    generate: Callable[[Sequence[GenerationRequest]], list[Completion]],
    model: PreTrainedModel,
    max_length: int,
    block_size: int,
    *,
    path: str,
    advice: str,
) -> None:
    """Compare the log-probs of an engine with transformers' eager forward; ValueError if they differ, or if it is not causal.

    Three random prompts end within the first, second and third cache block, as far as `max_length` allows; a fourth has an image
    if the model reads images. The model must be in evaluation mode.
    path, advice: for the message, see `check_log_probs`.
    """
    rng = random.Random(0)
    placeholders = placeholder_ids(model.config)
    tokens = [token for token in range(model.config.get_text_config().vocab_size) if token not in placeholders]
    if max_length > 2:
        check_causal(model, random.Random(1).choices(tokens, k=min(8, max_length)))
    num_new = min(4, max_length - 1)
    lengths = [min(length, max_length - num_new) for length in (3, block_size + 2, 2 * block_size + 1)]
    sampling = SamplingParams(max_tokens=num_new, ignore_eos=True)
    prompts = [rng.choices(tokens, k=length) for length in lengths]
    images: list[ImageInputs | None] = [None] * len(prompts)
    image = check_images(model.config, seed=1)
    if image is not None and 4 + sum(image.num_tokens) + num_new <= max_length:
        prompts.append(
            [*rng.choices(tokens, k=2), *[image.token_id] * sum(image.num_tokens), *rng.choices(tokens, k=2)]
        )
        images.append(image)
    pairs = enumerate(zip(prompts, images))
    completions = generate([GenerationRequest(prompt, sampling, seed, image) for seed, (prompt, image) in pairs])
    expected = reference_log_probs(model, [prompt + c.token_ids for prompt, c in zip(prompts, completions)], images)
    got = [torch.tensor(c.log_probs) for c in completions]
    check_log_probs(got, [log_probs[-num_new:].cpu() for log_probs in expected], model=model, path=path, advice=advice)
