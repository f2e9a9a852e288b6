"""What is kept of a replayed step, in the order in which the step computes it.

    generation ─► rewards ─► old log-probs ─► reference log-probs ─► values ─► advantages
        ─► per update: loss ─► gradient, of the critic, then of the actor ─► weights

The columns of the batch are kept whole; gradients and weights as the norm and the fingerprint of each tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.utils.state_file import load_state, save_state

FILE = "recording"
"""In the folder of a replay, for `utils/state_file.py`."""

STAGES: dict[str, tuple[str, ...]] = {
    "data": ("prompts", "input_ids", "attention_mask", "position_ids"),
    "generation": ("responses", "response_mask", "rollout_log_probs", "routed_experts"),
    "rewards": ("rm_scores", "token_level_scores", "reward_baselines"),
    "old log-probs": ("old_log_probs", "entropys", "sum_pi_squared"),
    "reference log-probs": ("ref_log_prob", "reference"),
    "values": ("values",),
    "advantages": ("token_level_rewards", "rollout_is_weights", "advantages", "returns"),
}
"""Stage -> the columns that it adds, in the order of the step. Derived ones of a batch of rollouts are not kept."""


@dataclass(frozen=True)
class Digest:
    """A tensor that is not kept. fingerprint: changes with any bit of it."""

    norm: float
    fingerprint: int


@dataclass(frozen=True)
class Update:
    """One optimizer step of a model on one rank.

    losses:    of each micro-batch: its share of the loss.
    outputs:   the policy's log-probs or the critic's values at response tokens, of all micro-batches.
    gradients: parameter -> its gradient before clipping. Empty if the engine does not show it.
    """

    losses: list[float]
    outputs: Tensor
    gradients: dict[str, Digest]


@dataclass(frozen=True)
class ModelRecord:
    """A model's updates on one rank, and its trained weights after them, as they are sharded."""

    updates: list[Update]
    weights: dict[str, Digest]


@dataclass(frozen=True)
class Recording:
    """A step.

    columns:        of the batch, padded.
    texts:          of the responses; empty in supervised training.
    models:         "critic", "actor" or "model" -> the record of each rank.
    findings:       audit -> message.
    rollout_rounds: whether the rollout's log-probs depend on timing in their last bits: conversations, and drafts from history.
    """

    step: int
    columns: dict[str, Tensor]
    texts: list[str] = field(default_factory=list)
    models: dict[str, list[ModelRecord]] = field(default_factory=dict)
    findings: dict[str, str] = field(default_factory=dict)
    rollout_rounds: bool = False


@dataclass(frozen=True)
class Item:
    """One thing that a step computes. stage: the one it belongs to. name: in words."""

    stage: str
    name: str
    value: Tensor | list[float] | dict[str, Digest]


def items(recording: Recording) -> Iterator[Item]:
    """Everything in a recording, in the order of the step."""
    for stage, columns in STAGES.items():
        for name in columns:
            if name in recording.columns:
                yield Item(stage, name, recording.columns[name])
    for model, ranks in recording.models.items():
        of_rank = [f"{model}, rank {rank}" if len(ranks) > 1 else model for rank in range(len(ranks))]
        for number in range(max((len(rank.updates) for rank in ranks), default=0)):
            named = [(of, rank.updates[number]) for of, rank in zip(of_rank, ranks) if number < len(rank.updates)]
            which = f", update {number + 1}" if len(ranks[0].updates) > 1 else ""
            for of, update in named:
                yield Item("loss", f"outputs of the {of}{which}", update.outputs)
            for of, update in named:
                yield Item("loss", f"loss of the {of}{which}", update.losses)
            for of, update in named:
                yield Item("gradient", f"gradient of the {of}{which}", update.gradients)
    for model, ranks in recording.models.items():
        for number, rank in enumerate(ranks):
            of = f"{model}, rank {number}" if len(ranks) > 1 else model
            yield Item("weights", f"weights of the {of}", rank.weights)


def write_recording(folder: Path, recording: Recording) -> None:
    models = {
        model: [
            {"updates": [_plain_update(update) for update in rank.updates], "weights": _plain(rank.weights)}
            for rank in ranks
        ]
        for model, ranks in recording.models.items()
    }
    save_state(folder / FILE, vars(recording) | {"models": models}, owner="the replay")


def read_recording(folder: Path) -> Recording:
    state: dict[str, Any] = load_state(folder / FILE)
    models = {
        model: [
            ModelRecord(
                [Update(u["losses"], u["outputs"], _digests(u["gradients"])) for u in rank["updates"]],
                _digests(rank["weights"]),
            )
            for rank in ranks
        ]
        for model, ranks in state["models"].items()
    }
    return Recording(**(state | {"models": models}))


def _plain_update(update: Update) -> dict[str, Any]:
    return {"losses": update.losses, "outputs": update.outputs, "gradients": _plain(update.gradients)}


def _plain(digests: dict[str, Digest]) -> dict[str, list[float]]:
    return {name: [digest.norm, digest.fingerprint] for name, digest in digests.items()}


def _digests(plain: dict[str, list[Any]]) -> dict[str, Digest]:
    return {name: Digest(*pair) for name, pair in plain.items()}
