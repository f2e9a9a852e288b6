"""Every documented config block composes; every key of verl is known, with its default."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from lockstep.config.compat import NOT_SUPPORTED
from lockstep.config.compose import load_config
from lockstep.config.errors import ConfigError
from lockstep.config.normalize import normalize
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import build, get_in, keys, to_plain
from tests.config.documents import Block, blocks_of

HERE = Path(__file__).parent
ORIGINALS = os.environ.get("LOCKSTEP_SEEDS")


def documented_blocks() -> list[Block]:
    entries = yaml.safe_load((HERE / "documented_blocks.yaml").read_text())
    return [Block(entry["from"], entry.get("settings", {}), entry.get("overrides", [])) for entry in entries]


def original_blocks() -> list[Block]:
    """The same from the documents themselves, if their folder is given."""
    found = []
    for path in sorted(Path(ORIGINALS or "/nowhere").glob("*.txt")):
        found += list(blocks_of(path.read_bytes().decode("utf-8", "replace")))
    return found


BLOCKS = [*documented_blocks(), *original_blocks()]


def compose(block: Block, folder: Path, base: list[str], run_checks: bool) -> list[str]:
    """The problems with a block over `base`, as a user would see them."""
    (folder / "block.yaml").write_text(yaml.safe_dump(block.settings))
    try:
        overrides = [*base, *block.overrides]
        load_config(PPOConfig, overrides, config_name=str(folder / "block.yaml"), run_checks=run_checks)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def set_by(block: Block) -> set[str]:
    names = [override.lstrip("+").split("=")[0] for override in block.overrides]
    layers = [normalize(PPOConfig, tree) for tree in (block.settings, dict.fromkeys(names, "x"))]
    return {name for layer in layers for name in layer.values}


def test_there_are_as_many_blocks_as_the_documents_have() -> None:
    assert len(documented_blocks()) == 48
    if ORIGINALS:
        assert len(original_blocks()) == 48


@pytest.mark.parametrize("block", BLOCKS, ids=[block.place or "original" for block in BLOCKS])
def test_a_documented_block_composes(block: Block, files: dict[str, str], tmp_path: Path) -> None:
    assert all(NOT_SUPPORTED in problem for problem in compose(block, tmp_path, [], run_checks=False))
    already = set_by(block)
    rest = {  # the keys that a fragment lacks for a complete config
        "data.train_files": files["train"],
        "actor_rollout_ref.model.path": files["model"],
        "algorithm.adv_estimator": "grpo" if "critic.enable" in already else "gae",
        "data.train_batch_size": "64",
        "trainer.n_gpus_per_node": "8",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "16",
    }
    base = [f"{key}={value}" for key, value in rest.items() if key not in already]
    if "actor_rollout_ref.actor.ppo_max_token_len_per_gpu" not in already:
        base.append("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20000")
    for problem in compose(block, tmp_path, base, run_checks=True):
        assert any(text in problem for text in (NOT_SUPPORTED, ": no such f", "needs vLLM")), problem


def leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        full = f"{above}.{name}" if above else name
        if isinstance(value, Mapping) and value:
            yield from leaves(value, full)
        else:
            yield full, value


VERL = yaml.safe_load((HERE / "verl_defaults.yaml").read_text())
VERL_KEYS = dict(leaves(VERL))

AUTO_DTYPE = "auto takes bfloat16 on CUDA and float32 on CPU"
LOADABLE = "a checkpoint holds a folder that from_pretrained opens, which resuming does not read"
SIZED = "null fills micro-batches by tokens, unless their number of sequences is set"
PROFILED = "trainer.profile_steps alone profiles every role"
NO_MODEL = "there is no model or data to fall back on"

DIFFERS = {
    "actor_rollout_ref.rollout.name": "the embedded engine is there wherever training is",
    "actor_rollout_ref.rollout.mode": "sync is faster unless rewards are slow, and agents run in both",
    "actor_rollout_ref.rollout.agent.num_workers": "the controller holds thousands of conversations; workers are for slow tools",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "models of one GPU decode fastest on one",
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "auto broadcasts on GPUs",
    "actor_rollout_ref.rollout.calculate_log_probs": "they cost nothing here, and the audit compares them",
    "actor_rollout_ref.rollout.max_num_batched_tokens": "longer prefill steps: the host is slower than a GPU at 8192 tokens",
    "actor_rollout_ref.rollout.dtype": AUTO_DTYPE,
    "actor_rollout_ref.actor.fsdp_config.dtype": AUTO_DTYPE,
    "actor_rollout_ref.ref.fsdp_config.dtype": AUTO_DTYPE,
    "critic.model.fsdp_config.dtype": AUTO_DTYPE,
    "actor_rollout_ref.actor.checkpoint.save_contents": LOADABLE,
    "critic.checkpoint.save_contents": LOADABLE,
    "actor_rollout_ref.model.path": NO_MODEL,
    "critic.model.path": "the critic begins as the actor's model",
    "critic.model.tokenizer_path": "null is the actor's tokenizer",
    "critic.model.use_remove_padding": "packing changes no number and saves the padding's work",
    "reward_model.model.use_remove_padding": "packing changes no number and saves the padding's work",
    "reward_model.model.path": NO_MODEL,
    "reward_model.model.input_tokenizer": "null is the same tokenizer",
    "data.train_files": NO_MODEL,
    "data.val_files": NO_MODEL,
    "data.dataloader_num_workers": "prompts are short: processes cost more than they give",
    "trainer.project_name": "derived from the data",
    "trainer.experiment_name": "derived from model, data and algorithm",
    "trainer.default_local_dir": "it holds these names",
    "trainer.logger": "no account is assumed",
    "trainer.n_gpus_per_node": "a run without settings is one process",
    "trainer.device": "auto takes a GPU if there is one",
    "actor_rollout_ref.actor.use_dynamic_bsz": SIZED,
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": SIZED,
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": SIZED,
    "critic.use_dynamic_bsz": SIZED,
    "reward_model.use_dynamic_bsz": SIZED,
    "actor_rollout_ref.actor.profiler.enable": PROFILED,
    "actor_rollout_ref.ref.profiler.enable": PROFILED,
    "critic.profiler.enable": PROFILED,
    "reward_model.profiler.enable": PROFILED,
    "global_profiler.save_path": "a run writes into its own folder",
}
"""Defaults that differ from verl's, with the reason."""


def test_every_key_of_verl_is_known() -> None:
    assert len(VERL_KEYS) == 556
    unknown = [name for name, value in VERL_KEYS.items() if normalize(PPOConfig, {name: value}).problems]
    assert unknown == []


def test_defaults_are_those_of_verl() -> None:
    verl = OmegaConf.create(VERL)
    ours = to_plain(build(PPOConfig, {})[0])
    different = set()
    for name in keys(PPOConfig):
        if name in VERL_KEYS:
            value = None if VERL_KEYS[name] == "???" else OmegaConf.select(verl, name)
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            if value != get_in(ours, name, None):
                different.add(name)
    assert different == set(DIFFERS)


def test_whole_verl_configuration_reports_what_must_change(files: dict[str, str], tmp_path: Path) -> None:
    block = Block("verl", {**VERL, "defaults": ["_self_"]})
    paths = [
        f"data.train_files={files['train']}",
        f"data.val_files={files['val']}",
        f"actor_rollout_ref.model.path={files['model']}",
        f"critic.model.path={files['model']}",
        "actor_rollout_ref.rollout.name=embedded",
    ]
    assert compose(block, tmp_path, paths, run_checks=True) == []
    assert compose(block, tmp_path, [*paths, "trainer.n_gpus_per_node=1"], run_checks=True) == [
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2: does not divide the number of workers in global_pool (1); set a "
        "divisor"
    ]


def test_unsupported_key_of_verl_is_reported_if_used() -> None:
    num_reported = 0
    for name, value in VERL_KEYS.items():
        if str(value).endswith("profiler.tool_config,null}"):
            continue  # a section here, which verl's follows
        layer = normalize(PPOConfig, {name: "something else"})
        assert layer.problems == []
        if name not in layer.values and not layer.notices and not layer.no_effect and not name.endswith("_target_"):
            num_reported += sum(NOT_SUPPORTED in str(problem) for problem in layer.unsupported.values())
        assert all(problem is None for problem in normalize(PPOConfig, {name: value}).unsupported.values())
    assert num_reported > 40
