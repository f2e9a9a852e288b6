"""The table of all batch keys: shape, dtype, writer, readers and meaning.

Shapes: B rows, P prompt length (left-padded), R response length (right-padded), T = P + R.

A worker method starts with `require(data, "responses", "advantages")`, so that a skipped stage is a clear error and not a
KeyError deep inside a loss.
"""

from dataclasses import dataclass

import numpy as np
import torch

from lockstep.protocol.data_proto import DataProto
from lockstep.registry import did_you_mean


@dataclass(frozen=True)
class BatchKey:
    """One column of the batch.

    name:       the key in `batch` (tensors) or in `non_tensor_batch` (dtype None).
    shape:      one letter per dimension, see the module docstring.
    dtype:      dtype of the tensor; None for a column of Python objects.
    written_by: the stage that adds the key, for error messages.
    read_by:    the stages that need it.
    meaning:    one line.
    """

    name: str
    shape: str
    dtype: torch.dtype | None
    written_by: str
    read_by: str
    meaning: str


_INT, _FLOAT = torch.int64, torch.float32

_TABLE = (
    BatchKey("prompts", "BP", _INT, "the rollout", "reward", "prompt tokens, left-padded"),
    BatchKey("responses", "BR", _INT, "the rollout", "reward, losses", "response tokens, right-padded"),
    BatchKey("input_ids", "BT", _INT, "the rollout", "every forward", "prompts and responses in one row"),
    BatchKey("attention_mask", "BT", _INT, "the rollout", "every forward", "1 = token, 0 = padding"),
    BatchKey(
        "position_ids", "BT", _INT, "the rollout", "every forward", "position of each token, 0 at the first real one"
    ),
    BatchKey(
        "response_mask",
        "BR",
        _INT,
        "the rollout or the agent loop",
        "all losses, advantages, metrics",
        "1 = the policy's own token, its EOS included; 0 = tool, user or padding",
    ),
    BatchKey("policy_version", "B", _INT, "the rollout", "audit", "`policy_versions` of the row's first token"),
    BatchKey(
        "policy_versions",
        "BR",
        _INT,
        "the rollout",
        "metrics of asynchronous training",
        "number of updates of the policy that sampled the token; -1 if none did",
    ),
    BatchKey("sampling_seed", "B", _INT, "the trainer", "rollout", "seed of the row's own random stream"),
    BatchKey(
        "rollout_log_probs", "BR", _FLOAT, "the rollout", "rollout correction, audit", "log-prob at sampling time"
    ),
    BatchKey("old_log_probs", "BR", _FLOAT, "the actor", "policy loss", "log-prob under the policy before the update"),
    BatchKey("entropys", "BR", _FLOAT, "the actor", "metrics", "entropy of the policy at each position"),
    BatchKey(
        "sum_pi_squared", "BR", _FLOAT, "the actor", "token baselines", "sum of squared probabilities at each position"
    ),
    BatchKey(
        "rollout_is_weights", "BR", _FLOAT, "the controller", "policy loss", "importance weight against the rollout"
    ),
    BatchKey("reward_baselines", "B", _FLOAT, "the trainer", "ReMax", "score of the prompt's greedy answer"),
    BatchKey("ref_log_prob", "BR", _FLOAT, "the reference policy", "KL", "log-prob under the frozen policy"),
    BatchKey("values", "BR", _FLOAT, "the critic", "GAE, value loss", "value estimate before each token"),
    BatchKey("rm_scores", "BR", _FLOAT, "the reward model", "reward", "its score, at the last token of the response"),
    BatchKey("token_level_scores", "BR", _FLOAT, "the reward", "KL penalty, metrics", "reward before the KL penalty"),
    BatchKey("token_level_rewards", "BR", _FLOAT, "the controller", "advantages", "reward after the KL penalty"),
    BatchKey("advantages", "BR", _FLOAT, "the controller", "policy loss", "advantage of each token"),
    BatchKey("returns", "BR", _FLOAT, "the controller", "value loss", "target of the value estimate"),
    BatchKey("mini_batch", "B", _INT, "the trainer's layout of an update", "updates", "mini-batch the row is in"),
    BatchKey(
        "conversation",
        "B",
        _INT,
        "the trainer",
        "advantages, mini-batches",
        "row of the conversation's last trajectory",
    ),
    BatchKey("uid", "B", None, "the trainer", "advantages by group", "one id per prompt, shared by its samples"),
    BatchKey("finish_reason", "B", None, "the rollout", "dumps", "stop, length, turns (a limit of agents) or abort"),
    BatchKey("index", "B", None, "the data", "metrics, filtering", "number of the row in its data set"),
    BatchKey("data_source", "B", None, "the data", "reward, validation", "name that selects the scorer"),
    BatchKey("reward_model", "B", None, "the data", "reward", '{"style", "ground_truth"}'),
    BatchKey("extra_info", "B", None, "the data", "reward, agents", "further fields of the data set"),
    BatchKey("raw_prompt", "B", None, "the data", "agents, validation", "the prompt as chat messages"),
    BatchKey("raw_prompt_ids", "B", None, "the data", "rollout", "the prompt as a list of token ids without padding"),
    BatchKey("agent_name", "B", None, "the data", "agents", "which agent loop answers the row"),
    BatchKey("tools_kwargs", "B", None, "the data", "agents", "arguments of the row's tools"),
    BatchKey("interaction_kwargs", "B", None, "the data", "agents", "arguments of the row's interaction"),
    BatchKey(
        "__num_turns__", "B", None, "agents", "reward, metrics", "turns of user and assistant, the prompt included"
    ),
    BatchKey("messages", "B", None, "agents", "reward", "the turns after the prompt"),
    BatchKey("tool_rewards", "B", None, "agents", "reward", "rewards of tool calls, in order"),
    BatchKey("turn_scores", "B", None, "agents", "reward", "scores of turns by the interaction, in order"),
    BatchKey(
        "earlier_trajectories", "B", None, "agents", "the trainer", "trajectories before the history was rewritten"
    ),
    BatchKey("turn_rewards", "B", None, "agents", "reward", "sum of tool_rewards and turn_scores of each turn"),
    BatchKey("reward_scores", "B", None, "agents", "reward", "reward of the conversation by each tool, by name"),
    BatchKey("is_padding", "B", None, "the dispatch", "losses", "True for rows added so that the batch divides evenly"),
)

BATCH_KEYS: dict[str, BatchKey] = {key.name: key for key in _TABLE}


def require(data: DataProto, *names: str) -> None:
    """Check that the batch has the named keys with the shape and dtype of the table.

    KeyError for a missing key, ValueError for a wrong dtype or shape. P, R and T must agree between the keys.
    """
    lengths: dict[str, tuple[int, str]] = {"B": (len(data), "the batch")}
    for name in names:
        if name not in BATCH_KEYS:
            raise KeyError(f"{name!r} is not a batch key. {did_you_mean(name, BATCH_KEYS)}")
        key = BATCH_KEYS[name]
        shape = _checked_shape(data, key)
        for letter, length in zip(key.shape, shape):
            known, owner = lengths.setdefault(letter, (length, repr(name)))
            if known != length:
                raise ValueError(f"batch key {name!r} has shape {shape}: {letter} is {length}, but {known} in {owner}")
    if {"P", "R", "T"} <= lengths.keys() and lengths["P"][0] + lengths["R"][0] != lengths["T"][0]:
        parts = ", ".join(f"{letter} = {lengths[letter][0]} in {lengths[letter][1]}" for letter in "PRT")
        raise ValueError(f"batch lengths do not add up to T = P + R: {parts}")


def _checked_shape(data: DataProto, key: BatchKey) -> tuple[int, ...]:
    column = _column(data, key)
    if column is None:
        raise KeyError(f"batch key {key.name!r} is missing: it is written by {key.written_by}")
    if key.dtype is not None and column.dtype != key.dtype:
        raise ValueError(f"batch key {key.name!r} is {column.dtype}, it must be {key.dtype}")
    shape = tuple(column.shape)
    if key.dtype is not None and len(shape) != len(key.shape):
        raise ValueError(f"batch key {key.name!r} has shape {shape}, it must be ({', '.join(key.shape)})")
    return shape


def _column(data: DataProto, key: BatchKey) -> torch.Tensor | np.ndarray | None:
    if key.dtype is None:
        return data.non_tensor_batch.get(key.name)
    return None if data.batch is None else data.batch.get(key.name, None)
