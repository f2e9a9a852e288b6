"""What the controller of a large run does in a GRPO step, with stand-in workers: its share of the step, bytes and seconds.

    python benchmarks/simulated_cluster.py [--ranks 8 64 1024 --prompts 512 --samples 16 --response 16384 --mean-response 6000]
                                           [--shape 32b --device H200 --json out.json] [key=value ...]

    PPOTrainer._train_step ─► worker groups ─► bytes ─► stand-in workers: no model, their time is that of `lockstep plan`

Trainer, batches, dispatch, scoring, advantages, mini-batches and metrics are the real ones. An argument or output of a worker is
serialised as for Ray's object store, once for all ranks that get it, and read from these bytes on the other side. What stand-ins
take is not counted. A call costs `--call-us` more (measured with Ray by `--measure-calls`), and bytes go over one network link of
`--network` Gbit/s.

step          seconds of the plan and of the controller; generation lasts at least as long as the longest response decodes alone
controller    its own work, calls and transfers; share: of the step
form          joining outputs, balancing, advantages, checks, metrics and mini-batches; serialise: both directions
score         texts of the responses and a trivial reward function, which run on all `--cores` of the controller's machine

Times are processor seconds of one core.
"""

import argparse
import json
import pickle
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import SHAPES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import with_values
from lockstep.config.train_engines import ranks_per_row
from lockstep.plan.batch_units import Lengths
from lockstep.plan.estimate import plan_of
from lockstep.plan.hardware import DEVICES
from lockstep.protocol import BATCH_KEYS, DataProto, Ragged, object_array
from lockstep.rewards.managers.naive import NaiveRewardManager
from lockstep.single_controller import (
    ClassWithInitArgs,
    LocalWorkerGroup,
    ResourcePoolManager,
    Role,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from lockstep.single_controller.dispatch import Dispatch, Execute
from lockstep.single_controller.futures import Future, FutureList
from lockstep.single_controller.ray_backend.serialize import pack, unpack
from lockstep.trainer.ppo.ray_trainer import PPOTrainer
from lockstep.trainer.ppo.worker_groups import WorkerGroups

POLICY = "actor_rollout_ref"
LAYOUT = (
    f"{POLICY}.rollout.tensor_model_parallel_size=4",
    f"{POLICY}.actor.ulysses_sequence_parallel_size=4",
    f"{POLICY}.actor.use_dynamic_bsz=true",
    f"{POLICY}.actor.ppo_max_token_len_per_gpu=8192",
)
"""Fits from 8 GPUs on."""
CALL_US = 750.0
"""Of one call on one worker: submission, its reply and the garbage collection of both, by `--measure-calls` on two cores."""


@dataclass
class Account:
    """What went through the controller.

    workers_s:    seconds in which this process was a worker, by method.
    serialise_s:  of these arguments and outputs.
    """

    workers_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    serialise_s: float = 0.0
    calls: int = 0
    sent: int = 0
    received: int = 0

    @contextmanager
    def working(self, method: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.workers_s[method] += time.process_time() - began


ACCOUNT = Account()


@dataclass(frozen=True)
class Message:
    """A value in the form of Ray's object store: pickled, and the bytes of its columns."""

    pickled: bytes
    buffers: list[bytes]

    @classmethod
    def of(cls, value: Any) -> "Message":
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(pack(value), protocol=5, buffer_callback=buffers.append)
        return cls(pickled, [buffer.raw().tobytes() for buffer in buffers])

    @property
    def size(self) -> int:
        return len(self.pickled) + sum(map(len, self.buffers))

    def read(self, *, writable: bool) -> Any:
        return unpack(pickle.loads(self.pickled, buffers=self.buffers), writable)


class Received(Future):
    """An output that the controller reads when it asks for it."""

    def __init__(self, message: Message) -> None:
        self.message = message

    def get(self) -> Any:
        began = time.process_time()
        value = self.message.read(writable=False)
        ACCOUNT.serialise_s += time.process_time() - began
        ACCOUNT.received += self.message.size
        return value


class SimulatedGroup(LocalWorkerGroup):
    """Stand-in workers in this process, which get and return bytes; a value for several ranks is serialised once."""

    def _execute(
        self,
        method_name: str,
        execute_mode: Execute,
        shares: Sequence[Sequence[Any]],
        named_shares: dict[str, Sequence[Any]],
    ) -> FutureList:
        sent = [_sent(share) for share in shares]
        named = {name: _sent(share) for name, share in named_shares.items()}
        return super()._execute(method_name, execute_mode, sent, named)

    def _submit(self, rank: int, method_name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        ACCOUNT.calls += 1
        with ACCOUNT.working(method_name.removeprefix(self._method_prefix)):
            values = [message.read(writable=True) for message in args]
            named = {name: message.read(writable=True) for name, message in kwargs.items()}
            output = super()._submit(rank, method_name, values, named).get()
            return Received(Message.of(output))


def _sent(share: Sequence[Any]) -> list[Message]:
    began = time.process_time()
    messages = {key: Message.of(value) for key, value in {id(value): value for value in share}.items()}
    ACCOUNT.serialise_s += time.process_time() - began
    ACCOUNT.sent += sum(message.size for message in messages.values())
    return [messages[id(value)] for value in share]


class StandIn(Worker):
    """Answers with rows of `ROLLOUTS` and with random numbers."""

    rollouts: DataProto
    """All rows of a step, in the order of their prompts."""

    def __init__(self, config: Any, role: str, device: str) -> None:
        super().__init__()
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        engine, trained = self.config.rollout.tensor_model_parallel_size, ranks_per_row(self.config.actor)
        for mesh, size in (("rollout", engine), ("actor", trained), ("ref", trained)):
            self._register_dispatch_collect_info(mesh, self.rank // size, self.rank % size == 0)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rollout"))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        first = self._meshes["rollout"][0] * len(prompts)
        return self.rollouts[first : first + len(prompts)]

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"), blocking=False)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        return _random_outputs(data, "old_log_probs", "entropys")

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("ref"), blocking=False)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        return _random_outputs(data, "ref_log_prob")

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"), blocking=False)
    def update_actor(self, data: DataProto) -> DataProto:
        assert len(data.meta_info["mini_batches"]) == int(data.tensors["mini_batch"].max()) + 1
        return DataProto(meta_info={"metrics": {"actor/pg_loss": 0.0, "actor/grad_norm": 1.0}})


def _random_outputs(data: DataProto, *names: str) -> DataProto:
    responses = data.batch.pack().stored("responses")
    values = (torch.full((int(responses.lengths.sum()),), -1.0) for _ in names)
    columns = (Ragged(each, responses.lengths, responses.width, 0.0, torch.float32) for each in values)
    return DataProto.from_dict(dict(zip(names, columns)))


def rollouts_of(args: argparse.Namespace, prompts: list[list[int]]) -> DataProto:
    """The rows that rollout workers return, with log-normal response lengths."""
    rng = np.random.default_rng(0)
    num_rows = len(prompts) * args.samples
    lengths = rng.lognormal(np.log(args.mean_response) - 0.32, 0.8, num_rows).clip(1, args.response).astype(np.int64)
    num_tokens = int(lengths.sum())
    rows = [prompt for prompt in prompts for _ in range(args.samples)]
    values = {
        "responses": rng.integers(0, args.vocabulary, num_tokens, dtype=np.int32),
        "response_mask": np.ones(num_tokens, bool),
        "policy_versions": np.zeros(num_tokens, np.int32),
        "rollout_log_probs": np.full(num_tokens, -1.0, np.float32),
    }
    tensors: dict[str, Any] = {"policy_version": torch.zeros(num_rows, dtype=torch.int64)}
    tensors["prompts"] = Ragged.of_rows(rows, args.prompt, 0, torch.int64, torch.int32, left=True)
    for name, column in values.items():
        dtype = BATCH_KEYS[name].dtype
        tensors[name] = Ragged(torch.from_numpy(column), torch.from_numpy(lengths), args.response, 0, dtype)
    reasons = object_array(["stop" if n < args.response else "length" for n in lengths])
    return DataProto.from_dict(tensors, {"finish_reason": reasons})


class Prompts(Dataset[dict[str, Any]]):
    """Rows of a data file."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, number: int) -> dict[str, Any]:
        scored = {"data_source": "simulated", "reward_model": {"style": "rule", "ground_truth": str(number)}}
        return {"raw_prompt_ids": self.prompts[number], "index": number, "extra_info": {"index": number}} | scored


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level, with words of three letters besides the bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)] + [chr(code) for code in range(65, 91)]
    words = (f"{a}{b}{c}" for a in letters for b in letters for c in letters)
    tokens = ["<|pad|>", *alphabet, *(word for word, _ in zip(words, range(vocabulary)))][:vocabulary]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|pad|>")


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    return float(len(solution_str) % 2)


def simulate(args: argparse.Namespace, ranks: int, model: Path) -> dict[str, float]:
    """One step on `ranks` stand-in workers."""
    machines = [8] * (ranks // 8) if ranks % 8 == 0 else [ranks]
    config = load_config(
        PPOConfig,
        [
            *("algorithm=grpo", f"{POLICY}.model.path={model}", "data.shuffle=false", "trainer.critic_warmup=0"),
            *(f"data.max_prompt_length={args.prompt}", f"data.max_response_length={args.response}"),
            *(f"data.train_batch_size={args.prompts}", f"{POLICY}.rollout.n={args.samples}"),
            f"{POLICY}.actor.ppo_mini_batch_size={max(1, args.prompts // args.updates)}",
            *(f"trainer.nnodes={len(machines)}", f"trainer.n_gpus_per_node={machines[0]}"),
            *(*LAYOUT, *args.settings),
        ],
        run_checks=False,
    )
    manager, scoring = NaiveRewardManager(args.tokenizer, 0, score), Account()

    def scored(data: DataProto, return_dict: bool = True) -> Any:
        with scoring.working("score"):
            return manager(data, return_dict=return_dict)

    trainer = PPOTrainer(
        config,
        args.tokenizer,
        WorkerGroups(
            {Role.ActorRollout: StandIn, Role.RefPolicy: StandIn},
            ResourcePoolManager({"pool": machines}, {Role.ActorRollout: "pool", Role.RefPolicy: "pool"}),
            "cpu",
            group_class=SimulatedGroup,
            class_with_init=ClassWithInitArgs,
        ),
        scored,
        train_dataset=Prompts(args.prompt_ids),
    )
    trainer.init_workers()
    trainer.global_steps = 1
    for mesh in ("actor", "rollout"):  # asked once in a run
        trainer.actor_rollout_wg.mesh(mesh)
    trainer.ref_policy_wg.mesh("ref")
    vars(ACCOUNT).update(vars(Account()))
    timing: dict[str, float] = {}
    began = time.process_time()
    batch, _ = trainer._train_step((DataProto.from_single_dict(rows) for rows in trainer.train_dataloader), timing)
    trainer._step_metrics(batch, timing | {"step": 1.0})
    own = time.process_time() - began - sum(ACCOUNT.workers_s.values())
    trainer.close()
    score_s = scoring.workers_s["score"]
    device, calls = DEVICES[args.device], ACCOUNT.calls * args.call_us / 1e6
    lengths = batch.batch.pack().stored("responses").lengths
    tokens, longest_response = int(lengths.sum()), int(lengths.max())
    prompt = sum(map(len, args.prompt_ids)) // args.prompts
    plan = plan_of(config, device, Lengths(prompt, tokens // (args.prompts * args.samples)))
    one_each = {"data.train_batch_size": 1, f"{POLICY}.rollout.n": 1}
    longest = plan_of(with_values(config, one_each), device, Lengths(prompt, longest_response))
    generate = max(plan.times["generate"], longest.times["generate"])
    planned = plan.step_s - plan.times["generate"] + generate
    link = (ACCOUNT.sent + ACCOUNT.received) / (args.network * 1e9 / 8)
    controller = own - score_s + calls + link
    total = controller + score_s / args.cores
    return {
        "ranks": ranks,
        "step_s": planned + total,
        "controller_s": controller,
        "share": controller / (planned + controller),
        "share_with_scoring": total / (planned + total),
        "form_s": own - ACCOUNT.serialise_s - score_s,
        "serialise_s": ACCOUNT.serialise_s,
        "score_s": score_s,
        "calls_s": calls,
        "link_s": link,
        "calls": ACCOUNT.calls,
        "sent_gb": ACCOUNT.sent / 1e9,
        "received_gb": ACCOUNT.received / 1e9,
        "tokens": tokens,
        "fits": float(plan.fits),
        "plan_gb": plan.worst.peak / 1e9,
    }


def measure_calls(num_calls: int = 2000) -> float:
    """Microseconds of the controller per call of an empty method on Ray workers."""
    from lockstep.single_controller.ray_backend import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, connect

    connect(min_cpus=3, log_to_driver=False, logging_level="ERROR")
    pool = RayResourcePool([2], use_gpu=False, name_prefix="calls")
    with RayWorkerGroup(pool, RayClassWithInitArgs(Worker)) as group:
        group.execute_all_sync("_register_dispatch_collect_info", "mesh", 0, True)
        began = time.process_time()
        FutureList(group.call_rank(i % 2, "_query_dispatch_collect_info", "mesh") for i in range(num_calls)).get()
        return (time.process_time() - began) / num_calls * 1e6


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="of `lockstep ppo`; default: " + " ".join(LAYOUT)
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 512, 1024])
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--updates", type=int, default=4, help="mini-batches per step")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--response", type=int, default=16384)
    parser.add_argument("--mean-response", type=int, default=6000)
    parser.add_argument("--shape", default="32b", choices=SHAPES)
    parser.add_argument("--device", default="H200", choices=DEVICES)
    parser.add_argument("--network", type=float, default=100.0, metavar="GBIT")
    parser.add_argument("--cores", type=int, default=16)
    parser.add_argument("--call-us", type=float, default=CALL_US)
    parser.add_argument("--measure-calls", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if args.measure_calls:
        print(f"{measure_calls():.0f} us per call")
        return 0
    rng = np.random.default_rng(1)
    args.vocabulary = SHAPES[args.shape]["vocab_size"] - 64 if args.shape == "tiny" else 140_000
    args.tokenizer = make_tokenizer(args.vocabulary)
    sizes = rng.integers(max(1, args.prompt // 8), args.prompt, args.prompts)
    args.prompt_ids = [rng.integers(0, args.vocabulary, size).tolist() for size in sizes]
    StandIn.rollouts = rollouts_of(args, args.prompt_ids)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        for ranks in args.ranks:
            found.append(simulate(args, ranks, Path(folder)))
            print("  ".join(f"{name} {value:.4g}" for name, value in found[-1].items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"results": found}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
