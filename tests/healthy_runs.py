"""Healthy runs of every algorithm, engine and mode with all audits at `stop`: none may find anything.

    python -m tests.healthy_runs              all of them, one after another
    python -m tests.healthy_runs grpo sft     some

Each trains a tiny model for some steps, stops, and resumes, so that audits see both. Exit code 1 if one found something.
"""

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path

import pandas as pd

from lockstep.config.audit import AuditConfig, SupervisedAuditConfig
from lockstep.trainer import fsdp_sft_trainer, main_dpo, main_ppo, main_rm
from tests.models.architectures import save_tiny_model as save_tiny_architecture
from tests.tiny import save_tiny_model, save_tiny_moe, small_run, tiny_tokenizer, write_rows
from tests.tiny_vision import save_tiny_vision_model, tiny_image

ALGORITHM, ACTOR, ROLLOUT = "algorithm", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GROUPS = (f"{ALGORITHM}.adv_estimator=grpo", f"{ROLLOUT}.n=4")
SPLIT = ("trainer.controller=local", "trainer.placement=split", "trainer.n_gpus_per_node=2")
PROGRAMS = {
    "ppo": main_ppo.main,
    "sft": fsdp_sft_trainer.main,
    "rm": main_rm.main,
    "dpo": main_dpo.main,
}
STEPS, STEPS_BEFORE_RESUME = 6, 3
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(ord(c) % 7 for c in solution_str) % 11 / 10
"""
LOOP = """
from lockstep.agents.loops import AgentLoop

class ThreeTurns(AgentLoop):
    '''A tool and a user answer turns of up to 24 tokens, which any of some letters ends.'''

    async def run(self, conversation):
        for role in ("tool", "user", None):
            turn = await conversation.generate(stop_token_ids=range(3, 259, 9))
            if role is None or not turn.ended:
                return
            message = {"role": role, "content": f"it is {len(turn.text)}"}
            if role == "tool":
                message |= {"name": "length", "tool_call_id": "call00000"}
            if not conversation.add([message]):
                return
"""
SAMPLER = """
import random
from lockstep.data.sampler import AbstractSampler

class Weighted(AbstractSampler):
    '''Rows with replacement.'''
    replacement = True

    def __iter__(self):
        return iter(random.Random(3).choices(range(len(self.data_source)), k=len(self)))

    def __len__(self):
        return 24
"""


@dataclass(frozen=True)
class Run:
    """One healthy run. needs: an optional package."""

    overrides: tuple[str, ...]
    program: str = "ppo"
    needs: str | None = None


RUNS = {
    "ppo": Run((f"{ALGORITHM}.adv_estimator=gae", f"{ACTOR}.ppo_epochs=2")),
    "grpo": Run((*GROUPS, f"{ACTOR}.use_kl_loss=true")),
    "rloo": Run((*GROUPS, f"{ALGORITHM}.adv_estimator=rloo", f"{ALGORITHM}.use_kl_in_reward=true")),
    "remax": Run((f"{ALGORITHM}.adv_estimator=remax",)),
    "reinforce++": Run((f"{ALGORITHM}.adv_estimator=reinforce_plus_plus",)),
    "gspo": Run((*GROUPS, f"{ACTOR}.policy_loss.loss_mode=gspo")),
    "dapo": Run(
        (
            *GROUPS,
            f"{ALGORITHM}.filter_groups.enable=true",
            f"{ACTOR}.clip_ratio_high=0.28",
            f"{ACTOR}.loss_agg_mode=token-mean",
            "reward_model.reward_manager=dapo",
        )
    ),
    "single_update": Run((*GROUPS, f"{ACTOR}.ppo_mini_batch_size=4")),
    "long_responses": Run((*GROUPS, "data.max_response_length=150", f"{ACTOR}.ppo_mini_batch_size=4")),
    "correction": Run((*GROUPS, f"{ALGORITHM}.rollout_correction.rollout_is=token")),
    "lora": Run((*GROUPS, "actor_rollout_ref.model.lora_rank=4", f"{ACTOR}.use_kl_loss=true")),
    "mixture_of_experts": Run((*GROUPS, "actor_rollout_ref.model.path={files}/moe", f"{ACTOR}.router_replay.mode=R3")),
    "agents": Run(
        (*GROUPS, f"{ROLLOUT}.agent.default_agent_loop={{files}}/loop.py:ThreeTurns", "data.max_response_length=150")
    ),
    "agent_workers": Run(
        (
            *GROUPS,
            f"{ROLLOUT}.agent.default_agent_loop={{files}}/loop.py:ThreeTurns",
            f"{ROLLOUT}.agent.num_workers=1",
            "data.max_response_length=150",
        )
    ),
    "requests": Run((*GROUPS, f"{ROLLOUT}.mode=async", f"{ROLLOUT}.over_sample_rate=0.5")),
    "scored_while_generating": Run((*GROUPS, f"{ROLLOUT}.mode=async", "reward_model.reward_kwargs.num_workers=2")),
    "colocated": Run((*GROUPS, "trainer.async_mode=colocated")),
    "one_step_off": Run((*GROUPS, "trainer.async_mode=one_step_off", *SPLIT)),
    "fully_async": Run((*GROUPS, "trainer.async_mode=fully_async", *SPLIT, f"{ALGORITHM}.filter_groups.enable=true")),
    "exact": Run((*GROUPS, f"{ROLLOUT}.exact=true", f"{ACTOR}.use_kl_loss=true")),
    "history_drafts": Run((*GROUPS, f"{ROLLOUT}.history_drafts.enable=true", f"{ROLLOUT}.temperature=0.1")),
    "fp8_weights": Run((*GROUPS, f"{ROLLOUT}.quantization=fp8")),
    "fp8_cache": Run((*GROUPS, f"{ROLLOUT}.kv_cache_dtype=fp8")),
    "hybrid_model": Run((*GROUPS, "actor_rollout_ref.model.path={files}/hybrid", f"{ROLLOUT}.max_num_seqs=5")),
    "hybrid_agents": Run(
        (
            *GROUPS,
            "actor_rollout_ref.model.path={files}/hybrid",
            f"{ROLLOUT}.agent.default_agent_loop={{files}}/loop.py:ThreeTurns",
            "data.max_response_length=150",
        )
    ),
    "latents": Run((*GROUPS, "actor_rollout_ref.model.path={files}/latents")),
    "images": Run(
        (
            *GROUPS,
            "actor_rollout_ref.model.path={files}/vision",
            "data.train_files={files}/images.parquet",
            "data.val_files={files}/images.parquet",
            "data.max_prompt_length=200",
            "actor_rollout_ref.model.freeze_vision_tower=true",
        )
    ),
    "hf_engine": Run((*GROUPS, f"{ROLLOUT}.name=hf")),
    "sampler": Run((*GROUPS, "data.sampler.class_path={files}/sampler.py", "data.sampler.class_name=Weighted")),
    "ray": Run((*GROUPS, "trainer.n_gpus_per_node=2"), needs="ray"),
    "split": Run((*GROUPS, *SPLIT[1:], f"{ACTOR}.use_kl_loss=true"), needs="ray"),
    "deepspeed": Run((*GROUPS, f"{ACTOR}.strategy=deepspeed"), needs="deepspeed"),
    "megatron": Run((*GROUPS, f"{ACTOR}.strategy=megatron"), needs="megatron.core"),
    "sft": Run((), "sft"),
    "rm": Run((), "rm"),
    "dpo": Run((), "dpo"),
}


def write_files(folder: Path) -> None:
    """Models and data of all runs."""
    save_tiny_model(folder / "model")
    save_tiny_moe(folder / "moe")
    for name, kind in (("hybrid", "qwen3_5_text"), ("latents", "deepseek_v3")):
        save_tiny_architecture(kind, folder / name, vocab_size=259, max_position_embeddings=256)
        tiny_tokenizer().save_pretrained(folder / name)
    save_tiny_vision_model(folder / "vision")
    write_rows(folder / "train.parquet", 16)
    write_rows(folder / "val.parquet", 4)
    write_image_rows(folder / "images.parquet")
    for name, text in (("reward", REWARD), ("loop", LOOP), ("sampler", SAMPLER)):
        (folder / f"{name}.py").write_text(text)
    rows = [{"prompt": f"{i % 9}+{i % 4}=", "chosen": str(i % 9 + i % 4), "rejected": f"{7 * i} so"} for i in range(20)]
    turns = [("user", "prompt"), ("assistant", "chosen")]
    talks = [{"messages": [{"role": role, "content": row[key]} for role, key in turns]} for row in rows]
    for name, data in (("pairs", rows), ("talks", talks)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))


def write_image_rows(path: Path) -> None:
    """Prompts with one image, with two, and without."""
    rows = []
    for i in range(12):
        pictures = [BytesIO() for _ in range(i % 3)]
        for number, picture in enumerate(pictures):
            tiny_image(32 + 16 * (i % 2), seed=2 * i + number).save(picture, format="PNG")
        rows.append(
            {
                "data_source": "test",
                "prompt": [{"role": "user", "content": "<image>" * len(pictures) + f"Count {i}."}],
                "images": [{"bytes": picture.getvalue()} for picture in pictures],
                "reward_model": {"style": "rule", "ground_truth": str(i)},
            }
        )
    pd.DataFrame(rows).to_parquet(path)


def command_of(name: str, files: Path, folder: Path, levels: str = "stop") -> list[str]:
    run = RUNS[name]
    config = AuditConfig if run.program == "ppo" else SupervisedAuditConfig
    command = [f"trainer.audit.{audit.name}={levels}" for audit in fields(config)]
    if run.program == "ppo":
        command += [*small_run(files), "trainer.val_before_train=false", "data.max_response_length=24"]
    else:
        data = files / ("talks.jsonl" if run.program == "sft" else "pairs.jsonl")
        command += [
            f"model.path={files}/model",
            f"data.train_files={data}",
            "data.train_batch_size=5",
            "data.max_length=64",
        ]
        command += ["optim.lr=1e-3", "trainer.logger=console"]
    command += ["trainer.total_epochs=4", f"trainer.default_local_dir={folder}"]
    return [*command, *(override.format(files=files) for override in run.overrides)]


def run_one(name: str, files: Path, folder: Path) -> str | None:
    """Train, stop and resume; what went wrong, None if nothing did."""
    command = command_of(name, files, folder)
    for steps in (STEPS_BEFORE_RESUME, STEPS):
        try:
            code = PROGRAMS[RUNS[name].program](
                [*command, f"trainer.total_training_steps={steps}", "trainer.save_freq=3"]
            )
        except SystemExit as error:
            code = error.code
        if code:
            return f"exit code {code} before step {steps}"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    fired = sorted({key for line in lines for key in line if key.startswith("audit/")})
    if fired or (folder / "audits").exists():
        return f"fired: {', '.join(fired)}"
    return None if lines[-1]["step"] == STEPS else f"ended at step {lines[-1]['step']}"


def main(arguments: Sequence[str]) -> int:
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        files = Path(temporary) / "files"
        files.mkdir()
        write_files(files)
        for name in arguments or RUNS:
            if (needs := RUNS[name].needs) and importlib.util.find_spec(needs.partition(".")[0]) is None:
                sys.stdout.write(f"{name}: skipped, {needs} is not installed\n")
                continue
            began = time.monotonic()
            problem = run_one(name, files, Path(temporary) / name)
            sys.stdout.write(f"{name}: {problem or 'silent'} ({time.monotonic() - began:.0f} s)\n")
            sys.stdout.flush()
            failed += [name] if problem else []
    sys.stdout.write(
        f"{len(failed)} of {len(arguments or RUNS)} runs failed{': ' if failed else ''}{', '.join(failed)}\n"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
