"""Conversations whose history was rewritten: each of their trajectories is a training row.

    scored rows, one per conversation ─► add_rows: the earlier trajectories follow as rows ─► log-probs, values
                                      ─► joined: one row per conversation with the tokens of all its rows
                                      ─► KL penalty, rollout correction, advantages ─► split: back to the rows ─► update

Rewards, groups and mini-batches count conversations. A batch without rewritten histories passes unchanged.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lockstep.agents.trajectory import NOT_SAMPLED, Trajectory
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.protocol import DataProto, object_array
from lockstep.protocol.columns import tensors_of
from lockstep.protocol.images import IMAGES
from lockstep.protocol.keys import BATCH_KEYS
from lockstep.protocol.tokens import read, shape_of
from lockstep.workers.rollout_batch import trajectory_tensors

EARLIER = "earlier_trajectories"
"""Column of a rollout: the fields of each earlier trajectory of a row's conversation, first to last."""
OWNER = "conversation"
"""Row key: the row with the last trajectory of the same conversation, from which the reward comes. Those rows are first."""
COMPUTED = ("token_level_rewards", "response_mask", "rollout_is_weights", "advantages", "returns")
"""What is computed on joined rows."""


def newest_earlier(batch: DataProto) -> int:
    """The last policy version of the earlier trajectories, which may be newer than the last trajectory; NOT_SAMPLED without any."""
    trajectories = chain.from_iterable(batch.non_tensor_batch.get(EARLIER, ()))
    return max((max(fields["policy_versions"]) for fields in trajectories), default=NOT_SAMPLED)


def add_rows(batch: DataProto, config: RolloutConfig, pad_token_id: int) -> DataProto:
    """The scored rows of a step, followed by those of the earlier trajectories, whose scores are 0."""
    earlier = batch.non_tensor_batch.pop(EARLIER, ())
    owners = [row for row, trajectories in enumerate(earlier) for _ in trajectories]
    if not owners:
        return batch
    rows = batch.select_idxs(owners)
    trajectories = [Trajectory.from_state(fields) for of_row in earlier for fields in of_row]
    for name, values in trajectory_tensors(trajectories, config, pad_token_id).items():
        rows.tensors[name] = values
    if IMAGES in rows.non_tensor_batch:
        rows.non_tensor_batch[IMAGES] = object_array([trajectory.images for trajectory in trajectories])
    for name in {"token_level_scores", "rm_scores"} & set(rows.tensors.keys()):
        rows.tensors[name] = torch.zeros(shape_of(rows.tensors, name))
    both = DataProto.concat([batch, rows])
    both.tensors[OWNER] = torch.tensor([*range(len(batch)), *owners])
    return both


def conversations(batch: DataProto) -> DataProto:
    """One row per conversation, with its last trajectory."""
    if OWNER not in batch.tensors:
        return batch
    last = batch[: num_conversations(batch)]
    return last.select([name for name in tensors_of(last.batch) if name != OWNER])


def num_conversations(batch: DataProto) -> int:
    return int(batch.tensors[OWNER].max()) + 1 if OWNER in batch.tensors else len(batch)


def rows_of(batch: DataProto) -> list[list[int]]:
    """The rows of each conversation, in the order of their sampling."""
    if OWNER not in batch.tensors:
        return [[row] for row in range(len(batch))]
    num = num_conversations(batch)
    found: list[list[int]] = [[] for _ in range(num)]
    for row, owner in enumerate(batch.tensors[OWNER].tolist()):
        if row >= num:
            found[owner].append(row)
    return [[*earlier, last] for last, earlier in enumerate(found)]


def choose(batch: DataProto, numbers: Sequence[int]) -> DataProto:
    """All rows of these conversations; one that is listed twice becomes two conversations."""
    if OWNER not in batch.tensors:
        return batch.select_idxs(numbers)
    rows = rows_of(batch)
    earlier = [(owner, row) for owner, number in enumerate(numbers) for row in rows[number][:-1]]
    chosen = batch.select_idxs([*numbers, *(row for _, row in earlier)])
    chosen.tensors[OWNER] = torch.tensor([*range(len(numbers)), *(owner for owner, _ in earlier)])
    return chosen


def joined(batch: DataProto) -> DataProto:
    """One row per conversation, whose response has the tokens of all its rows, one after the other.

    So a sum over a response, a sequence's importance weight or the next token of the policy is that of the conversation.
    """
    if OWNER not in batch.tensors:
        return batch
    places = _places(batch)
    rows = conversations(batch)
    width = shape_of(batch.tensors, "responses")[1]
    tensors = {}
    for name, last in tensors_of(rows.batch).items():
        shape = BATCH_KEYS[name].shape if name in BATCH_KEYS else ""
        if shape.endswith(("R", "T")):
            tokens = _gathered(read(batch.tensors, name)[:, -width:], places)
            last = torch.cat([last[:, :-width], tokens], 1)
        tensors[name] = last
    return DataProto.from_dict(tensors=tensors, non_tensors=rows.non_tensor_batch, meta_info=rows.meta_info)


def split(batch: DataProto, rows: DataProto) -> DataProto:
    """The batch with what was computed on its `joined` rows."""
    if OWNER not in batch.tensors:
        return rows
    places = _places(batch)
    is_token = places >= 0
    for name in COMPUTED:
        if name in rows.tensors:
            values = read(rows.tensors, name)
            spread = torch.zeros(shape_of(batch.tensors, "responses"), dtype=values.dtype)
            spread.view(-1)[places[is_token]] = values[is_token]
            batch.tensors[name] = spread
    return batch


def _places(batch: DataProto) -> Tensor:
    """(conversations, tokens) each response token of a conversation, as its place in a flattened (B, R); -1 for padding.

    An empty response keeps its first place, where its score is.
    """
    width = shape_of(batch.tensors, "responses")[1]
    is_token = read(batch.tensors, "attention_mask")[:, -width:].bool()
    is_token[:, 0] |= ~is_token.any(1)
    of_row = [row * width + mask.nonzero().flatten() for row, mask in enumerate(is_token)]
    of_conversation = [torch.cat([of_row[row] for row in rows]) for rows in rows_of(batch)]
    return pad_sequence(of_conversation, batch_first=True, padding_value=-1)


def _gathered(values: Tensor, places: Tensor) -> Tensor:
    return values.flatten()[places.clamp_min(0)].masked_fill(places < 0, 0)
