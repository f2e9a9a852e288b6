"""The table of all batch keys: shape, dtype, writer, readers, meaning, and how a batch of rollouts stores the column.

Shapes, padded: B rows, P prompt length (left-padded), R response length (right-padded), T = P + R; S positions of a row without its
padding, L layers with experts, K experts per token. A batch of rollouts stores no padding (`protocol/ragged.py`):

    B          the tensor
    BP, BR     the entries at tokens, of all rows, and the rows' lengths; of an empty response one entry, for its score.
               A column with other values at padding is stored padded, unless it is in MASKED
    BT         nothing: derived from prompts and responses
    BSLK       the entries at the positions of a row's tokens, prompt and response, and the rows' lengths; padded on the right

Other columns, whatever their shape, are stored as they are added: as a tensor, or as `Ragged`.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BatchKey:
    """One column of the batch.

    name:       the key in `batch` (tensors) or in `non_tensor_batch` (dtype None).
    shape:      one letter per dimension, see the module docstring.
    dtype:      dtype of the tensor; None for a column of Python objects.
    written_by: the stage that adds the key, for error messages.
    read_by:    the stages that need it.
    meaning:    one line.
    stored:     dtype of the values of a batch without padding; None: `dtype`.
    fill:       what a padded row is filled up with; prompts and responses with the token for padding.
    """

    name: str
    shape: str
    dtype: torch.dtype | None
    written_by: str
    read_by: str
    meaning: str
    stored: torch.dtype | None = None
    fill: float = 0


_INT, _FLOAT = torch.int64, torch.float32
_EXPERT = torch.int16
_IDS, _BOOL = torch.int32, torch.bool

_TABLE = (
    BatchKey("prompts", "BP", _INT, "the rollout", "reward", "prompt tokens, left-padded", _IDS),
    BatchKey("responses", "BR", _INT, "the rollout", "reward, losses", "response tokens, right-padded", _IDS),
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
        _BOOL,
    ),
    BatchKey("policy_version", "B", _INT, "the rollout", "audit", "`policy_versions` of the row's first token"),
    BatchKey(
        "policy_versions",
        "BR",
        _INT,
        "the rollout",
        "metrics of asynchronous training",
        "number of updates of the policy that sampled the token; -1 if none did",
        _IDS,
        fill=-1,
    ),
    BatchKey("sampling_seed", "B", _INT, "the trainer", "rollout", "seed of the row's own random stream"),
    BatchKey(
        "rollout_log_probs", "BR", _FLOAT, "the rollout", "rollout correction, audit", "log-prob at sampling time"
    ),
    BatchKey(
        "routed_experts",
        "BSLK",
        _EXPERT,
        "the rollout or the actor",
        "the actor's forward",
        "experts of each token by position and layer, -1 = the router decides; stored in int8 if there are at most 128",
        fill=-1,
    ),
    BatchKey(
        "route_mismatch",
        "BR",
        _FLOAT,
        "the actor",
        "metrics",
        "share of layers whose router would choose other experts",
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
    BatchKey(
        "multi_modal_inputs", "B", None, "the data", "rollout, every forward", "`ImageInputs` of the row, or None"
    ),
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

MASKED = {
    *("rollout_log_probs", "old_log_probs", "ref_log_prob", "entropys", "sum_pi_squared"),
    *("rollout_is_weights", "values", "advantages", "returns", "route_mismatch"),
}
"""Columns that all readers mask by `response_mask`: what they have at padding is not kept."""
SOURCES = ("prompts", "responses")
"""What the derived columns are derived from."""
DERIVED = tuple(key.name for key in _TABLE if key.shape == "BT")
