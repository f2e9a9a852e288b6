"""Actor, rollout and reference policy: one worker class, whose role says which of them it is.

role actor_rollout       trains, and generates with the same weights
role actor, rollout      one of the two, in separate processes; weights are sent to the rollout after each update
role ref                 a frozen copy for reference log-probs
role actor_rollout_ref   all three

With LoRA the reference is the actor with its adapters off: no role loads a second model.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from lockstep.config.actor_rollout_ref import (
    ActorConfig,
    ActorRolloutRefConfig,
    RefConfig,
    RolloutConfig,
    max_expected_gap,
)
from lockstep.config.train_engines import engine_settings, ranks_per_sequence
from lockstep.engines.rollout.rollout_engine import (
    IdleEngine,
    ModuleEngine,
    RolloutEngine,
    check_request,
    create_rollout_engine,
    longest_sequence,
    rollout_dtype,
)
from lockstep.engines.train import EngineModel, TrainEngine, create_train_engine
from lockstep.engines.train.audit import ReferenceAudit, UpdateAudit
from lockstep.engines.train.trial import SplitCheck
from lockstep.models.loading import load_hf_config, model_folder, resolve_dtype
from lockstep.models.model_check import check_batch
from lockstep.models.router_replay import check_balance_loss
from lockstep.models.tokenizer import eos_token_ids, hf_tokenizer
from lockstep.protocol import DataProto, drop_marked
from lockstep.protocol.generation import Completion, GenerationRequest, Outcome, SamplingParams
from lockstep.protocol.require import require
from lockstep.protocol.tokens import with_images
from lockstep.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from lockstep.utils import step_stop
from lockstep.utils.checkpoint_folder import checkpoint_folder
from lockstep.utils.device import memory_peaks
from lockstep.utils.distributed import join_process_group
from lockstep.utils.model_path import revision_of
from lockstep.utils.rollout_gap import GapBound, RolloutGap
from lockstep.utils.state_file import load_state, save_state
from lockstep.weight_sync import WeightSyncWorker
from lockstep.weight_sync.proof import MAX_NEW, canary_prompt
from lockstep.workers.losses import ExpertLoad, actor_loss_fn, has_advantages
from lockstep.workers.rollout_batch import batch_of, recorded_routes, requests_of, sampling_params
from lockstep.workers.updates import MetricMeans, limits_of, micro_batching, mini_batches, num_mini_batches

_KEY = "actor_rollout_ref.model"
MAX_STEPS = 8
"""Steps of the engine per `advance_generation`, unless a request finishes earlier."""
_ROLES = ("actor", "rollout", "ref", "actor_rollout", "actor_rollout_ref")


class ActorRolloutRefWorker(WeightSyncWorker):
    def __init__(self, config: ActorRolloutRefConfig, role: str, device: str = "cpu") -> None:
        super().__init__()
        if role not in _ROLES:
            raise ValueError(f"role {role!r}: expected one of {', '.join(_ROLES)}")
        self.config = config
        self.device = torch.device(device)
        self.memory = memory_peaks(self.device)
        self.is_actor = role in ("actor", "actor_rollout", "actor_rollout_ref")
        self.is_rollout = role in ("rollout", "actor_rollout", "actor_rollout_ref")
        self.is_ref = role in ("ref", "actor_rollout_ref")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fetch_model(self) -> tuple[str, str]:
        """Bring the model to this machine, before collectives with their timeouts; returns its path and revision."""
        return self.config.model.path, revision_of(model_folder(self.config.model, _KEY))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        config = self.config
        join_process_group(self.rank, self.world_size, self.device, config.nccl_timeout)
        folder = model_folder(config.model, _KEY)
        self.tokenizer = hf_tokenizer(
            config.model.tokenizer_path or config.model.path,
            trust_remote_code=config.model.trust_remote_code,
            custom_chat_template=config.model.custom_chat_template,
            key=f"{_KEY}.tokenizer_path",
        )
        if self.is_actor:
            if config.actor.router_aux_loss_coef:
                check_balance_loss(load_hf_config(config.model, _KEY), "actor_rollout_ref.actor.router_aux_loss_coef")
            self.actor = self._engine(config.actor)
            dtype = resolve_dtype(engine_settings(config.actor).dtype, self.device)
            largest = max_expected_gap(config.rollout)
            self.gap_bound = GapBound(dtype, exact=config.rollout.exact, largest=largest)
            self._audit = self._update_audit()
            self._split_check = SplitCheck(partial(self._audit.problem, "micro_batch_split"))
            self._register_dispatch_collect_info("actor", self.actor.dp_rank, self.actor.group_rank == 0)
        if self.is_rollout:
            num_generating = (config.rollout.n_gpus if self.is_actor else None) or self.world_size
            generates = self.rank < num_generating
            self.rollout: RolloutEngine = IdleEngine(config.rollout)
            if generates:
                self.rollout = create_rollout_engine(
                    config.rollout,
                    eos_token_ids=eos_token_ids(self.tokenizer, folder),
                    pad_token_id=self.tokenizer.pad_token_id,
                )
            if self.is_actor and self.rollout.info.shares_weights:
                self.generator = self.actor.rollout_module()
                self.rollout.bind(self.generator)
            else:
                self.rollout.load(config.model, _KEY, rollout_dtype(config, self.device), self.device)
                self.memory.subtract(self.rollout.released_bytes)
                if self.is_actor:
                    # It sends its weights before the first request, and again whenever they were dropped.
                    self.rollout.drops_weights = True
                    self.rollout.sleep()
            tp = config.rollout.tensor_model_parallel_size
            engine = (
                self.rank // tp % (num_generating // tp)
            )  # a rank that does not generate gets the rows of one that does
            self._register_dispatch_collect_info("rollout", engine, generates and self.rank % tp == 0)
        if self.is_actor and config.model.lora_rank:
            self.ref = self.actor  # with its adapters off
        elif self.is_ref:
            self.ref = self._engine(config.ref)
        if hasattr(self, "ref"):
            role = config.actor if self.is_actor and config.model.lora_rank else config.ref
            dtype = resolve_dtype(engine_settings(role).dtype, self.device)
            self._ref_audit = ReferenceAudit(self.ref, dtype, has_own_weights=role is config.ref)
            self._register_dispatch_collect_info("ref", self.ref.dp_rank, self.ref.group_rank == 0)

    def _engine(self, role: ActorConfig | RefConfig) -> TrainEngine:
        spec = EngineModel(
            self.config.model,
            _KEY,
            "policy",
            engine_settings(role),
            optim=role.optim if isinstance(role, ActorConfig) else None,
            clip_grad=self.config.actor.grad_clip,
            sequence_parallel_size=ranks_per_sequence(role),
            max_length=longest_sequence(self.config.rollout),
            router_key=router_key(self.config) if isinstance(role, ActorConfig) else None,
        )
        return create_train_engine(role.strategy, spec, self.device)

    def _update_audit(self) -> UpdateAudit:
        actor = self.config.actor
        dtype = resolve_dtype(engine_settings(actor).dtype, self.device)
        return UpdateAudit(self.actor, dtype, self.device, actor.grad_clip)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rollout"))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        prompts = drop_marked(prompts)
        require(prompts, "raw_prompt_ids", "sampling_seed")
        validate, greedy = prompts.meta_info["validate"], prompts.meta_info["greedy"]
        sampling = sampling_params(self.config.rollout, validate=validate, greedy=greedy)
        requests = requests_of(prompts, sampling)
        return batch_of(requests, self._complete(requests), self.config.rollout, self.tokenizer.pad_token_id)

    def _complete(self, requests: list[GenerationRequest]) -> list[Completion]:
        with self._generating():
            return self.rollout.generate(requests)

    @contextmanager
    def _generating(self, *, stay_awake: bool = False) -> Iterator[None]:
        """The rollout has the weights and the memory it needs inside."""
        shares = self.is_actor and self.rollout.info.shares_weights
        weights = self.actor.lend_weights(self.generator) if shares else nullcontext()
        with weights:
            if shares:
                module = self.rollout.module if isinstance(self.rollout, ModuleEngine) else None
                self._audit.check_lent(module, self.rollout.policy_version)
            self.restore_weights()
            self.rollout.wake()
            with self.memory.phase("gen"):
                yield
            if self.config.rollout.free_cache_engine and not stay_awake:
                self.rollout.sleep()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def listen_for_stop(self, address: tuple[str, int]) -> None:
        """End the generation of a batch early when the controller calls (`StopLine`)."""
        step_stop.listen(address)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_generation(self) -> None:
        """Serve single requests until `end_generation`; no other method of this worker may be called in between."""
        with ExitStack() as serving:
            serving.enter_context(self._generating())
            serving.enter_context(self.rollout.serving())
            self._serving = serving.pop_all()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def advance_generation(
        self, new: list[tuple[int, GenerationRequest]], abort: list[int]
    ) -> list[tuple[int, Outcome]]:
        """Add and abort requests, then step until one finishes or `MAX_STEPS` have passed; returns those that ended.

        The ranks of a tensor-parallel group get the same arguments and take the same steps.
        """
        ended: dict[int, Outcome] = {}
        for request_id, request in new:
            try:
                check_request(request, self.rollout.max_model_len)
                self.rollout.add(request_id, request)
            except ValueError as error:
                ended[request_id] = error
        ended |= self.rollout.abort(abort)
        steps = 0
        while not ended and steps < MAX_STEPS and self.rollout.unfinished():
            ended |= self.rollout.step()
            steps += 1
        return list(ended.items())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restart_generation(self) -> None:
        """After `advance_generation` has raised: drop all requests, and serve others."""
        self._serving.close()
        self.begin_generation()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_generation(self) -> list[tuple[int, Completion]]:
        """End all requests; returns what each has so far."""
        ended = self.rollout.abort(self.rollout.unfinished())
        self._serving.close()
        return list(ended.items())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generate_canary(self) -> DataProto:
        """This rank's continuation of the canary text (see `weight_sync.proof`): one row per copy of the weights."""
        rollout = replace(self.config.rollout, calculate_log_probs=True)
        num_new = min(MAX_NEW, rollout.response_length)
        sampling = SamplingParams(temperature=self._temperature, max_tokens=num_new, ignore_eos=True)
        request = GenerationRequest(self._canary_prompt, sampling)
        # A rollout is next; an actor that is not on the device may need the memory for its part first.
        stay_awake = not (self.is_actor and engine_settings(self.config.actor).param_offload)
        with self._generating(stay_awake=stay_awake):
            completions = self.rollout.canaries(request)
        return batch_of([request] * len(completions), completions, rollout, self.tokenizer.pad_token_id)

    @cached_property
    def _canary_prompt(self) -> list[int]:
        words = set(range(self.tokenizer.vocab_size)) - set(self.tokenizer.all_special_ids)
        return self.rollout.prompt_like(canary_prompt(words, self.config.rollout))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def canary_log_probs(self, rows: DataProto) -> torch.Tensor:
        """Log-probs of the rows' responses under the actor; every rank computes all rows."""
        return self._log_probs(self.actor, self.config.rollout, rows)["log_probs"]

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"), blocking=False)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`old_log_probs` and `entropys` (and `sum_pi_squared`, if configured) under the current policy.

        With experts, as `actor.router_replay` says: `routed_experts` of R2, or `route_mismatch` to those of the rollout.
        """
        more: dict[str, Any] = {"with_entropy": True, "with_sum_pi_squared": self.config.actor.calculate_sum_pi_squared}
        if (mode := self.config.actor.router_replay.mode) == "R2":
            more["routes"] = "record"
        elif "routed_experts" in data.tensors:
            more["routes"] = "replay" if mode == "R3" else "compare"
        with self.memory.phase("old_log_prob"):
            out = self._log_probs(self.actor, self.config.rollout, data, **more)
        routes = out.pop("routed_experts", None)
        names = {"log_probs": "old_log_probs", "entropy": "entropys"}
        outputs = data.outputs({names.get(name, name): values for name, values in out.items()})
        if routes is not None:
            outputs.tensors["routed_experts"] = recorded_routes(routes, data)
        return outputs

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("ref"), blocking=False)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        with self.memory.phase("ref"), self.ref.adapters_off():
            self.ref.onload()
            rows = check_batch(self.tokenizer.vocab_size)
            findings = self._ref_audit.check(data.meta_info.get("audit", {}), rows, temperature=self._temperature)
            out = self._log_probs(self.ref, self.config.ref, data)
        outputs = data.outputs({"ref_log_prob": out["log_probs"]})
        if findings:
            outputs.meta_info["findings"] = findings
        return outputs

    def _log_probs(
        self, engine: TrainEngine, sizes: RolloutConfig | RefConfig, data: DataProto, **options: Any
    ) -> dict[str, torch.Tensor]:
        require(data, "input_ids", "attention_mask", "position_ids", "responses", "response_mask")
        micro = micro_batching(
            "old log-probs" if isinstance(sizes, RolloutConfig) else "reference log-probs",
            sizes.log_prob_micro_batch_size_per_gpu,
            sizes.log_prob_use_dynamic_bsz,
            sizes.log_prob_max_token_len_per_gpu,
        )
        if self.config.rollout.exact:
            options["exact"] = True
        engine.onload()
        out = engine.forward(with_images(data), micro, temperature=self._temperature, **options)
        engine.offload()
        return out

    @property
    def _temperature(self) -> float:
        """The temperature of the sampled distribution, which log-probs must be of; 1 for greedy rollouts."""
        return sampling_params(self.config.rollout, validate=False, greedy=False).temperature or 1.0

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"), blocking=False)
    def update_actor(self, data: DataProto) -> DataProto:
        """Train on a batch laid out by `trainer.ppo.mini_batches.lay_out`.

        meta_info `rollout_gap`: check | report | none, what becomes of the distance between the rollout's log-probs and those of
        the policy before its first step.
        """
        require(data, "input_ids", "responses", "response_mask", "advantages", "mini_batch")
        config, engine = self.config.actor, self.actor
        micro = micro_batching(
            "update actor",
            config.ppo_micro_batch_size_per_gpu,
            config.use_dynamic_bsz,
            config.ppo_max_token_len_per_gpu,
        )
        no_pass = "old_log_probs" not in data.tensors  # which would have reported the entropy
        with_entropy = config.entropy_coeff != 0 or config.calculate_entropy or no_pass
        options: dict[str, Any] = {"with_entropy": with_entropy, "entropy_gradient": config.entropy_coeff != 0}
        if config.router_aux_loss_coef:
            options["router_loss"] = True
        if self.config.rollout.exact:
            options["exact"] = True
        load = ExpertLoad() if config.router_aux_loss_coef else None
        has_routes = "routed_experts" in data.tensors
        gap = None if data.meta_info["rollout_gap"] == "none" else RolloutGap()
        distance: dict[str, float] = {}
        means = MetricMeans()
        options["temperature"] = self._temperature
        audit, levels = self._audit, data.meta_info.get("audit", {})
        engine.onload(optimizer=True, ahead=True)
        audit.begin(levels, num_mini_batches(data))
        check = self._split_check if audit.audits.checks("micro_batch_split") else None
        with self.memory.phase("update_actor"):
            for rows, info in mini_batches(data, config.loss_scale_factor):
                prepared = data.meta_info["prepared"]
                loss_fn = actor_loss_fn(config, info, prepared, gap, check, load)
                if has_routes:
                    replays = config.router_replay.mode != "disabled"
                    options["routes"] = "replay" if replays else "compare" if gap is not None else None
                replayed = {"routes": "replay"} if options.get("routes") == "replay" else {}
                # the loss is checked by `check`
                audit.check_split(rows, None, micro, temperature=self._temperature, **replayed)
                metrics = engine.forward_backward(rows, loss_fn, micro, **options)
                if load is not None:
                    load.keep()
                audit.check_loss(metrics, "actor/pg_loss")
                if gap is not None:
                    sums = engine.global_sum(*gap.sums())
                    distance = gap.metrics(sums)
                    if data.meta_info["rollout_gap"] == "check":
                        audit.problem("rollout_gap", self.gap_bound.problem(sums))
                    gap = None
                # later the loss can be clipped everywhere
                has_gradient = not len(means) and has_advantages(rows)
                metrics["actor/grad_norm"] = audit.optimizer_step(expects_gradient=has_gradient)
                means.add(metrics)
        metrics = means.result() | distance | {"actor/lr": engine.learning_rate} | self.memory.metrics()
        if self.is_rollout:
            metrics |= self.rollout.lowered_limits() | self.rollout.draft_metrics()
        if load is not None:
            metrics |= load.metrics(engine)
        if config.use_kl_loss:
            metrics["actor/kl_coef"] = config.kl_loss_coef
        self.has_trained = True
        engine.schedule_step()
        findings = audit.end()
        engine.offload()
        if self.is_rollout and self.rollout.info.shares_weights:
            self.rollout.policy_version += 1
        return DataProto(meta_info={"metrics": metrics, "findings": findings})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def limit_micro_batches(self, sizes: dict[str, int]) -> None:
        """Use at most these sizes from now on, by config key."""
        for limits in limits_of(*self._engines()):
            limits.set(sizes)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def lowered_micro_batches(self) -> list[tuple[str, int]]:
        """Config keys and sizes that out of memory has lowered since the last call, in order."""
        return [lowered for limits in limits_of(*self._engines()) for lowered in limits.take()]

    def _engines(self) -> list[TrainEngine | None]:
        return [getattr(self, "actor", None), getattr(self, "ref", None)]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str, global_step: int = 0) -> None:
        folder = checkpoint_folder(local_path)
        self.actor.onload(optimizer=True)
        self.actor.save(folder, self.config.actor.checkpoint.save_contents)
        if "hf_model" in self.config.actor.checkpoint.save_contents:
            self.actor.export(folder, self.tokenizer)
        self.actor.offload()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str, policy_version: int = 0) -> None:
        """policy_version: of the checkpoint's weights."""
        self.actor.onload(optimizer=True)
        self.actor.load(checkpoint_folder(local_path), self.config.actor.checkpoint.load_contents)
        self._audit.forget()
        self.has_trained = True
        self.actor.offload()
        if self.is_rollout and self.rollout.info.shares_weights:
            self.rollout.policy_version = policy_version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mark_rollout(self) -> None:
        """What is generated from here on may be discarded."""
        self.rollout.mark_state()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_rollout(self, local_path: str, marked: bool = False) -> None:
        """What the rollout engine keeps between steps, a file per rank. marked: as it was at the last `mark_rollout`."""
        state = self.rollout.saved_state(marked=marked)
        if state is not None:
            save_state(checkpoint_folder(local_path) / f"rank_{self.rank}", state, owner="the rollout engine")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_rollout(self, local_path: str) -> None:
        """Every rank gets what all ranks have saved: prompts may come to other ranks now."""
        # ranks that hold the model together load the same, so that they take the same steps
        first = self.rank - self.rank % self.config.rollout.tensor_model_parallel_size
        folder = checkpoint_folder(local_path)
        saved = sorted(int(file.stem.removeprefix("rank_")) for file in folder.glob("rank_*.json"))
        own = [rank for rank in saved if rank >= self.world_size] + [first] * (first in saved)
        others = [rank for rank in saved if rank not in own]
        self.rollout.load_states(*((load_state(folder / f"rank_{rank}") for rank in ranks) for ranks in (own, others)))


def router_key(config: ActorRolloutRefConfig) -> str | None:
    """The key that asks for the routers of the actor's experts, for messages; None if none does."""
    asked = {
        "actor.router_replay.mode": config.actor.router_replay.mode != "disabled",
        "actor.router_aux_loss_coef": config.actor.router_aux_loss_coef > 0,
        "rollout.enable_rollout_routing_replay": config.rollout.enable_rollout_routing_replay,
    }
    return next((f"actor_rollout_ref.{key}" for key, is_asked in asked.items() if is_asked), None)
