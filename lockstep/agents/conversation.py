"""A conversation with the policy: what an agent loop reads and writes.

    turn = await conversation.generate()          the policy's turn
    conversation.add([{"role": "user", ...}])     the answer of the environment

Behind it is a trajectory that only grows. Loops never see token ids of context, so they cannot train on them by mistake.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, takewhile
from typing import Any, Literal

from lockstep.agents.renderer import Message, Renderer, TooLongError, texts_of
from lockstep.agents.tools.calls import CallResult
from lockstep.agents.trajectory import Trajectory
from lockstep.protocol.generation import Completion, GenerationRequest, SamplingParams
from lockstep.protocol.images import IMAGES
from lockstep.utils.untrusted import printable

Generate = Callable[[GenerationRequest], Awaitable[Completion]]
FinishReason = Literal["stop", "length", "turns", "abort"]
"""stop: the last turn ended by itself. length: no room is left. turns: a limit on turns. abort: generation was aborted."""


@dataclass(frozen=True)
class Turn:
    """One turn of the policy.

    text:  without the token that ended it.
    ended: whether it ended by itself; if not, no turn can follow.
    """

    text: str
    token_ids: list[int]
    ended: bool


@dataclass
class Counts:
    """What happened in a conversation; each is a metric."""

    tool_calls: int = 0
    """Calls of existing tools."""
    tool_errors: int = 0
    """Calls that raised, exceeded their deadline or returned no text; rewards of tools and interactions that failed."""
    malformed_calls: int = 0
    """Calls that could not be parsed, of unknown tools, or whose arguments are no JSON object."""
    breaks: int = 0
    """Turns before which the history was rewritten, so that a new training sample begins."""
    program_errors: int = 0
    """1 if the program that held the conversation failed, exceeded its deadline or made no request."""
    environment_errors: int = 0
    """1 if the environment raised, exceeded a deadline or returned something that is not text; it ends the conversation."""


@dataclass(frozen=True)
class ConversationResult:
    """What a conversation has when it ends, as `Conversation` describes it; can be sent to another process."""

    trajectories: list[Trajectory]
    new_messages: list[Message]
    num_turns: int
    counts: Counts
    tool_rewards: list[float]
    turn_scores: list[float]
    turn_rewards: list[float]
    reward_scores: dict[str, float]
    finish_reason: FinishReason
    failure: str | None = None

    @property
    def trajectory(self) -> Trajectory:
        return self.trajectories[-1]


class Conversation:
    """One sample of one row.

    complete, seed:  the policy, and the seed of its tokens; `generate` uses both.
    row:             the row's columns, such as `extra_info` and `tools_kwargs`.
    messages:        the conversation so far; assistant turns as text.
    tools:           the tools that the prompt was rendered with, as schemas.
    trajectories:    the training samples: one, and one more for each break.
    response_length: most tokens after the prompt, context included.
    failure:         why the program or environment that holds the conversation failed, if it did.
    follows_template: start a new sample if the chat template rewrites the history, instead of keeping it as it was sampled.
    """

    def __init__(
        self,
        row: Mapping[str, Any],
        prompt_ids: Sequence[int],
        *,
        complete: Generate,
        renderer: Renderer,
        sampling: SamplingParams,
        seed: int,
        response_length: int,
        tools: Sequence[Mapping[str, Any]] = (),
        follows_template: bool = False,
    ) -> None:
        self.row = row
        self.messages: list[Message] = list(row.get("raw_prompt") or [])
        self.tools = list(tools)
        self.trajectories = [Trajectory(list(prompt_ids), images=row.get(IMAGES))]
        self.renderer = renderer
        self.sampling = sampling
        self.response_length = response_length
        self.follows_template = follows_template
        self.num_assistant_turns = self.num_user_turns = 0
        self.counts = Counts()
        self.tool_rewards: list[float] = []
        self.turn_scores: list[float] = []
        self.reward_scores: dict[str, float] = {}
        self.finish_reason: FinishReason = "stop"
        self.failure: str | None = None
        self.complete = complete
        self.seed = seed
        self._num_prompt_messages = len(self.messages)
        self._turn_starts: list[tuple[int, int]] = []  # number of tool_rewards and turn_scores before each turn

    @property
    def trajectory(self) -> Trajectory:
        """The one that grows."""
        return self.trajectories[-1]

    @property
    def room(self) -> int:
        """Tokens left for the response."""
        return self.response_length - len(self.trajectory.response_ids)

    @property
    def new_messages(self) -> list[Message]:
        """The messages after the row's prompt."""
        return self.messages[self._num_prompt_messages :]

    @property
    def turn_rewards(self) -> list[float]:
        """For each turn of the last trajectory, a run of sampled tokens, the sum of the `tool_rewards` and `turn_scores` that
        followed it.

        Those of earlier trajectories are in its first turn; those of a conversation that was held elsewhere are in its last.
        """
        num_turns = sum(kind for kind, _ in groupby(self.trajectory.response_mask))
        ends = [*self._turn_starts[1:], (len(self.tool_rewards), len(self.turn_scores))]
        rewards = [
            sum(self.tool_rewards[tools:end_tools]) + sum(self.turn_scores[scores:end_scores])
            for (tools, scores), (end_tools, end_scores) in zip(self._turn_starts, ends)
        ]
        if not num_turns:
            return []
        if not rewards:
            return [0.0] * (num_turns - 1) + [sum(self.tool_rewards) + sum(self.turn_scores)]
        num_earlier = len(rewards) - num_turns
        return [sum(rewards[: num_earlier + 1]), *rewards[num_earlier + 1 :]]

    @property
    def result(self) -> ConversationResult:
        return ConversationResult(**{field.name: getattr(self, field.name) for field in fields(ConversationResult)})

    @property
    def num_turns(self) -> int:
        """Turns of user and assistant, the prompt included."""
        return 1 + self.num_assistant_turns + self.num_user_turns

    def set_messages(self, messages: Sequence[Message], num_prompt: int) -> None:
        """For a conversation that was held elsewhere. num_prompt: messages before the first turn of the policy."""
        self.messages = list(messages)
        self._num_prompt_messages = num_prompt

    def fail(self, holder: Literal["program", "environment"], why: str) -> None:
        """Count that its holder failed, and keep why."""
        self.counts.program_errors += holder == "program"
        self.counts.environment_errors += holder == "environment"
        self.failure = printable(why)  # it quotes what programs and environments wrote, and is logged

    def note_call(self, result: CallResult) -> None:
        """Count a tool call and keep its reward."""
        self.counts.malformed_calls += result.failed == "malformed"
        self.counts.tool_calls += result.failed != "malformed"
        self.counts.tool_errors += result.failed == "error"
        if result.reward is not None:
            self.tool_rewards.append(result.reward)

    def note_rewards(self, rewards: Mapping[str, float | None]) -> None:
        """Keep the rewards of tools by name; None is one that failed, which is counted."""
        self.reward_scores |= {name: reward for name, reward in rewards.items() if reward is not None}
        self.counts.tool_errors += sum(reward is None for reward in rewards.values())

    def drop_unanswered(self) -> None:
        """Remove a trajectory that began with the last `add` and has no turn."""
        is_new = len(self.trajectories) > 1 and self.messages[-1]["role"] != "assistant"
        if is_new and not any(self.trajectory.response_mask):
            self.trajectories.pop()

    def set_prompt(self, messages: Sequence[Message], max_prompt_length: int) -> bool:
        """Replace the prompt before the first turn; False if it leaves no room for one.

        Special tokens in new content are broken up. What exceeds `max_prompt_length` is context of the response. Messages that the
        row's prompt does not have are among `new_messages`, so that rewards see them.
        """
        if self.num_assistant_turns:
            raise ValueError("the prompt can be replaced before the first turn only")
        room = max_prompt_length + self.response_length
        try:
            messages = self.renderer.plain_messages(messages, max_tokens=room, trusted=texts_of(self.messages))
            if messages == self.messages:
                return True
            ids, images = self.renderer.ids_and_images(messages, self.tools, max_tokens=room)
        except TooLongError:
            return False
        if len(ids) >= room:
            return False
        self.trajectories = [Trajectory(ids[:max_prompt_length], images=images)]
        self.trajectory.add_context(ids[max_prompt_length:])
        same = takewhile(lambda pair: pair[0] == pair[1], zip(messages, self.messages))
        self.set_messages(messages, num_prompt=len(list(same)))
        return True

    async def generate(self, stop_token_ids: Sequence[int] = ()) -> Turn:
        """Let the policy write a turn, at most until the response is full. stop_token_ids: further ends of a turn."""
        if self.room < 1:
            raise ValueError("the response is full: check `room`, or the result of `add`, before the next turn")
        sampling = replace(
            self.sampling,
            max_tokens=min(self.sampling.max_tokens, self.room),
            stop_token_ids=(*self.sampling.stop_token_ids, *stop_token_ids),
        )
        # A token depends on its request's seed and its position, and positions of one trajectory never come again.
        seed = (self.seed + len(self.trajectories) - 1) % 2**63
        completion = await self.complete(GenerationRequest(self.trajectory.ids, sampling, seed, self.trajectory.images))
        if completion.token_ids and not any(self.trajectory.response_mask[-1:]):  # else it continues the turn before
            self._turn_starts.append((len(self.tool_rewards), len(self.turn_scores)))
        self.trajectory.add_sampled(completion)
        self.num_assistant_turns += 1
        ended = completion.stop_reason == "stop"
        if not ended:
            self.finish_reason = "abort" if completion.stop_reason == "abort" else "length"
        has_end = ended and completion.token_ids[-1] in self.renderer.stop_ids
        text_ids = completion.token_ids[:-1] if has_end else completion.token_ids
        text: str = self.renderer.tokenizer.decode(text_ids, skip_special_tokens=False)
        self.messages.append({"role": "assistant", "content": text})
        return Turn(text, completion.token_ids, ended)

    def add(self, messages: Sequence[Message]) -> bool:
        """Append tool or user messages; False if the last turn did not end or they leave no room for another turn.

        Special tokens in their content are broken up.
        """
        if not self.trajectory.response_ids or self.messages[-1]["role"] != "assistant":
            raise ValueError("messages can be added after a turn of the policy only")
        last_id = self.trajectory.response_ids[-1]
        if self.finish_reason != "stop":
            return False
        try:
            self._append(messages, last_id)
        except TooLongError:
            self.finish_reason = "length"
            return False
        self.num_user_turns += 1
        return True

    def _append(self, messages: Sequence[Message], last_id: int) -> None:
        """TooLongError if they leave no room for another turn."""
        new = self.renderer.plain_messages(messages, max_tokens=self.response_length)
        if self.follows_template and self.renderer.is_rewritten(self.messages, new, self.tools):
            num_prompt = len(self.trajectory.prompt_ids)
            most = num_prompt + self.response_length
            ids, images = self.renderer.ids_and_images([*self.messages, *new], self.tools, max_tokens=most)
            if len(ids) >= most:
                raise TooLongError
            self.trajectories.append(Trajectory(ids[:num_prompt], images=images))
            self.trajectory.add_context(ids[num_prompt:])
            self.counts.breaks += 1
        else:
            bridge = self.renderer.bridge(self.messages, new, last_id, self.tools, max_tokens=self.room)
            if bridge is None:
                raise ValueError(f"the chat template cannot render messages of the role {new[0]['role']} after a turn")
            if len(bridge.ids) >= self.room:
                raise TooLongError
            self.trajectory.add_context(bridge.ids, bridge.images)
        self.messages += new
