"""Conversations that others hold through a session with its recorder: outside programs and graphs."""

import asyncio
import time
from collections.abc import Awaitable
from contextlib import ExitStack
from typing import TypeVar

from lockstep.agents.conversation import Conversation, Generate
from lockstep.agents.endpoint.answers import AnswerSettings
from lockstep.agents.endpoint.recorder import SessionRecorder, trajectories_of
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.protocol.generation import Completion, GenerationRequest
from lockstep.utils.event_loop import cancelled
from lockstep.utils.progress import WaitKind, waiting

T = TypeVar("T")

CHECK_EVERY_S = 0.1
"""How often a deadline is checked that the policy has moved."""


class OutOfTimeError(TimeoutError):
    """A conversation exceeded its deadline; others are time-outs of the program or graph itself."""


class OwnTime:
    """Measures the time in which nobody waits for the policy, which may be busy or, during asynchronous training, paused."""

    def __init__(self, sample: Generate) -> None:
        self._policy = sample
        self._holder: tuple[WaitKind, str] | None = None
        self._wait = ExitStack()  # entered while the holder, not the policy, is at work
        self._began = time.monotonic()
        self._waited_s = 0.0  # for the policy, until no request was open
        self._num_open = 0
        self._open_since = 0.0

    async def sample(self, request: GenerationRequest) -> Completion:
        """A turn of the policy."""
        if not self._num_open:
            self._open_since = time.monotonic()
            self._wait.close()
        self._num_open += 1
        try:
            return await self._policy(request)
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._waited_s += time.monotonic() - self._open_since
                self._wait_for_holder()

    def _wait_for_holder(self) -> None:
        if self._holder is not None:
            self._wait.enter_context(waiting(*self._holder))

    @property
    def seconds(self) -> float:
        now = time.monotonic()
        return now - self._began - self._waited_s - (now - self._open_since if self._num_open else 0.0)

    async def limit(self, call: Awaitable[T], timeout_s: float, kind: WaitKind, name: str) -> T:
        """The result of `call`; OutOfTimeError, and the call is cancelled, after `timeout_s` of own time.

        kind, name: what holds the conversation.
        """
        task = asyncio.ensure_future(call)
        self._holder = kind, name
        self._wait_for_holder()
        try:
            while not task.done():
                if (left_s := timeout_s - self.seconds) <= 0:
                    raise OutOfTimeError
                await asyncio.wait([task], timeout=max(left_s, CHECK_EVERY_S))
            return task.result()
        finally:
            await cancelled([task])
            self._holder = None
            self._wait.close()


def answer_settings(conversation: Conversation, rollout: RolloutConfig, *, force_sampling: bool) -> AnswerSettings:
    """Answers as the conversation would sample them, and as many."""
    multi_turn = rollout.multi_turn
    limits = [multi_turn.max_assistant_turns, multi_turn.max_user_turns and multi_turn.max_user_turns + 1]
    return AnswerSettings(
        sampling=conversation.sampling,
        max_model_len=rollout.prompt_length + rollout.response_length,
        max_response_len=rollout.response_length,
        max_turns=min(filter(None, limits), default=None),
        tool_format=multi_turn.format,
        force_sampling=force_sampling,
        seed=conversation.seed,
    )


def take_branches(conversation: Conversation, recorder: SessionRecorder, max_prompt: int) -> None:
    """The recorded branches as trajectories. The longest is the conversation; answers that nobody waited for are left out of the
    others.

    max_prompt: tokens that a prompt has room for in the batch; the rest of a longer one is context of the response.
    """
    leaves = recorder.leaves()
    if not leaves:
        conversation.finish_reason = "abort"
        return
    leaf = max(leaves, key=lambda turn: len(turn.all_ids))
    path = leaf.path
    others = [turn for turn in leaves if turn is not leaf and turn.completion.stop_reason != "abort"]
    last, *earlier = trajectories_of([leaf, *others], max_prompt=max_prompt)
    conversation.trajectories = [*earlier, last]
    conversation.counts.breaks += len(leaves) - 1
    conversation.set_messages(leaf.messages, num_prompt=len(path[0].messages) - 1)
    conversation.num_assistant_turns, conversation.num_user_turns = len(path), len(path) - 1
    conversation.finish_reason = leaf.completion.stop_reason
