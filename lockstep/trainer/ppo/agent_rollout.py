"""Rollouts with agent loops: conversations run concurrently, in an event loop of the controller or in agent workers.

rows ─► hold, all rows at once: Agents (here) or AgentClient (agent workers) ─► RolloutClient ─► workers
     ◄─ one row per conversation: response_mask from its last trajectory, the earlier ones (see `forks`), counts and rewards of
        tools and turns as columns
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

from lockstep.agents.agents import Agents
from lockstep.agents.conversation import ConversationResult, Counts
from lockstep.protocol import DataProto, object_array
from lockstep.protocol.generation import Completion, GenerationRequest
from lockstep.protocol.images import IMAGES
from lockstep.trainer.ppo.forks import EARLIER
from lockstep.utils import event_loop
from lockstep.utils.audit import AuditError
from lockstep.utils.event_loop import all_of
from lockstep.workers.agent_client import AgentClient
from lockstep.workers.rollout_batch import group_key, requests_of, sampling_params, trajectory_tensors
from lockstep.workers.rollout_client import REPAIRABLE, RolloutClient

COUNT_COLUMNS = {
    "tool_calls": "tool_call_counts",
    "tool_errors": "tool_error_counts",
    "malformed_calls": "malformed_call_counts",
    "breaks": "trajectory_breaks",
    "program_errors": "program_error_counts",
    "environment_errors": "environment_error_counts",
}
"""Counts of a conversation, and their column in the batch."""
AGENT_COLUMNS = (
    *(
        "finish_reason",
        "__num_turns__",
        "messages",
        "tool_rewards",
        "turn_scores",
        "turn_rewards",
        "reward_scores",
        EARLIER,
    ),
    *COUNT_COLUMNS.values(),
)
"""Columns that a rollout with agents adds to its rows."""


def with_responses(rows: DataProto, responses: DataProto) -> DataProto:
    """The rows with what was generated for them; the images of a conversation replace those of its prompt."""
    if IMAGES in responses.non_tensor_batch:
        rows.non_tensor_batch.pop(IMAGES, None)
    return rows.union(responses)


class AgentRollout:
    """Takes the place of `rollout_wg`, the rollout's worker group.

    agents:     holds the conversations.
    batch_size: conversations of a step. If as many in a row fail without a turn of the policy, the run stops; so does a batch of
                fewer, such as one for validation, if no conversation before it had a turn.
    """

    def __init__(self, agents: Agents | AgentClient, rollout_wg: Any, pad_token_id: int, batch_size: int) -> None:
        self.agents = agents
        self.rollout_wg = rollout_wg
        self.pad_token_id = pad_token_id
        self.batch_size = batch_size
        self.client = RolloutClient(rollout_wg)
        self._failures: list[str] = []  # of the latest conversations, since one had a turn of the policy
        self._had_turns = False

    def separate(self) -> "AgentRollout":
        """Another one with its own client, for conversations that wait while this one generates a batch."""
        return AgentRollout(self.agents, self.rollout_wg, self.pad_token_id, self.batch_size)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One conversation per row of `prompts`; wakes the workers and lets them sleep afterwards."""
        return event_loop.run(lambda: self._generate(prompts))

    async def _generate(self, prompts: DataProto) -> DataProto:
        info = prompts.meta_info
        sampling = sampling_params(self.agents.config, validate=info["validate"], greedy=info["greedy"])
        requests = requests_of(prompts, sampling)
        async with self.running():
            conversations = await all_of([self.converse(prompts, row, r) for row, r in enumerate(requests)])
        if not self._had_turns:
            self._check_failures(len(conversations))
        return self.batch(conversations, prompts)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Conversations are held inside."""
        async with self.client.running(), self.agents.running():
            yield

    async def converse(self, rows: DataProto, number: int, request: GenerationRequest) -> ConversationResult:
        """The conversation of one row, while the client runs. request: for the first turn."""
        row = {name: values[number] for name, values in rows.non_tensor_batch.items()}

        failures: list[Exception] = []  # of the rollout: what was generated before is incomplete

        async def generate(turn: GenerationRequest) -> Completion:
            try:
                return await self.client.generate(turn, key=group_key(rows, number))
            except Exception as error:
                if error is self.client.failure or isinstance(error, REPAIRABLE):
                    failures.append(error)
                raise

        result = await self.agents.hold(row, request.prompt_ids, generate, request.sampling, request.seed)
        if failures:  # loops that contain failures end their conversation and return it
            raise failures[0]
        if result.failure and result.num_turns == 1:  # the prompt
            self._failures.append(result.failure)
            self._check_failures(self.batch_size)
        else:
            self._failures = []
            self._had_turns = True
        return result

    def _check_failures(self, most: int) -> None:
        """AuditError if the latest `most` conversations failed before the first turn of the policy."""
        if len(self._failures) >= most:
            raise AuditError(
                f"{most} conversations in a row failed before the first turn of the policy; the last one: {self._failures[-1]}"
            )

    def batch(self, conversations: Sequence[ConversationResult], rows: DataProto) -> DataProto:
        """What conversations add to their rows. One that left out the images of its row has None in their column."""
        trajectories = [conversation.trajectory for conversation in conversations]
        tensors = trajectory_tensors(trajectories, self.agents.config, self.pad_token_id)
        columns: dict[str, list[Any]] = {
            "finish_reason": [c.finish_reason for c in conversations],
            "__num_turns__": [c.num_turns for c in conversations],
            "messages": [c.new_messages for c in conversations],
            "tool_rewards": [c.tool_rewards for c in conversations],
            "turn_scores": [c.turn_scores for c in conversations],
            "turn_rewards": [c.turn_rewards for c in conversations],
            "reward_scores": [c.reward_scores for c in conversations],
            EARLIER: [[t.to_state() for t in c.trajectories[:-1] if any(t.response_mask)] for c in conversations],
        }
        if IMAGES in rows.non_tensor_batch or any(trajectory.images is not None for trajectory in trajectories):
            columns[IMAGES] = [trajectory.images for trajectory in trajectories]
        columns |= {COUNT_COLUMNS[f.name]: [getattr(c.counts, f.name) for c in conversations] for f in fields(Counts)}
        return DataProto.from_dict(
            tensors=tensors, non_tensors={name: object_array(values) for name, values in columns.items()}
        )
