"""The demo program: files, the regular commands of SFT (warm-up) and RL, report.

Started again with the same options after it was stopped or killed, it continues in the same folder.
"""

import dataclasses
import fcntl
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from lockstep.demo.report import SUMMARY, show_report, write_summary
from lockstep.demo.tasks import SUMS, TASKS, Algorithm, DemoTask
from lockstep.demo.warmup import WarmUp, warm_up_settings
from lockstep.trainer import fsdp_sft_trainer, main_ppo
from lockstep.trainer.run.interrupt import stop_on_sigterm
from lockstep.utils.device import resolve_device
from lockstep.utils.files import atomic_write_json, make_private_folder

OPTIONS = "demo.json"
"""File with the demo's options; locked while the demo runs."""


def run_demo(
    task: str,
    algorithm: Algorithm,
    seed: int,
    out: Path | None,
    device: str,
    steps: int | None,
    warmup_steps: int | None,
    started: float,
) -> int:
    """Run the demo and return the exit code. started: `time.monotonic()` at the start."""
    console = Console(force_terminal=sys.stdout.isatty(), highlight=False)
    demo = TASKS[task]
    recipe = demo.recipe if warmup_steps is None else dataclasses.replace(demo.recipe, steps=warmup_steps)
    steps = demo.steps[algorithm] if steps is None else steps
    try:
        device = resolve_device(device)
        options = {
            "task": task,
            "algorithm": algorithm,
            "seed": seed,
            "device": device,
            "steps": steps,
            "warm_up": vars(recipe),
        }
        name = f"demo-{algorithm}-seed{seed}" if demo is SUMS else f"demo-{task}-{algorithm}-seed{seed}"
        folder, lock = demo_folder(out, Path("outputs") / name, options)
    except ValueError as error:
        sys.stderr.write(f"lockstep demo: {error}\n")
        return 2
    try:
        with lock, stop_on_sigterm():
            exit_code = _prepare(console, folder, demo, recipe, seed, device)
            model = warm_model(folder, recipe)
            return exit_code or _train(console, folder, demo, model, algorithm, steps, seed, device, started)
    except KeyboardInterrupt:
        console.print(f"\nStopped. Files so far: {folder}; the same command continues.", soft_wrap=True)
        return 130
    except OSError as error:
        sys.stderr.write(
            f"lockstep demo: {error.strerror or error}: {error.filename2 or error.filename or folder}; "
            "free some space or set another folder with --out\n"
        )
        return 1


def demo_folder(chosen: Path | None, default: Path, options: dict[str, Any]) -> tuple[Path, TextIO]:
    """The folder of the run and its lock: new, empty, or that of an unfinished demo with the same options.

    chosen:  the user's folder. Without one, the first that fits of default, default-2, ...
    """
    number = 1
    while True:
        folder = chosen or (default if number == 1 else default.with_name(f"{default.name}-{number}"))
        if not folder.exists() or (chosen is not None and folder.is_dir() and not any(folder.iterdir())):
            try:
                make_private_folder(folder)
                atomic_write_json(folder / OPTIONS, options)
            except OSError as error:
                raise ValueError(
                    f"--out {folder}: cannot write there ({error.strerror}); choose another folder"
                ) from error
        if (lock := _lock_unfinished(folder, options)) is not None:
            return folder, lock
        if chosen is not None:
            raise ValueError(
                f"--out {chosen} exists and is not an unfinished demo with these options; choose another folder or remove it"
            )
        number += 1


def _lock_unfinished(folder: Path, options: dict[str, Any]) -> TextIO | None:
    """The open and locked options file of an unfinished demo with these options that no other process runs, or None."""
    try:
        file = open(folder / OPTIONS)  # noqa: SIM115 - held until the demo ends
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if json.load(file) == options and not (folder / SUMMARY).exists():
            return file
        file.close()
    except (OSError, ValueError):
        pass
    return None


def warm_model(folder: Path, recipe: WarmUp) -> Path:
    """The model that the warm-up saves at its end."""
    return folder / "warmup" / f"global_step_{recipe.steps}" / "huggingface"


def _prepare(console: Console, folder: Path, demo: DemoTask, recipe: WarmUp, seed: int, device: str) -> int:
    """Write the problems and the reward function and warm up a model, unless an earlier process did; returns the exit code."""
    if warm_model(folder, recipe).exists():  # the checkpoint is renamed into place at the end
        console.print(f"Continuing the unfinished demo in {folder}", soft_wrap=True)
        return 0
    num_rows, description = demo.write(folder, recipe, seed)
    shutil.copyfile(str(demo.reward.__file__), folder / "reward.py")

    console.rule("1  Problems and model", align="left")
    console.print(description)
    console.rule(f"2  Warm-up: {recipe.steps} supervised steps on {device}", align="left")
    console.print(demo.warmup_note)
    settings = warm_up_settings(
        folder / "model", folder / "data" / "warmup.parquet", num_rows, folder / "warmup", recipe, seed, device
    )
    settings |= {"data.max_length": demo.max_length}
    exit_code = fsdp_sft_trainer.main(as_overrides(settings))
    if exit_code == 130:
        raise KeyboardInterrupt
    return exit_code


def _train(
    console: Console,
    folder: Path,
    demo: DemoTask,
    model: Path,
    algorithm: Algorithm,
    steps: int,
    seed: int,
    device: str,
    started: float,
) -> int:
    """Run the training command, then report."""
    console.rule(f"3  {algorithm.upper()}: {steps} steps of reinforcement learning on {device}", align="left")
    overrides = training_overrides(folder, model, folder, algorithm, steps, seed, device, demo)
    console.print("Equivalent command:", style="dim")
    console.print(command_line(overrides), style="dim", soft_wrap=True, markup=False)
    elsewhere = folder.with_name(f"{folder.name}-again")
    again = training_overrides(folder, model, elsewhere, algorithm, steps, seed, device, demo)
    (folder / "train_again.sh").write_text(command_line(again) + "\n")
    exit_code = main_ppo.main(overrides)
    if exit_code != 0:
        console.print("Training did not finish; start the demo again with the same options to continue.")
        return exit_code
    summary = write_summary(folder, started, demo)
    show_report(console, folder, summary, demo)
    return 0


def training_overrides(
    files: Path,
    model: Path,
    run_dir: Path,
    algorithm: Algorithm,
    steps: int,
    seed: int,
    device: str,
    demo: DemoTask = SUMS,
) -> list[str]:
    """The overrides of the training command. files: folder with problems and reward function."""
    settings: dict[str, object] = {
        "algorithm.adv_estimator": "gae" if algorithm == "ppo" else "grpo",
        "data.train_files": files / "data" / "train.parquet",
        "data.val_files": files / "data" / "val.parquet",
        "custom_reward_function.path": files / "reward.py",
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.enable_gradient_checkpointing": "false",
        "actor_rollout_ref.model.use_remove_padding": "false",
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.actor.optim.lr_warmup_steps": min(5, steps - 1),
        "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
        "actor_rollout_ref.actor.optim.min_lr_ratio": 0.1,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
        "actor_rollout_ref.actor.fsdp_config.dtype": "fp32",
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.rollout.max_num_seqs": 1024,
        "trainer.project_name": "demo",
        "trainer.experiment_name": algorithm,
        "trainer.total_training_steps": steps,
        "trainer.test_freq": 20,
        "trainer.save_freq": steps,
        "trainer.seed": seed,
        "trainer.device": device,
        "trainer.default_local_dir": run_dir,
        "trainer.validation_data_dir": run_dir / "validation",
        "trainer.rollout_data_dir": run_dir / "rollouts",
        "trainer.rollout_token_data": "true",
        **demo.settings(files),
    }
    if algorithm == "ppo":
        # With a critic, several samples per prompt add nothing over samples of other prompts.
        num_prompts = 8 * int(str(settings["data.train_batch_size"]))
        settings |= {
            "data.train_batch_size": num_prompts,
            "actor_rollout_ref.actor.ppo_mini_batch_size": num_prompts // 2,
            "actor_rollout_ref.rollout.n": 1,
            "critic.optim.lr": 1e-3,
            "critic.model.enable_gradient_checkpointing": "false",
            "critic.model.use_remove_padding": "false",
            "critic.model.fsdp_config.dtype": "fp32",
        }
    return as_overrides(settings)


def as_overrides(settings: dict[str, object]) -> list[str]:
    return [f"{key}={_hydra_value(value)}" for key, value in settings.items()]


def command_line(overrides: list[str]) -> str:
    """The training command for a shell."""
    return " \\\n  ".join(["lockstep ppo", *(shlex.quote(override) for override in overrides)])


def _hydra_value(value: object) -> str:
    """A value in Hydra's override grammar; quoted if it has special characters."""
    text = str(value)
    if not isinstance(value, Path) or re.fullmatch(r"[\w./+-]+", text):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
