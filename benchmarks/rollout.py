"""Rollout throughput: the embedded engine compared with transformers' generate and vLLM, each in its own process.

    python benchmarks/rollout.py --model DIR [--requests 64 --new-tokens 8-128]                a real model, greedy (CPU or GPU)
    python benchmarks/rollout.py --shape 0.5b 7b --workload uniform mixed [--json out.json]    random weights, sampled
    ... --engines embedded transformers vllm --peer-python .vllm/bin/python                    vLLM from another environment
    ... --shape 7b --engines embedded embedded-fp8 vllm                                        also with rollout.quantization=fp8
    ... --shape 7b --engines embedded embedded-fp8-cache                                       with rollout.kv_cache_dtype=fp8 too
    ... --shape 3b --workload ragged --engines embedded embedded-drafts --right 0.9            with rollout.history_drafts

Requests have random prompts and ask for a fixed number of tokens; only those count. Sampled requests return the log-prob of every
token and have a stop token, so that all engines check for it. transformers gets batches of requests of similar length. Each figure
is the best of `--repeats` runs after a warm-up run; start-up is from the process's start to the first token. vLLM is skipped if
`--peer-python` does not have it. The history of `embedded-drafts` has the warm-up run's answers, in which all but the share
`--right` of the tokens are replaced by random ones.
"""

import time

PROCESS_STARTED = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from dataclasses import asdict, dataclass, field  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from shapes import SHAPES, architecture, install_layers, shape_config, zero_logits  # noqa: E402

WORKLOADS = {
    "uniform": (256, "256", "256"),
    "mixed": (512, "256", "16-1024"),
    "ragged": (192, "64-1024", "128-3072"),
}
"""Requests, prompt tokens and new tokens."""

ROPE = {"rope_type": "default", "rope_theta": 1e6}


@dataclass(frozen=True)
class Case:
    """One workload. prompt_tokens, new_tokens: minimum and maximum per request."""

    name: str
    requests: int
    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]


@dataclass
class Result:
    """seconds: per run after the first. same_tokens: fraction of tokens equal to embedded's, if both are greedy; with drafts to
    those of the warm-up run. drift: see `drift_of`; of engines in 8 bits. acceptance: share of the draft tokens that were right."""

    engine: str
    case: str
    tokens: int
    seconds: list[float]
    startup_s: float
    peak_gb: float | None
    same_tokens: float | None = None
    drift: float | None = None
    acceptance: float | None = None
    outputs: list[list[int]] = field(default_factory=list, repr=False)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / min(self.seconds)


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    new_tokens: int


def make_requests(case: Case, vocab_size: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            [rng.randrange(vocab_size) for _ in range(rng.randint(*case.prompt_tokens))], rng.randint(*case.new_tokens)
        )
        for _ in range(case.requests)
    ]


Generate = Callable[[list[Request]], list[list[int]]]


def embedded_engine(args: argparse.Namespace, longest: Case, **settings: Any) -> tuple[Any, Any]:
    """The engine and its model. settings: of the rollout."""
    from lockstep.kernels.gpu_warmup import start_gpu_warmup

    start_gpu_warmup(args.device)
    from lockstep.config.actor_rollout_ref import RolloutConfig
    from lockstep.engines.rollout.embedded.engine import EmbeddedEngine

    model = load_model(args)
    install_layers(model)
    sizes = {
        "prompt_length": longest.prompt_tokens[1],
        "response_length": longest.new_tokens[1],
        "max_num_seqs": longest.requests,
        "max_num_batched_tokens": args.prefill_tokens,
    }
    engine = EmbeddedEngine(RolloutConfig(**sizes | settings, seed=0), eos_token_ids=(), pad_token_id=0)
    engine.bind(model)
    return engine, model


def embedded_requests(requests: list[Request], greedy: bool) -> list[Any]:
    from lockstep.engines.rollout import GenerationRequest, SamplingParams

    temperature, stop = (0.0, ()) if greedy else (1.0, (1,))
    return [
        GenerationRequest(r.prompt, SamplingParams(temperature, max_tokens=r.new_tokens, stop_token_ids=stop), i)
        for i, r in enumerate(requests)
    ]


def embedded(args: argparse.Namespace, longest: Case, **eight_bits: str) -> tuple[Generate, int]:
    """eight_bits: `quantization` and `kv_cache_dtype` of the rollout."""
    engine, model = embedded_engine(args, longest, **eight_bits)

    def generate(requests: list[Request]) -> list[list[int]]:
        return [c.token_ids for c in engine.generate(embedded_requests(requests, args.model is not None))]

    if eight_bits:
        args.drift = drift_of(engine, model)
        print(f"log-probs differ from the model's by {args.drift:.4f} on average")
    return generate, model.config.vocab_size


def embedded_fp8(args: argparse.Namespace, longest: Case) -> tuple[Generate, int]:
    return embedded(args, longest, quantization="fp8")


def embedded_fp8_cache(args: argparse.Namespace, longest: Case) -> tuple[Generate, int]:
    return embedded(args, longest, quantization="fp8", kv_cache_dtype="fp8")


def embedded_drafts(args: argparse.Namespace, longest: Case) -> tuple[Generate, int]:
    """The first answers to a prompt are the history of later runs."""
    import numpy as np

    from lockstep.config.actor_rollout_ref import HistoryDraftsConfig
    from lockstep.engines.rollout.embedded.history import prompt_key

    drafts = HistoryDraftsConfig(enable=True)
    at_once = max(longest.requests, 256)  # the key's default: a step with drafts has at most as many tokens
    engine, model = embedded_engine(args, longest, history_drafts=drafts, max_num_seqs=at_once)
    if args.model is None:
        zero_logits(model)
    rng, vocabulary = np.random.default_rng(args.seed), model.config.vocab_size
    answers: dict[bytes, list[int]] = {}

    def generate(requests: list[Request]) -> list[list[int]]:
        asked = embedded_requests(requests, args.model is not None)
        engine.drafter.history.clear()
        for request in asked:
            if (answer := answers.get(prompt_key(request))) is not None:
                is_right = rng.random(len(answer)) < args.right
                seen = np.where(is_right, answer, rng.integers(0, vocabulary, len(answer)))
                engine.drafter.history.add(prompt_key(request), seen)
        outputs = [c.token_ids for c in engine.generate(asked)]
        args.acceptance = engine.draft_metrics().get("perf/drafts/acceptance", 0.0)
        expected = [answers.setdefault(prompt_key(request), tokens) for request, tokens in zip(asked, outputs)]
        args.same_tokens = shared_tokens(expected, outputs)
        return outputs

    return generate, vocabulary


def drift_of(engine: Any, model: Any) -> float:
    """Mean difference of log-probs between the engine and transformers in the model's dtype, over eight random prompts."""
    import torch

    from lockstep.engines.rollout import GenerationRequest, SamplingParams
    from lockstep.models.model_check import reference_log_probs

    rng, longest = random.Random(1), engine.max_model_len
    prompt_tokens = min(16, longest // 2)
    new = min(64, longest - prompt_tokens)
    prompts = [[rng.randrange(model.config.vocab_size) for _ in range(prompt_tokens)] for _ in range(8)]
    sampling = SamplingParams(1.0, max_tokens=new, ignore_eos=True)
    completions = engine.generate([GenerationRequest(prompt, sampling, i) for i, prompt in enumerate(prompts)])
    sequences = [prompt + c.token_ids for prompt, c in zip(prompts, completions)]
    expected = [row[-new:].cpu() for row in reference_log_probs(model.eval(), sequences, [None] * len(sequences))]
    got = torch.tensor([c.log_probs for c in completions])
    return float((got - torch.stack(expected)).abs().mean())


def transformers(args: argparse.Namespace, longest: Case) -> tuple[Generate, int]:
    import torch
    from transformers import GenerationConfig

    model = load_model(args)
    model.generation_config = GenerationConfig()

    @torch.no_grad()
    def batch(requests: list[Request]) -> list[list[int]]:
        width = max(len(r.prompt) for r in requests)
        ids = torch.tensor([[0] * (width - len(r.prompt)) + r.prompt for r in requests], device=model.device)
        lengths = torch.tensor([len(r.prompt) for r in requests], device=model.device)
        mask = (torch.arange(width, device=model.device) >= width - lengths[:, None]).long()
        config = GenerationConfig(
            do_sample=args.model is None, max_new_tokens=max(r.new_tokens for r in requests), pad_token_id=0
        )
        rows = model.generate(ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
        return [row[: r.new_tokens] for row, r in zip(rows, requests)]

    def generate(requests: list[Request]) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in requests]
        order = sorted(range(len(requests)), key=lambda i: (requests[i].new_tokens, len(requests[i].prompt)))
        for first in range(0, len(order), args.batch_size):
            members = order[first : first + args.batch_size]
            for i, tokens in zip(members, batch([requests[i] for i in members])):
                outputs[i] = tokens
        return outputs

    return generate, model.config.vocab_size


def vllm(args: argparse.Namespace, longest: Case) -> tuple[Generate, int]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    options: dict[str, Any] = {"gpu_memory_utilization": 0.5}
    if args.device == "cpu":  # in this process: a separate one would occupy a core
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        options = {"distributed_executor_backend": "uni", "enforce_eager": True}
    from peers import settings_of
    from vllm import LLM, SamplingParams

    folder = args.model
    if folder is None:
        folder = str(Path(tempfile.gettempdir()) / f"vllm-{args.shape}")  # vLLM finds compiled graphs by this name
        config = {"architectures": [architecture(args.shape)], "dtype": "bfloat16", "rope_parameters": ROPE}
        shape_config(args.shape, **config).save_pretrained(folder)
        options["load_format"] = "dummy"
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_model_len=longest.prompt_tokens[1] + longest.new_tokens[1],
        max_num_seqs=longest.requests,
        enable_prefix_caching=False,
        **options | settings_of(args.vllm_setting),
    )
    greedy = args.model is not None

    def generate(requests: list[Request]) -> list[list[int]]:
        sampling = [
            SamplingParams(
                temperature=0.0 if greedy else 1.0,
                max_tokens=r.new_tokens,
                ignore_eos=True,
                stop_token_ids=None if greedy else [1],
                logprobs=0,
                detokenize=False,
            )
            for r in requests
        ]
        prompts = [{"prompt_token_ids": r.prompt} for r in requests]
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, sampling, use_tqdm=False)]

    return generate, llm.llm_engine.model_config.get_vocab_size()


ENGINES = {
    "embedded": embedded,
    "embedded-fp8": embedded_fp8,
    "embedded-fp8-cache": embedded_fp8_cache,
    "embedded-drafts": embedded_drafts,
    "transformers": transformers,
    "vllm": vllm,
}


def load_model(args: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, args.dtype)
    if args.model is not None:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
        return model.to(args.device).eval()
    torch.manual_seed(0)
    with torch.device(args.device):
        return AutoModelForCausalLM.from_config(shape_config(args.shape, rope_parameters=ROPE), dtype=dtype).eval()


def work(args: argparse.Namespace) -> None:
    """Process of one engine: run all cases, write the results as JSON."""
    cases = [Case(**case) for case in json.loads(args.cases)]
    longest = Case(
        "longest",
        max(c.requests for c in cases),
        (1, max(c.prompt_tokens[1] for c in cases)),
        (1, max(c.new_tokens[1] for c in cases)),
    )
    args.drift = args.acceptance = args.same_tokens = None
    generate, vocab_size = ENGINES[args.work](args, longest)
    generate([Request(list(range(min(64, longest.prompt_tokens[1]))), 1)])
    startup = time.perf_counter() - PROCESS_STARTED
    results = []
    for case in cases:
        requests = make_requests(case, vocab_size, args.seed)
        seconds = []
        for _ in range(args.repeats + 1):
            started = time.perf_counter()
            outputs = generate(requests)  # returns host lists, so the device has finished
            seconds.append(time.perf_counter() - started)
        tokens = sum(len(o) for o in outputs)
        kept = outputs if args.model is not None else []
        figures = {name: getattr(args, name) for name in ("same_tokens", "drift", "acceptance")}
        results.append(
            Result(args.work, case.name, tokens, seconds[1:], startup, peak_gb(args), outputs=kept, **figures)
        )
    args.out.write_text(json.dumps([asdict(r) for r in results]))


def peak_gb(args: argparse.Namespace) -> float | None:
    if args.device != "cuda" or args.work == "vllm":
        return None  # vLLM allocates a fixed fraction, in another process
    import torch

    return torch.cuda.max_memory_allocated() / 1e9


def run(args: argparse.Namespace, shape: str | None, cases: list[Case]) -> Iterator[Result]:
    """Run all engines, one process after the other."""
    for engine in args.engines:
        python = args.peer_python if engine == "vllm" else sys.executable
        if engine == "vllm" and not has_vllm(python):
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "result.json"
            command = [python, __file__, "--work", engine, "--cases", json.dumps([asdict(c) for c in cases])]
            command += ["--out", str(out), "--device", args.device, "--dtype", args.dtype, "--seed", str(args.seed)]
            command += ["--repeats", str(args.repeats), "--batch-size", str(args.batch_size)]
            command += ["--prefill-tokens", str(args.prefill_tokens), "--right", str(args.right)]
            command += ["--shape", shape] if shape else ["--model", args.model]
            command += [word for setting in args.vllm_setting for word in ("--vllm-setting", setting)]
            if subprocess.run(command, env={**os.environ, "PYTHONPATH": path_here()}).returncode != 0:
                print(f"{engine} failed; skipping it", file=sys.stderr)
                continue
            yield from (Result(**entry) for entry in json.loads(out.read_text()))


def has_vllm(python: str) -> bool:
    script = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([python, "-c", script]).returncode == 0


def path_here() -> str:
    root = str(Path(__file__).resolve().parent.parent)
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def span(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def compare(results: list[Result]) -> None:
    """Fraction of tokens equal to embedded's, if outputs were kept."""
    references = {r.case: r.outputs for r in results if r.engine == "embedded"}
    for r in results:
        reference = references.get(r.case)
        if r.outputs and reference and r.engine != "embedded":
            r.same_tokens = shared_tokens(reference, r.outputs)


def shared_tokens(reference: list[list[int]], outputs: list[list[int]]) -> float:
    """Fraction of equal tokens at the same positions."""
    pairs = [x == y for a, b in zip(reference, outputs) for x, y in zip(a, b)]
    return sum(pairs) / len(pairs)


def report(results: list[Result], args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{args.dtype} on {args.device}")
    for column in (
        "case",
        "engine",
        "tokens/s",
        "seconds",
        "start-up s",
        "peak GB",
        "embedded is",
        "same tokens",
        "accepted",
    ):
        table.add_column(column, justify="left" if column in ("case", "engine") else "right")
    ours = {r.case: r.tokens_per_s for r in results if r.engine == "embedded"}
    for r in results:
        ratio = f"{ours[r.case] / r.tokens_per_s:.2f}x" if r.engine != "embedded" and r.case in ours else ""
        peak = "" if r.peak_gb is None else f"{r.peak_gb:.1f}"
        same = "" if r.same_tokens is None else f"{r.same_tokens:.1%}"
        accepted = "" if r.acceptance is None else f"{r.acceptance:.2f}"
        speed = f"{r.tokens_per_s:,.1f}", f"{min(r.seconds):.2f}"
        table.add_row(r.case, r.engine, *speed, f"{r.startup_s:.1f}", peak, ratio, same, accepted)
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    if args.json:
        entries = [{**asdict(r), "tokens_per_s": r.tokens_per_s, "outputs": None} for r in results]
        args.json.write_text(
            json.dumps({"device": args.device, "dtype": args.dtype, "results": entries}, indent=2) + "\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a transformers causal LM")
    parser.add_argument("--shape", nargs="*", choices=SHAPES, help="random weights of these shapes")
    parser.add_argument("--workload", nargs="*", choices=WORKLOADS, default=["uniform"], help="for the shapes")
    parser.add_argument(
        "--engines", nargs="*", choices=ENGINES, help="default: on CUDA embedded, vllm; else embedded, transformers"
    )
    parser.add_argument("--requests", type=int, nargs="*", help="batch sizes; default: the workload's, 64 for a model")
    parser.add_argument("--prompt-tokens", help="per request, N or N-M")
    parser.add_argument("--new-tokens", help="per request, N or N-M")
    parser.add_argument("--prefill-tokens", type=int, default=16384, help="embedded: tokens per prefill step")
    parser.add_argument("--right", type=float, default=0.9, help="embedded-drafts: share of the history that is right")
    parser.add_argument("--batch-size", type=int, default=16, help="for transformers")
    parser.add_argument("--peer-python", default=sys.executable, help="Python interpreter of the environment with vLLM")
    parser.add_argument("--vllm-setting", action="append", default=[], help="KEY=JSON: an argument of vLLM's LLM")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", help="default: bfloat16 on CUDA, else float32")
    parser.add_argument("--device", help="default: cuda if available")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        args.shape = args.shape[0] if args.shape else None
        return work(args)
    if (args.model is None) == (not args.shape):
        parser.error("give either --model or --shape")

    import torch

    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    args.engines = args.engines or (["embedded", "vllm"] if args.device == "cuda" else ["embedded", "transformers"])
    results: list[Result] = []
    if args.model:
        prompt, new = span(args.prompt_tokens or "16-200"), span(args.new_tokens or "8-128")
        results += run(args, None, [Case(f"{n} requests", n, prompt, new) for n in args.requests or [64]])
    for shape in args.shape or ():
        cases = []
        for workload in args.workload:
            count, prompt_text, new_text = WORKLOADS[workload]
            prompt, new = span(args.prompt_tokens or prompt_text), span(args.new_tokens or new_text)
            cases += [Case(f"{shape} {workload} x{n}", n, prompt, new) for n in args.requests or [count]]
        results += run(args, shape, cases)
    compare(results)
    report(results, args)


if __name__ == "__main__":
    main()
