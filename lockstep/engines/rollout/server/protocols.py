"""What servers are asked and what they answer: one class per protocol.

vllm     /inference/v1/generate, token ids in and out; weights by /collective_rpc with `vllm_worker.WeightUpdates`
sglang   /generate with input_ids and return_logprob; weights by /update_weights_from_tensor or _distributed
openai   /v1/completions with token ids as the prompt; no weight updates
tgi      in tgi.py

A prompt with images has one placeholder token per image and their files as data URIs; the server expands the placeholders, and its
prompt must then have the tokens of the run's.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engines import SERVER_KINDS
from lockstep.engines.rollout.sent_images import NEVER, unexpanded
from lockstep.engines.rollout.server.http import KEY, Connection, ServerError
from lockstep.engines.rollout.vllm import logprobs_mode
from lockstep.protocol.generation import GenerationRequest
from lockstep.protocol.images import ImageInputs
from lockstep.registry import Registry
from lockstep.utils.audit import AuditError
from lockstep.utils.data_uri import as_data_uri

EXTENSION = "lockstep.engines.rollout.vllm_worker.WeightUpdates"


@dataclass(frozen=True)
class Answer:
    """The answer to one request.

    finish:     why it ended: stop | length | abort, or another word of the server.
    weights:    labels of the weights that sampled it; None if the server does not tell.
    prompt_ids: the prompt's tokens, of a server that tokenizes it or expands its images and shows them; otherwise None.
    num_prompt: how many they are, of a server that tells only this.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish: str
    weights: set[str] | None = None
    prompt_ids: list[int] | None = None
    num_prompt: int | None = None


@dataclass(frozen=True)
class ServedModel:
    """A model of a server. Lengths in tokens; None if the server does not tell.

    name:         in requests.
    max_length:   of a prompt and its response.
    max_prompt:   of a prompt.
    max_requests: that the server accepts at once; others are refused.
    """

    name: str
    max_length: int | None = None
    max_prompt: int | None = None
    max_requests: int | None = None


class ServerProtocol(ABC):
    """One protocol, of one server.

    open_tokenizer:    the run's tokenizer, for a protocol whose prompts are text.
    placeholders:      tokens that stand for images and videos, which no response may have; none of a text model.
    generate_path:     of requests.
    health_path:       is answered once the server is ready.
    marker:            a path that servers of this protocol alone have; None if there is none.
    optional:          paths that not all of them have.
    transfers:         forms of `weight_transfer` that it has.
    takes_stop_tokens: responses end at the stop tokens of a request; otherwise only at those of the server's model, and the client
                       cuts them at others.
    ignores_eos:       has `ignore_eos`.
    takes_images:      with a prompt of token ids.
    """

    generate_path: str
    health_path: str = "/health"
    marker: str | None = None
    optional: tuple[str, ...] = ()
    transfers: tuple[str, ...] = ()
    takes_stop_tokens: bool = True
    ignores_eos: bool = True
    takes_images: bool = True

    def __init__(self, open_tokenizer: Callable[[], PreTrainedTokenizerBase], placeholders: Sequence[int] = ()) -> None:
        self.open_tokenizer = open_tokenizer
        self.placeholders = tuple(placeholders)

    async def models(self, server: Connection) -> list[ServedModel]:
        """The models that the server serves."""
        listed = (await server.get("/v1/models"))["data"]
        return [ServedModel(model["id"], model.get("max_model_len")) for model in listed]

    @abstractmethod
    def body(
        self, request: GenerationRequest, request_id: str, model: str, stops: Sequence[int], salt: str
    ) -> dict[str, Any]:
        """The request's JSON. stops: tokens that end it. salt: cached prefixes of other salts must not be used."""

    @abstractmethod
    def answer(self, body: Any) -> Answer:
        """Read a server's answer; LookupError, TypeError or ValueError if a part is missing."""

    def never_sampled(self) -> dict[str, Any]:
        """The sampling parameter of vLLM and SGLang that keeps placeholders out of responses."""
        return {"logit_bias": {str(token): NEVER for token in self.placeholders}} if self.placeholders else {}

    async def check_prompt(self, server: Connection, request: GenerationRequest, answer: Answer) -> None:
        """ServerError if the server, which tokenizes prompts or expands images, computed other tokens than the request's."""
        if request.images is not None and answer.token_ids:
            _check_expanded(server, request.prompt_ids, answer)

    def probe_prompt(self, token_id: int) -> list[int]:
        """A short prompt that the server can take: `token_id`, or a word if it takes text."""
        return [token_id]

    def prompt_like(self, token_ids: list[int]) -> list[int]:
        """A prompt that the server can take: `token_ids`, or other tokens of about the same text."""
        return token_ids

    async def abort(self, server: Connection, request_ids: Sequence[str]) -> bool:
        """End requests, which are then answered with what they have; False if the server cannot."""
        return False

    async def check(self, server: Connection, config: RolloutConfig) -> None:  # noqa: B027
        """ServerError if the server's settings do not fit the run."""

    async def why_no_updates(self, server: Connection) -> str | None:
        """Why its weights cannot be updated, and what to do; None if they can."""
        return (
            f"{server.url} has no endpoints for weight updates; set {KEY}.kind=vllm or sglang and start such a server, or "
            f"set {KEY}.reload_command, which restarts this one with the new weights"
        )

    async def begin_update(self, server: Connection) -> None:
        raise NotImplementedError

    async def load_file(self, server: Connection, path: str) -> None:
        """Load the tensors of a safetensors file."""
        raise NotImplementedError

    async def load_tensors(self, server: Connection, payload: str) -> None:
        """Load tensors. payload: base64 of a pickled list of (name, tensor)."""
        raise NotImplementedError

    async def join_group(
        self, server: Connection, name: str, address: str, port: int, first_rank: int, size: int, backend: str
    ) -> None:
        """Let its ranks join the group of this name. first_rank: of the server's first one."""
        raise NotImplementedError

    async def load_broadcast(
        self, server: Connection, group: str, tensors: Sequence[tuple[str, str, list[int]]]
    ) -> None:
        """Load tensors that rank 0 of the group broadcasts: name, dtype and shape of each."""
        raise NotImplementedError

    async def num_ranks(self, server: Connection) -> int:
        """Processes of the server that hold weights."""
        raise NotImplementedError

    async def finish_update(self, server: Connection, label: str) -> None:
        """All weights have been loaded; answers carry `label` from now on."""
        raise NotImplementedError

    async def fingerprints(self, server: Connection, names: Sequence[str]) -> dict[str, int] | None:
        """Fingerprints of the server's parameters; None if it cannot tell."""
        return None

    async def unread_weights(self, server: Connection, names: Sequence[str]) -> dict[str, str]:
        """Parameters that are not in `fingerprints` as they compute, and why."""
        return dict.fromkeys(names, f"{server.url} does not show its weights")

    async def drop_cached_prefixes(self, server: Connection) -> None:  # noqa: B027
        """Forget cached prefixes; requests must not be running."""

    async def sleep(self, server: Connection) -> None:
        raise ServerError(f"{server.url} cannot release its memory; set {KEY}.sleep=false")

    async def wake(self, server: Connection, parts: Sequence[str]) -> None:
        """parts: any of weights and kv_cache."""
        raise NotImplementedError


PROTOCOLS: Registry[type[ServerProtocol]] = Registry("server protocol", key=f"{KEY}.kind")


@PROTOCOLS.register("vllm")
class VllmProtocol(ServerProtocol):
    generate_path = marker = "/inference/v1/generate"
    transfers = SERVER_KINDS["vllm"].transfers
    _ABORT = "/inference/v1/abort_requests"
    _UPDATE = ("/collective_rpc", "/pause", "/resume", "/reset_prefix_cache", "/update_weight_version")
    _RESET_IMAGES = "/reset_encoder_cache"
    optional = (_ABORT, *_UPDATE, _RESET_IMAGES)

    def body(
        self, request: GenerationRequest, request_id: str, model: str, stops: Sequence[int], salt: str
    ) -> dict[str, Any]:
        sampling = request.sampling
        images = request.images
        more: dict[str, Any] = {}
        if images is not None:
            more = {"content_parts": image_parts(images), "return_token_ids": True}
        return {
            "request_id": request_id,
            "model": model,
            "token_ids": request.prompt_ids if images is None else unexpanded(request),
            "cache_salt": salt,
            **more,
            "sampling_params": {
                **self.never_sampled(),
                "temperature": sampling.temperature,
                "top_k": max(sampling.top_k, 0),
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "max_tokens": sampling.max_tokens,
                "stop_token_ids": list(stops),
                "ignore_eos": sampling.ignore_eos,
                "seed": request.stream_seed,
                "logprobs": 0,  # of the sampled token alone
                "detokenize": False,
            },
        }

    def answer(self, body: Any) -> Answer:
        (choice,) = body["choices"]
        log_probs = [entry["logprob"] for entry in choice["logprobs"]["content"] or ()]
        spans = choice.get("weight_versions")
        weights = None if spans is None else {span["version"] for span in spans}
        prompt_ids = body.get("prompt_token_ids")
        return Answer(choice["token_ids"] or [], log_probs, choice["finish_reason"], weights, prompt_ids)

    async def abort(self, server: Connection, request_ids: Sequence[str]) -> bool:
        if self._ABORT not in server.paths:
            return False
        await server.post(self._ABORT, {"request_ids": [f"generate-tokens-{name}" for name in request_ids]})
        return True

    async def check(self, server: Connection, config: RolloutConfig) -> None:
        if "/collective_rpc" not in server.paths:  # development mode, which weight updates need, also has /server_info
            return
        info = (await server.get("/server_info?config_format=json"))["vllm_config"]["model_config"]
        wanted = logprobs_mode(config)
        if info["logprobs_mode"] != wanted:
            raise ServerError(
                f"{server.url} returns {info['logprobs_mode']}, the sampling keys of actor_rollout_ref.rollout need {wanted}; "
                f"start it with --logprobs-mode {wanted}"
            )

    async def why_no_updates(self, server: Connection) -> str | None:
        needed = (*self._UPDATE, self._RESET_IMAGES) if self.placeholders else self._UPDATE
        missing = [path for path in needed if path not in server.paths]
        if missing:
            return (
                f"{server.url} has no {missing[0]}, which weight updates need; start vLLM 0.32 or newer with "
                f"VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls {EXTENSION}"
            )
        info = await server.get("/server_info?config_format=json")
        if info["vllm_config"]["parallel_config"]["worker_extension_cls"] != EXTENSION:
            return f"{server.url} cannot load weights; start it with --worker-extension-cls {EXTENSION}"
        return None

    async def begin_update(self, server: Connection) -> None:
        await server.post("/pause?mode=abort")
        await self._on_workers(server, "lockstep_begin_update")

    async def load_file(self, server: Connection, path: str) -> None:
        await self._on_workers(server, "lockstep_load_file", path)

    async def join_group(
        self, server: Connection, name: str, address: str, port: int, first_rank: int, size: int, backend: str
    ) -> None:
        timeout_s = server.config.timeout_s
        await self._on_workers(server, "lockstep_join_group", name, address, port, first_rank, size, backend, timeout_s)

    async def load_broadcast(
        self, server: Connection, group: str, tensors: Sequence[tuple[str, str, list[int]]]
    ) -> None:
        await self._on_workers(server, "lockstep_load_broadcast", tensors)

    async def num_ranks(self, server: Connection) -> int:
        size, of_one = [
            int((await server.get(f"/get_world_size?include_dp={flag}"))["world_size"]) for flag in ("true", "false")
        ]
        if size != of_one:
            raise ServerError(f"{server.url} is data-parallel; start one server per copy and list all URLs")
        return size

    async def finish_update(self, server: Connection, label: str) -> None:
        wrong = [text for text in await self._on_workers(server, "lockstep_finish_update") if text]
        if wrong:
            raise AuditError(f"{server.url} does not compute with the new weights ({label}): {wrong[0]}")
        await self.drop_cached_prefixes(server)
        await server.post("/update_weight_version", {"new_version": label})
        await server.post("/resume")

    async def fingerprints(self, server: Connection, names: Sequence[str]) -> dict[str, int] | None:
        """Those of all ranks together: a parameter that is missing on one is left out."""
        ranks = await self._on_workers(server, "lockstep_fingerprints", list(names))
        for name in names:
            if len({rank[name] for rank in ranks if name in rank}) > 1:
                raise AuditError(f"{name} differs between the ranks of {server.url}")
        return {name: ranks[0][name] for name in names if all(name in rank for rank in ranks)}

    async def unread_weights(self, server: Connection, names: Sequence[str]) -> dict[str, str]:
        ranks: list[dict[str, str]] = await self._on_workers(server, "lockstep_unread")
        return {name: reason for rank in ranks for name, reason in rank.items()}

    async def drop_cached_prefixes(self, server: Connection) -> None:
        done = await server.post("/reset_prefix_cache")
        if not done["success"]:
            raise ServerError(f"{server.url} did not reset its prefix cache: requests are still running")
        if self.placeholders:
            await server.post(self._RESET_IMAGES)  # features of images, which vLLM keeps by their pixels alone

    async def sleep(self, server: Connection) -> None:
        await server.post("/sleep?level=1")

    async def wake(self, server: Connection, parts: Sequence[str]) -> None:
        await server.post("/wake_up?" + "&".join(f"tags={part}" for part in parts))

    async def _on_workers(self, server: Connection, method: str, *args: Any) -> list[Any]:
        answer = await server.post("/collective_rpc", {"method": method, "args": list(args)})
        return list(answer["results"]) if answer else []


@PROTOCOLS.register("sglang")
class SglangProtocol(ServerProtocol):
    generate_path = "/generate"
    marker = "/update_weights_from_disk"
    transfers = SERVER_KINDS["sglang"].transfers

    def body(
        self, request: GenerationRequest, request_id: str, model: str, stops: Sequence[int], salt: str
    ) -> dict[str, Any]:
        sampling = request.sampling
        images = request.images
        more = {} if images is None else {"image_data": [as_data_uri(file) for file in images.files]}
        return {
            "rid": request_id,
            "input_ids": request.prompt_ids if images is None else unexpanded(request),
            "extra_key": salt,
            "return_logprob": True,
            **more,
            "sampling_params": {
                **self.never_sampled(),
                "temperature": sampling.temperature,
                "top_k": sampling.top_k if sampling.top_k > 0 else -1,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "max_new_tokens": sampling.max_tokens,
                "stop_token_ids": list(stops),
                "ignore_eos": sampling.ignore_eos,
                "sampling_seed": request.stream_seed,
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
        }

    def answer(self, body: Any) -> Answer:
        about = body["meta_info"]
        pairs = about["output_token_logprobs"]
        token_ids = body["output_ids"] if "output_ids" in body else [pair[1] for pair in pairs]
        label = about.get("weight_version")
        weights = None if label is None else {label}
        return Answer(
            token_ids,
            [pair[0] for pair in pairs],
            about["finish_reason"]["type"],
            weights,
            num_prompt=about.get("prompt_tokens"),
        )

    async def abort(self, server: Connection, request_ids: Sequence[str]) -> bool:
        await asyncio.gather(*(server.post("/abort_request", {"rid": name}) for name in request_ids))
        return True

    async def why_no_updates(self, server: Connection) -> str | None:
        return None

    async def begin_update(self, server: Connection) -> None:
        await server.post("/pause_generation", {"mode": "abort"})

    async def load_tensors(self, server: Connection, payload: str) -> None:
        ranks = [payload] * await self.num_ranks(server)
        await self._update(server, "/update_weights_from_tensor", {"serialized_named_tensors": ranks})

    async def join_group(
        self, server: Connection, name: str, address: str, port: int, first_rank: int, size: int, backend: str
    ) -> None:
        place = {"master_address": address, "master_port": port, "rank_offset": first_rank, "world_size": size}
        await self._update(server, "/init_weights_update_group", {**place, "group_name": name, "backend": backend})

    async def load_broadcast(
        self, server: Connection, group: str, tensors: Sequence[tuple[str, str, list[int]]]
    ) -> None:
        names, dtypes, shapes = (list(column) for column in zip(*tensors))
        body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group, "flush_cache": False}
        await self._update(server, "/update_weights_from_distributed", body)

    async def num_ranks(self, server: Connection) -> int:
        try:
            info = await server.get("/server_info")
        except ServerError:  # its name in older versions
            info = await server.get("/get_server_info")
        if info.get("dp_size", 1) > 1:
            raise ServerError(
                f"{server.url} has dp_size={info['dp_size']}; start one server per copy and list all URLs"
            )
        return int(info["tp_size"]) * int(info.get("pp_size", 1))

    async def finish_update(self, server: Connection, label: str) -> None:
        await self.drop_cached_prefixes(server)
        await self._update(server, "/update_weight_version", {"new_version": label, "abort_all_requests": False})
        await server.post("/continue_generation", {})

    async def drop_cached_prefixes(self, server: Connection) -> None:
        await server.post("/flush_cache")  # 400 while requests are running

    async def sleep(self, server: Connection) -> None:
        await server.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})

    async def wake(self, server: Connection, parts: Sequence[str]) -> None:
        await server.post("/resume_memory_occupation", {"tags": list(parts)})

    async def _update(self, server: Connection, path: str, body: dict[str, Any]) -> None:
        answer = await server.post(path, body)
        if not answer or not answer.get("success"):
            raise ServerError(f"{server.url}{path}: {(answer or {}).get('message') or 'no success'}")


@PROTOCOLS.register("openai")
class OpenAIProtocol(ServerProtocol):
    generate_path = "/v1/completions"
    health_path = "/v1/models"

    def body(
        self, request: GenerationRequest, request_id: str, model: str, stops: Sequence[int], salt: str
    ) -> dict[str, Any]:
        sampling = request.sampling
        body = {
            "model": model,
            "prompt": request.prompt_ids if request.images is None else unexpanded(request),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": request.stream_seed,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        more = {"top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0, "ignore_eos": sampling.ignore_eos}
        body |= {name: getattr(sampling, name) for name, is_set in more.items() if is_set}
        body |= {} if request.images is None else {"content_parts": image_parts(request.images)}
        return body | ({"stop_token_ids": list(stops)} if stops else {})

    def answer(self, body: Any) -> Answer:
        (choice,) = body["choices"]
        token_ids = choice.get("token_ids")
        if token_ids is None:
            token_ids = [int(text.removeprefix("token_id:")) for text in choice["logprobs"]["tokens"]]
        prompt_ids = choice.get("prompt_token_ids")
        return Answer(token_ids, choice["logprobs"]["token_logprobs"], choice["finish_reason"], prompt_ids=prompt_ids)


def image_parts(images: ImageInputs) -> list[dict[str, str]]:
    """vLLM's `content_parts`."""
    return [{"type": "image_url", "url": as_data_uri(file)} for file in images.files]


def _check_expanded(server: Connection, prompt_ids: list[int], answer: Answer) -> None:
    found = len(answer.prompt_ids) if answer.prompt_ids is not None else answer.num_prompt
    if found is None:
        raise ServerError(
            f"{server.url} does not tell the tokens of a prompt with images, so that it may have left them out; use vLLM 0.32 or "
            "newer, SGLang, or actor_rollout_ref.rollout.name=embedded"
        )
    if found != len(prompt_ids) or answer.prompt_ids not in (None, prompt_ids):
        raise ServerError(
            f"{server.url} computed a prompt with images as {found} tokens, which are not the {len(prompt_ids)} of the run's "
            "processor: it has other pixel limits than data.min_pixels and data.max_pixels, or takes no images with token ids; "
            "start it with --mm-processor-kwargs, or use actor_rollout_ref.rollout.name=embedded"
        )
