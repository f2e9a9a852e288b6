"""Conversations that others hold through a session with its recorder: outside programs and graphs."""

from lockstep.agents.conversation import Conversation
from lockstep.agents.endpoint.answers import AnswerSettings
from lockstep.agents.endpoint.recorder import SessionRecorder, trajectories_of
from lockstep.config.actor_rollout_ref import RolloutConfig


def answer_settings(conversation: Conversation, rollout: RolloutConfig, *, force_sampling: bool) -> AnswerSettings:
    """Answers as the conversation would sample them."""
    return AnswerSettings(
        sampling=conversation.sampling,
        max_model_len=rollout.prompt_length + rollout.response_length,
        max_response_len=rollout.response_length,
        tool_format=rollout.multi_turn.format,
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
