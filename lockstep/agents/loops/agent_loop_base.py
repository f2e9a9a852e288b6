"""verl's interface of agent loops: a loop that handles token ids itself and returns them with a mask.

    class MyLoop(AgentLoopBase):
        async def run(self, sampling_params, **kwargs) -> AgentLoopOutput:
            output = await self.server_manager.generate(request_id=…, prompt_ids=ids, sampling_params=sampling_params)

What it returns is compared with what was sampled: a token with mask 1 that the policy did not sample at that place stops the run.
New loops derive from `AgentLoop`, which cannot get this wrong.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from types import SimpleNamespace
from typing import Any

from lockstep.agents.conversation import Conversation
from lockstep.agents.loops.agent_loop import AgentLoop, Setup
from lockstep.agents.trajectory import NOT_SAMPLED, Trajectory
from lockstep.data.image_prompts import image_values
from lockstep.protocol.generation import Completion, GenerationRequest, SamplingParams, first_routes
from lockstep.protocol.images import ImageInputs

ROLLOUT = "actor_rollout_ref.rollout"


@dataclass
class AgentLoopMetrics:
    """Accepted as `metrics` of an output, and not logged: generation and tools are timed by the run itself."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    num_preempted: int = -1


@dataclass
class AgentLoopOutput:
    """One trajectory.

    response_mask:     1 for tokens that the policy sampled.
    response_logprobs: not read; those of the sampling are used.
    reward_score:      the reward function finds it in `extra_info["rollout_reward_scores"]`.
    num_turns:         of user and assistant, the prompt included.
    messages:          the whole conversation, for dumps and rewards; None: the row's prompt and the turns that were sampled.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: Any = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: Any = None
    extra_fields: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class TokenOutput:
    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str
    num_preempted: int = 0
    routed_experts: None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class ServerManager:
    """Answers the requests of one conversation, and keeps them."""

    def __init__(self, conversation: Conversation, max_len: int) -> None:
        self.conversation = conversation
        self.max_len = max_len
        self.calls: list[tuple[list[int], Completion]] = []
        self._numbers = count()

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
    ) -> TokenOutput:
        if image_data or video_data:
            raise ValueError(
                "server_manager.generate: image_data and video_data are not supported; images are those of the messages that "
                "apply_chat_template got"
            )
        ids = list(prompt_ids)
        if len(ids) >= self.max_len:
            raise ValueError(
                f"server_manager.generate: prompt_ids has {len(ids)} tokens, which leaves no room for an answer in "
                f"{self.max_len} (data.max_prompt_length + data.max_response_length)"
            )
        sampling = _sampling_of(sampling_params, self.conversation.sampling, self.max_len - len(ids))
        seed = (self.conversation.seed + next(self._numbers)) % 2**63
        images = self.conversation.trajectory.images
        completion = await self.conversation.complete(GenerationRequest(ids, sampling, seed, images))
        self.calls.append((ids, completion))
        reason = "aborted" if completion.stop_reason == "abort" else "completed"
        return TokenOutput(completion.token_ids, completion.log_probs, reason, completion.num_preempted)


class AgentLoopBase(AgentLoop):
    """One object per conversation.

    config: has `actor_rollout_ref.rollout` and `data.apply_chat_template_kwargs`.
    kwargs: other keys of the loop's entry in `rollout.agent.agent_loop_config_path`.
    """

    def __init__(
        self,
        trainer_config: Any,
        server_manager: ServerManager,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        dataset_config: Any = None,
        **kwargs: Any,
    ) -> None:
        self.config = trainer_config.config
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.loop = asyncio.get_running_loop()

    @classmethod
    def create(cls, setup: Setup, **options: Any) -> AgentLoop:
        return _OnTokens(cls, setup, options)

    async def apply_chat_template(
        self,
        messages: list[Any],
        tools: list[Any] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """The prompt's tokens. Images in the messages become those of the conversation.

        remove_system_prompt: without what the template puts before the first message.
        """
        if images or videos:
            raise ValueError("apply_chat_template: images must be parts of the messages, videos are not supported")
        conversation = self.server_manager.conversation
        if conversation.renderer.encoder is not None and image_values(messages):
            if remove_system_prompt:
                raise ValueError("apply_chat_template: remove_system_prompt=True takes no images; render all messages")
            ids, conversation.trajectory.images = conversation.renderer.ids_and_images(messages, tools)
            return ids

        def tokens(messages: list[Any], **more: Any) -> list[int]:
            more |= self.config.data.apply_chat_template_kwargs
            return list(self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **more))

        ids = tokens(messages, tools=tools, add_generation_prompt=True)
        return ids[len(tokens([{}], add_generation_prompt=False)) :] if remove_system_prompt else ids

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:  # type: ignore[override]
        """Hold one conversation. kwargs: the row's columns."""
        raise NotImplementedError(f"{type(self).__name__} must define `run`")


class _OnTokens(AgentLoop):
    """Runs a loop on token ids, and checks what it returns."""

    def __init__(self, cls: type[AgentLoopBase], setup: Setup, options: dict[str, Any]) -> None:
        super().__init__(setup)
        self.cls, self.options = cls, options
        self.config = SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(rollout=setup.rollout),
            data=SimpleNamespace(apply_chat_template_kwargs=setup.renderer.template_kwargs),
        )

    async def run(self, conversation: Conversation) -> None:
        rollout = self.setup.rollout
        row = conversation.row
        server = ServerManager(conversation, rollout.prompt_length + rollout.response_length)
        loop = self.cls(
            trainer_config=SimpleNamespace(config=self.config),
            server_manager=server,
            tokenizer=self.setup.renderer.tokenizer,
            processor=None,
            dataset_cls=None,
            dataset_config=None,
            **self.options,
        )
        try:
            output = await loop.run(_params_of(conversation.sampling), **row)
            conversation.trajectories = [self._checked(output, server.calls, conversation.trajectory.images)]
        except ValueError as error:
            number = (row.get("extra_info") or {}).get("index", row.get("index"))
            raise ValueError(f"agent loop {self.cls.__name__}, row {number}: {error}") from error
        self._keep_messages(conversation, output, server.calls)
        num_turns = len(server.calls)
        conversation.num_assistant_turns = num_turns
        conversation.num_user_turns = max(0, (output.num_turns or 2 * num_turns) - 1 - num_turns)
        conversation.finish_reason = server.calls[-1][1].stop_reason if server.calls else "abort"
        if output.reward_score is not None:
            conversation.reward_scores["reward_score"] = float(output.reward_score)

    def _keep_messages(
        self, conversation: Conversation, output: AgentLoopOutput, calls: Sequence[tuple[list[int], Completion]]
    ) -> None:
        prompt = list(conversation.row.get("raw_prompt") or [])
        messages = output.messages
        if messages is None:
            decode = self.setup.renderer.tokenizer.decode
            texts = [decode(completion.token_ids, skip_special_tokens=True) for _, completion in calls]
            messages = [*prompt, *({"role": "assistant", "content": text} for text in texts)]
        same = takewhile(lambda pair: pair[0] == pair[1], zip(messages, prompt))
        conversation.set_messages(messages, num_prompt=len(list(same)))

    def _checked(
        self, output: AgentLoopOutput, calls: Sequence[tuple[list[int], Completion]], images: ImageInputs | None
    ) -> Trajectory:
        """The output as a trajectory; ValueError if it does not fit the batch, or has a mask 1 for tokens of others.

        images: those of the row's prompt.
        """
        rollout = self.setup.rollout
        ids = list(output.response_ids)
        mask = list(output.response_mask)
        prompt = list(output.prompt_ids)
        for name, found, most in (
            ("prompt_ids", len(prompt), rollout.prompt_length),
            ("response_ids", len(ids), rollout.response_length),
        ):
            if found > most:
                raise ValueError(f"{name} has {found} tokens, but {ROLLOUT}.{name.removesuffix('_ids')}_length={most}")
        if len(mask) != len(ids):
            raise ValueError(f"response_mask has {len(mask)} entries for {len(ids)} response_ids")
        if output.multi_modal_data or output.extra_fields:
            raise ValueError("multi_modal_data and extra_fields are not supported; leave them empty")
        sampled: dict[int, tuple[float, int]] = {}  # place in the response to log-prob and policy version
        routes = None
        for context, completion in calls:
            start = len(context) - len(prompt)
            if start < 0 or (prompt + ids)[: len(context)] != context:
                continue
            same = takewhile(lambda pair: pair[0] == pair[1], zip(completion.token_ids, ids[start:]))
            for place, log_prob, version, _ in zip(
                range(start, len(ids)), completion.log_probs, completion.policy_versions, same
            ):
                sampled[place] = log_prob, version
            is_whole = ids[start : start + len(completion.token_ids)] == completion.token_ids
            routes = first_routes(routes, completion.routes if is_whole else None)
        wrong = [place for place, is_own in enumerate(mask) if is_own and place not in sampled]
        if wrong:
            raise ValueError(
                f"response_mask is 1 for token {ids[wrong[0]]} at place {wrong[0]} of the response, which the policy did not "
                "sample there: keep the ids that `generate` returned, after the prompt_ids that it was given"
            )
        own = [sampled[place] if is_own else (0.0, NOT_SAMPLED) for place, is_own in enumerate(mask)]
        log_probs, versions = [p for p, _ in own], [v for _, v in own]
        return Trajectory(prompt, ids, [int(bool(m)) for m in mask], log_probs, versions, routes, images)


def _params_of(sampling: SamplingParams) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "repetition_penalty": 1.0,
        "logprobs": True,
    }


def _sampling_of(asked: Mapping[str, Any], sampling: SamplingParams, room: int) -> SamplingParams:
    """The rollout's sampling, with the length and stop tokens that were asked for; ValueError for another distribution."""
    lengths = [asked[name] for name in ("max_tokens", "max_new_tokens") if asked.get(name) is not None]
    own = _params_of(sampling) | {"min_p": sampling.min_p}
    for name, value in asked.items():
        if name in ("max_tokens", "max_new_tokens", "stop_token_ids", "logprobs"):
            continue
        if name not in own or value != own[name]:
            hint = f"set {ROLLOUT}.{name}" if name in own else "remove it"
            raise ValueError(f"sampling_params {name}={value!r}: the loss needs the rollout's own distribution; {hint}")
    return replace(
        sampling,
        max_tokens=min([sampling.max_tokens, room, *lengths]),
        stop_token_ids=(*sampling.stop_token_ids, *(asked.get("stop_token_ids") or ())),
    )
