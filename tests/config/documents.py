"""Settings in documents: YAML, command lines and shell assignments, with or without fences."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

VARIABLES = {
    "nnodes": ["trainer.nnodes"],
    "n_gpus_per_node": ["trainer.n_gpus_per_node"],
    "model_path": ["actor_rollout_ref.model.path"],
    "infer_tp": ["actor_rollout_ref.rollout.tensor_model_parallel_size"],
    "train_sp": ["actor_rollout_ref.actor.ulysses_sequence_parallel_size"],
    "offload": [
        "actor_rollout_ref.actor.fsdp_config.param_offload",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    ],
    "adv_estimator": ["algorithm.adv_estimator"],
    "use_kl_in_reward": ["algorithm.use_kl_in_reward"],
    "use_kl_loss": ["actor_rollout_ref.actor.use_kl_loss"],
    "clip_ratio_low": ["actor_rollout_ref.actor.clip_ratio_low"],
    "clip_ratio_high": ["actor_rollout_ref.actor.clip_ratio_high"],
    "train_files": ["data.train_files"],
    "test_files": ["data.val_files"],
    "train_batch_size": ["data.train_batch_size"],
    "ppo_mini_batch_size": ["actor_rollout_ref.actor.ppo_mini_batch_size"],
    "n_resp_per_prompt": ["actor_rollout_ref.rollout.n"],
    "n_resp_per_prompt_val": ["actor_rollout_ref.rollout.val_kwargs.n"],
    "max_prompt_length": ["data.max_prompt_length"],
    "max_response_length": ["data.max_response_length"],
}
"""Shell variables of training scripts to the keys they set."""


@dataclass
class Block:
    """The settings of one place in a document.

    settings:  nested, as in a YAML file.
    overrides: as on a command line.
    """

    place: str
    settings: dict[str, Any] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)


def blocks_of(document: str) -> Iterator[Block]:
    """Every block of settings in a document, in order."""
    text = re.sub(r"[^\x20-\x7e\n]", "", document)
    place = ""
    for part in re.split(r"(^```\w*\n.*?^```$)", text, flags=re.S | re.M):
        fence = re.match(r"```(\w*)\n(.*)```", part, flags=re.S)
        headings = re.findall(r"^#+ (.*)$", part, flags=re.M) if fence is None else []
        if fence is None:
            for section in re.split(r"^(?=#+ )", part, flags=re.M):
                heading = re.match(r"#+ (.*)", section)
                yield from _loose_blocks(section, heading.group(1).strip() if heading else place, {})
        elif fence.group(1) == "yaml":
            yield from _yaml_blocks(fence.group(2), place)
        elif fence.group(1) == "bash":
            yield from _shell_blocks(fence.group(2), place)
        place = headings[-1].strip() if headings else place


def _yaml_blocks(text: str, place: str) -> Iterator[Block]:
    text = re.sub(r"^\s*\.\.\.$", "", text, flags=re.M).replace("{...}", "{}")
    documents: list[str] = [""]
    for entry in re.split(r"^(?=[\w.]+:)", text, flags=re.M):
        name = entry.split(":", 1)[0]
        if re.search(rf"^{re.escape(name)}:", documents[-1], flags=re.M):
            documents.append("")  # the same key again: another example in the same fence
        documents[-1] += entry
    for document in documents:
        settings = yaml.safe_load(document)
        if settings:
            yield Block(place, settings)


def _shell_blocks(text: str, place: str) -> Iterator[Block]:
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if "main_ppo" in line:
            yield Block(place, overrides=[word for word in shlex.split(line) if "=" in word])
    yield from _loose_blocks(text, place, VARIABLES)


def _loose_blocks(text: str, place: str, variables: Mapping[str, list[str]]) -> Iterator[Block]:
    """Lines `key=value` and `key:` with an indented body, wherever they stand."""
    assignments = re.findall(r"^([a-z_]+(?:\.[a-z_]+)*)=(\S.*)$", text, flags=re.M)
    overrides = [
        f"{key}={shlex.split(value, comments=True)[0]}"
        for name, value in assignments
        for key in ([name] if "." in name else variables.get(name, []))
    ]
    if overrides:
        yield Block(place, overrides=overrides)
    for entry in re.findall(r"^\w+:\n(?:  .*\n)+", text, flags=re.M):
        yield Block(place, yaml.safe_load(entry))
