"""Time of a supervised step, measured from the user's command: Lockstep and TRL's SFTTrainer with packing.

    python benchmarks/sft_step.py [--shape 0.5b --rows 4096 --batch 64 --min-tokens 64 --max-tokens 2048 --budget 16384]
                                  [--peer trl --peer-python .trl/bin/python] [--json out.json] [key=value ...]

    --shape 1.5b --batch 32 --budget 16384
    --shape 7b --batch 16 --budget 8192 --checkpointing --master-dtype bfloat16

The model has random weights (`--model DIR` uses a real one) and rows are conversations of random words with one question and one
answer; their lengths are log-uniform between `--min-tokens` and `--max-tokens`. Both sides train in bf16 on the assistant's
tokens of the same rows, each in its own process, `--rounds` times in turn.

Lockstep takes steps of `--batch` conversations and packs each rank's into micro-batches of `--budget` tokens. TRL packs rows into
blocks of `--max-tokens` before training; a step has as many blocks as fill the mean number of tokens of Lockstep's steps, in
micro-batches of `--budget` tokens. Steps differ a little in size, so throughput is what is compared: real tokens (no padding) per
second over the steps after the first two. Start-up is from the command to the end of the first step, with tokenization and
packing. If a peer fails, Lockstep's figures are still printed and the exit code is 1.
"""

import argparse
import json
import math
import random
import statistics
import string
import sys
import tempfile
import time
from pathlib import Path

import torch
from grpo_step import make_model_in_subprocess
from peers import TRL_START, Figures, finish, in_turn, medians, run_command, run_script
from rich.console import Console
from rich.table import Table
from shapes import SHAPES
from transformers import AutoTokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A:{% generation %}{{ m['content'] + eos_token }}"
    "{% endgeneration %}{% else %}Q:{{ m['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
"""The `generation` block marks the assistant's tokens, which TRL needs to train on them alone."""

TRL = (
    TRL_START
    + """
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

arguments = SFTConfig(
    output_dir=options["output"],
    per_device_train_batch_size=options["micro"],
    gradient_accumulation_steps=options["accumulation"],
    max_length=options["max_length"],
    packing=True,
    packing_strategy="bfd",
    assistant_only_loss=True,
    max_steps=options["steps"],
    learning_rate=1e-6,
    bf16=cuda,
    use_cpu=not cuda,
    report_to=[],
    save_strategy="no",
    logging_strategy="no",
    gradient_checkpointing=options["checkpointing"],
    disable_tqdm=True,
    dataset_num_proc=None,
    **options["settings"],
)
kwargs = {"attn_implementation": options["attention"]} if options["attention"] else {}
model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=getattr(torch, options["dtype"]), **kwargs)
trainer = SFTTrainer(
    model=model,
    args=arguments,
    train_dataset=load_dataset("json", data_files=options["rows"], split="train"),
    processing_class=AutoTokenizer.from_pretrained(options["model"]),
    callbacks=[Clock()],
)
sizes = []
collate = trainer.data_collator

def counting(rows):
    sizes.append(sum(len(row["input_ids"]) for row in rows))
    return collate(rows)

trainer.data_collator = counting
trainer.train()
peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0
per_step = [sum(sizes[i : i + options["accumulation"]]) for i in range(0, len(sizes), options["accumulation"])]
print("RESULT", json.dumps({"ends": ends, "tokens": per_step[: len(ends)], "peak_gb": peak}))
"""
)


def write_rows(path: Path, model: Path, args: argparse.Namespace) -> list[int]:
    """Write the conversations; returns their lengths in tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = random.Random(0)
    rows, lengths = [], []
    low, high = math.log(args.min_tokens), math.log(args.max_tokens - 16)
    for _ in range(args.rows):
        wanted = int(math.exp(rng.uniform(low, high)))
        text = "".join(rng.choices(string.ascii_lowercase + " ", k=4 * wanted))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:wanted]
        cut = max(1, len(ids) // 4)
        question, answer = tokenizer.decode(ids[:cut]), tokenizer.decode(ids[cut:])
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
        lengths.append(wanted)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lengths


def run_lockstep(folder: Path, model: Path, rows: Path, args: argparse.Namespace) -> dict[str, float]:
    command = [
        *(sys.executable, "-m", "lockstep.trainer.fsdp_sft_trainer"),
        f"model.path={model}",
        f"model.enable_gradient_checkpointing={args.checkpointing}",
        f"model.fsdp_config.model_dtype={args.master_dtype}",
        f"data.train_files={rows}",
        f"data.train_batch_size={args.batch}",
        f"data.max_length={args.max_tokens}",
        "data.truncation=right",
        f"data.max_token_len_per_gpu={args.budget}",
        "optim.lr=1e-6",
    ]
    start = time.time()
    steps = run_command(command, folder / "run", args)
    peak = steps[-1].get("perf/max_memory_allocated_gb", 0.0) * 2**30 / 1e9
    return figures([s["time"] for s in steps], [s["train/global_tokens"] for s in steps], start, peak)


def run_trl(folder: Path, model: Path, rows: Path, mean_tokens: float, args: argparse.Namespace) -> dict[str, float]:
    micro = max(1, args.budget // args.max_tokens)
    options = {
        "model": str(model),
        "rows": str(rows),
        "micro": micro,
        "accumulation": max(1, round(mean_tokens / (micro * args.max_tokens))),
        "max_length": args.max_tokens,
        "steps": args.steps,
        "checkpointing": args.checkpointing,
        "dtype": args.master_dtype,
        "attention": args.peer_attention,
        "settings": json.loads(args.peer_settings),
        "output": str(folder / "trl"),
    }
    start = time.time()
    result = run_script(args.peer_python, TRL, options, folder)
    return figures(result["ends"], result["tokens"], start, result["peak_gb"])


def figures(ends: list[float], tokens: list[int], start: float, peak_gb: float) -> dict[str, float]:
    """Throughput and mean step time without the first two steps."""
    first = min(1, len(ends) - 2)  # the step before the first one that counts
    seconds = ends[-1] - ends[first]
    counted = tokens[first + 1 : len(ends)]
    return {
        "tokens_per_s": sum(counted) / seconds,
        "step_s": seconds / len(counted),
        "tokens_per_step": statistics.fmean(counted),
        "start_s": ends[0] - start,
        "peak_gb": peak_gb,
    }


def measure(args: argparse.Namespace, console: Console) -> tuple[dict[str, list[Figures]], dict[str, str]]:
    """Results of all rounds by side, and the output of peers that failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = args.model
        if model is None:
            model = make_model_in_subprocess(folder / "model", args.shape)
            (model / "chat_template.jinja").write_text(TEMPLATE)
        rows = folder / "rows.jsonl"
        mean_tokens = args.batch * statistics.fmean(write_rows(rows, model, args))

        def show(number: int, ours: Figures) -> None:
            console.print(
                f"round {number + 1}: lockstep {ours['tokens_per_s']:,.0f} tokens/s, {ours['step_s']:.3f} s per step, "
                f"{ours['peak_gb']:.1f} GB"
            )

        return in_turn(
            args.rounds,
            args.peer,
            folder,
            lambda own: run_lockstep(own, model, rows, args),
            lambda _, own: run_trl(own, model, rows, mean_tokens, args),
            show,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--model", type=Path, help="folder of a real model instead of --shape")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=64, help="conversations per step of Lockstep")
    parser.add_argument("--min-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=2048, help="longest conversation, and TRL's block")
    parser.add_argument("--budget", type=int, default=16384, help="tokens per micro-batch, on both sides")
    parser.add_argument(
        "--master-dtype", choices=["float32", "bfloat16"], default="float32", help="master weights on both sides"
    )
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing on both sides")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1, help="runs per side, in turn; medians are shown")
    parser.add_argument("--peer", action="append", choices=["trl", "none"], default=None)
    parser.add_argument("--peer-python", default=sys.executable, help="Python interpreter of the environment with TRL")
    parser.add_argument("--peer-attention", help="attention of the peer: sdpa, flash_attention_2, ...")
    parser.add_argument("--peer-settings", default="{}", help="further arguments of TRL's SFTConfig, as JSON")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    console = Console()
    rounds, failures = measure(args, console)
    results = medians(rounds)
    table = Table("", "tokens/s", "Lockstep is faster by", "step s", "tokens per step", "start-up s", "peak GB")
    ours = results["lockstep"]
    for name, result in results.items():
        ratio = "" if name == "lockstep" else f"{ours['tokens_per_s'] / result['tokens_per_s']:.2f}x"
        table.add_row(
            name,
            f"{result['tokens_per_s']:,.0f}",
            ratio,
            f"{result['step_s']:.3f}",
            f"{result['tokens_per_step']:,.0f}",
            f"{result['start_s']:.1f}",
            f"{result['peak_gb']:.1f}",
        )
    console.print(table)
    finish(args, console, results, rounds, failures)


if __name__ == "__main__":
    main()
