"""Time of a whole GRPO step, measured from the user's command: Lockstep and TRL, one after the other on this machine.

    python benchmarks/grpo_step.py [--shape 0.5b --prompts 32 --samples 8 --prompt-tokens 256 --new-tokens 256]
                                   [--peer trl --peer trl+vllm --peer-python .trl/bin/python] [--json out.json]
                                   [key=value ...]

    --shape 1.5b --prompts 16 --samples 8 --prompt-tokens 512 --new-tokens 1024 --max-tokens 16384
    --shape 7b --prompts 16 --samples 8 --prompt-tokens 256 --new-tokens 512 --checkpointing --max-tokens 16384
               --master-dtype bfloat16, or float32 masters with --optimizer-offload, or --lora-rank 32
    --shape hybrid-1.5b --prompts 16 --samples 8 --prompt-tokens 512 --new-tokens 1024 --max-tokens 16384
    --shape qwen3-30b-a3b-quarter --prompts 16 --samples 8 --checkpointing --max-tokens 16384 --master-dtype bfloat16
    --shape qwen2.5-vl-3b --prompts 16 --samples 8 --prompt-tokens 64 --max-tokens 8192 --peer-micro 8

The model has random weights (`--model DIR` uses a real one), every prompt has exactly `--prompt-tokens` tokens of text, for a
vision model also a picture of `--image-size` pixels squared, and rewards are random. Each side runs in its own process,
`--rounds` times in turn. The step time is the median without the first two steps; start-up is from the command to the end of the
first step. Further `key=value` arguments are overrides of the Lockstep run. If a peer fails, Lockstep's figures are still printed
and the exit code is 1.
"""

import argparse
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from peers import TRL_START, Figures, finish, in_turn, medians, run_command, run_script, settings_of
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, VISION_SHAPES, shape_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from vision_inputs import TEMPLATE, VISION_TOKENS, make_pictures, num_image_tokens, reads_images, save_processor

IMAGE_SIZE = 448
SPECIAL = ("<s>", "</s>", "<pad>")
PLAIN_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
"""The prompt's text and nothing else, as TRL gets it."""

REWARD = """
import random

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return random.random()
"""

TRL = (
    TRL_START
    + """
import random
from datasets import Dataset, Image
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

def reward(completions, **kwargs):
    return [random.random() for text in completions]

rows = options["prompts"] * options["samples"]
vllm = dict(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.3, vllm_max_model_length=options["max_length"])
settings = vllm if options["vllm"] else {}
if options["vllm_settings"]:
    import functools
    from vllm import LLM
    LLM.__init__ = functools.partialmethod(LLM.__init__, **options["vllm_settings"])
generation = {}
if options["full_length"]:
    generation = {"ignore_eos": True} if options["vllm"] else {"min_new_tokens": options["new_tokens"]}
dtype = torch.bfloat16 if cuda else torch.float32
if options["images"]:
    model = AutoModelForImageTextToText.from_pretrained(options["model"], dtype=dtype)
    processing_class = AutoProcessor.from_pretrained(options["model"])
    prompts = [[{"role": "user", "content": text}] for text in options["texts"]]
    data = Dataset.from_dict({"prompt": prompts, "image": options["images"]}).cast_column("image", Image())
    # a placeholder that is sampled stands for no feature, and the step fails
    placeholders = [model.config.image_token_id, model.config.video_token_id]
    generation |= {"logit_bias": dict.fromkeys(placeholders, -100.0)} if options["vllm"] else {"suppress_tokens": placeholders}
else:
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype)
    processing_class = PreTrainedTokenizerFast.from_pretrained(options["model"])
    data = Dataset.from_dict({"prompt": options["texts"]})
if generation:
    settings = settings | {"generation_kwargs": generation}
rollout_func = None
if options["update_only"]:
    def rollout_func(prompts, trainer):
        ids = [processing_class(prompt)["input_ids"] for prompt in prompts]
        length = options["new_tokens"]
        answers = [random.choices(range(3, 250), k=length) for prompt in prompts]
        return {"prompt_ids": ids, "completion_ids": answers, "logprobs": [[0.0] * length] * len(prompts)}
    settings = settings | {"vllm_importance_sampling_correction": False}
peft_config = None
if options["lora_rank"]:
    from peft import LoraConfig
    peft_config = LoraConfig(r=options["lora_rank"], target_modules="all-linear", task_type="CAUSAL_LM")
arguments = GRPOConfig(
    output_dir=options["output"],
    per_device_train_batch_size=options["micro"],
    gradient_accumulation_steps=rows // options["micro"],
    num_generations=options["samples"],
    generation_batch_size=rows,
    max_completion_length=options["new_tokens"],
    max_steps=options["steps"],
    learning_rate=1e-6,
    bf16=cuda,
    use_cpu=not cuda,
    beta=0.0,
    report_to=[],
    save_strategy="no",
    gradient_checkpointing=options["checkpointing"],
    disable_tqdm=True,
    **(settings | options["settings"]),
)
trainer = GRPOTrainer(
    model=model,
    reward_funcs=reward,
    args=arguments,
    train_dataset=data,
    processing_class=processing_class,
    callbacks=[clock := Clock()],
    peft_config=peft_config,
    rollout_func=rollout_func,
)
trainer.train()
peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0
print("RESULT", json.dumps({"start": start, "begin": clock.begin, "ends": ends, "peak_gb": peak}))
"""
)


def make_model(folder: Path, shape: str, image_size: int) -> None:
    """Write a model with random weights, a byte-level tokenizer and, if it reads images, a processor."""
    torch.manual_seed(0)
    special = list(SPECIAL)
    config = shape_config(shape, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    if shape in VISION_SHAPES:
        for key, token in VISION_TOKENS.items():
            setattr(config, key, len(special))
            special.append(token)
    on_gpu = torch.cuda.is_available()
    kind = AutoModelForImageTextToText if shape in VISION_SHAPES else AutoModelForCausalLM
    with torch.device("cuda" if on_gpu else "cpu"):
        model = kind.from_config(config, dtype=torch.bfloat16 if on_gpu else torch.float32)
    model.save_pretrained(folder)
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=special[len(SPECIAL) :],
    )
    fast.chat_template = TEMPLATE if shape in VISION_SHAPES else PLAIN_TEMPLATE
    fast.save_pretrained(folder)
    if shape in VISION_SHAPES:
        save_processor(folder, fast, image_size)


def make_model_in_subprocess(folder: Path, shape: str, image_size: int = IMAGE_SIZE) -> Path:
    """Call `make_model` in a process that exits, so that its GPU memory is free when the runs start."""
    options = ["--shape", shape, "--image-size", str(image_size), "--make-model", str(folder)]
    subprocess.run([sys.executable, __file__, *options], check=True)
    return folder


def make_prompts(model: Path, count: int, num_tokens: int) -> list[str]:
    """Random texts of `num_tokens` tokens each."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = random.Random(0)
    texts = ("".join(rng.choices(string.ascii_lowercase, k=2 * num_tokens)) for _ in range(count))
    return [tokenizer.decode(tokenizer(text)["input_ids"][:num_tokens]) for text in texts]


def run_lockstep(
    folder: Path, model: Path, texts: list[str], args: argparse.Namespace, pictures: Sequence[str] = ()
) -> dict[str, float]:
    rows: list[dict[str, Any]] = [
        {
            "data_source": "benchmark",
            "prompt": [{"role": "user", "content": f"<image>{text}" if pictures else text}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i},
        }
        for i, text in enumerate(texts)
    ]
    for row, picture in zip(rows, pictures):
        row["images"] = [picture]
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)
    command = [
        *(sys.executable, "-m", "lockstep.trainer.main_ppo"),
        "algorithm=grpo",
        f"data.train_files={folder}/train.parquet",
        f"data.train_batch_size={args.prompts}",
        f"data.max_prompt_length={prompt_length(args, pictures)}",
        f"data.max_response_length={args.new_tokens}",
        f"actor_rollout_ref.model.path={model}",
        *([] if pictures else [f'actor_rollout_ref.model.custom_chat_template="{PLAIN_TEMPLATE}"']),
        f"actor_rollout_ref.model.enable_gradient_checkpointing={args.checkpointing}",
        f"actor_rollout_ref.model.lora_rank={args.lora_rank}",
        "actor_rollout_ref.actor.use_kl_loss=false",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.prompts}",
        f"actor_rollout_ref.actor.fsdp_config.model_dtype={args.master_dtype}",
        f"actor_rollout_ref.actor.fsdp_config.optimizer_offload={args.optimizer_offload}",
        *micro_batching(args),
        f"actor_rollout_ref.rollout.ignore_eos={args.full_length}",
        f"actor_rollout_ref.rollout.n={args.samples}",
        f"actor_rollout_ref.rollout.max_num_seqs={args.prompts * args.samples}",
        f"custom_reward_function.path={folder}/reward.py",
    ]
    start = time.time()
    steps = run_command(command, folder / "run", args)
    steady = steps[2:] or steps
    times = {name: statistics.median(s[name] for s in steady) for name in steady[0] if name.startswith("timing_s/")}
    first_s = steps[0]["timing_s/step"]
    times.pop("timing_s/step")
    return {
        "step_s": median_step([step["time"] for step in steps], first_s),
        "start_s": steps[0]["time"] - start,
        "peak_gb": steps[-1].get("perf/max_memory_allocated_gb", 0.0) * 2**30 / 1e9,
        "log_probs_gap": statistics.median(s.get("training/rollout_log_probs_gap", 0.0) for s in steady),
        **{f"{name.removeprefix('timing_s/')}_s": value for name, value in times.items()},
    }


def prompt_length(args: argparse.Namespace, pictures: Sequence[str]) -> int:
    """Most tokens of a prompt."""
    return int(args.prompt_tokens) + 64 + (num_image_tokens(args.image_size) if pictures else 0)


def micro_batching(args: argparse.Namespace) -> list[str]:
    if args.auto_micro:
        return []
    if args.max_tokens is None:
        keys = ("actor.ppo_micro_batch_size_per_gpu", "rollout.log_prob_micro_batch_size_per_gpu")
        return [f"actor_rollout_ref.{key}={args.micro}" for key in keys]
    actor = "actor_rollout_ref.actor"
    return [f"{actor}.use_dynamic_bsz=true", f"{actor}.ppo_max_token_len_per_gpu={args.max_tokens}"]


def run_trl(
    folder: Path,
    model: Path,
    texts: list[str],
    args: argparse.Namespace,
    vllm: bool,
    pictures: Sequence[str] = (),
    *,
    update_only: bool = False,
) -> dict[str, float]:
    """update_only: random tokens are the answers, so that a step is TRL's update alone."""
    names = ("prompts", "samples", "new_tokens", "steps", "checkpointing", "lora_rank", "full_length")
    options = {name: getattr(args, name) for name in names}
    options |= {
        "model": str(model),
        "texts": texts,
        "images": pictures,
        "micro": args.peer_micro,
        "max_length": prompt_length(args, pictures) + args.new_tokens,
        "vllm": vllm,
        "update_only": update_only,
        "settings": settings_of(args.peer_setting),
        "vllm_settings": settings_of(args.vllm_setting) if vllm else {},
        "output": str(folder / "trl"),
    }
    start = time.time()
    result = run_script(args.peer_python, TRL, options, folder)
    return {
        "step_s": median_step(result["ends"], result["ends"][0] - result["begin"]),
        "start_s": result["ends"][0] - start,
        "peak_gb": result["peak_gb"],
    }


def median_step(ends: list[float], first: float) -> float:
    """Median time between the ends of consecutive steps, without the first two steps; of a single step its own time."""
    steps = [after - before for before, after in pairwise(ends)]
    return statistics.median(steps[1:] or steps or [first])


def measure(args: argparse.Namespace, console: Console) -> tuple[dict[str, list[Figures]], dict[str, str]]:
    """Results of all rounds by side, and the output of peers that failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = args.model or make_model_in_subprocess(folder / "model", args.shape, args.image_size)
        texts = make_prompts(model, 4 * args.prompts, args.prompt_tokens)
        pictures = make_pictures(folder / "pictures", len(texts), args.image_size) if reads_images(model) else []

        def show(number: int, ours: Figures) -> None:
            console.print(f"round {number + 1}: lockstep {ours['step_s']:.3f} s per step, {ours['peak_gb']:.1f} GB")

        return in_turn(
            args.rounds,
            args.peer,
            folder,
            lambda own: run_lockstep(own, model, texts, args, pictures),
            lambda peer, own: run_trl(own, model, texts, args, peer == "trl+vllm", pictures),
            show,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = sorted(SHAPES | VISION_SHAPES)
    parser.add_argument("--shape", choices=shapes, default="0.5b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--model", type=Path, help="folder of a real model instead of --shape")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--image-size", type=int, default=IMAGE_SIZE, help="of the picture in a vision model's prompts")
    parser.add_argument("--micro", type=int, default=64, help="sequences per micro-batch of Lockstep")
    parser.add_argument("--max-tokens", type=int, help="tokens per micro-batch of Lockstep, instead of --micro")
    parser.add_argument("--auto-micro", action="store_true", help="tokens that Lockstep chooses from the GPU's memory")
    parser.add_argument("--peer-micro", type=int, default=32, help="sequences per micro-batch of the peer")
    parser.add_argument(
        "--master-dtype", choices=["float32", "bfloat16"], default="float32", help="Lockstep's master weights"
    )
    parser.add_argument("--lora-rank", type=int, default=0, help="train LoRA adapters of this rank on both sides")
    parser.add_argument(
        "--full-length", action="store_true", help="ignore the stop token: --new-tokens for all responses"
    )
    parser.add_argument("--peer-setting", action="append", default=[], help="KEY=JSON: a field of TRL's GRPOConfig")
    parser.add_argument("--vllm-setting", action="append", default=[], help="KEY=JSON: an argument of TRL's vLLM")
    parser.add_argument("--optimizer-offload", action="store_true", help="keep Lockstep's optimizer state on the host")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing on both sides")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1, help="runs per side, in turn; medians are shown")
    parser.add_argument("--peer", action="append", choices=["trl", "trl+vllm", "none"], default=None)
    parser.add_argument("--peer-python", default=sys.executable, help="Python interpreter of the environment with TRL")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--make-model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if args.make_model:
        return make_model(args.make_model, args.shape, args.image_size)
    console = Console()
    rounds, failures = measure(args, console)
    results = medians(rounds)
    table = Table("", "step s", "Lockstep is faster by", "start-up s", "peak GB")
    ours = results["lockstep"]
    for name, result in results.items():
        ratio = "" if name == "lockstep" else f"{result['step_s'] / ours['step_s']:.2f}x"
        table.add_row(name, f"{result['step_s']:.3f}", ratio, f"{result['start_s']:.1f}", f"{result['peak_gb']:.1f}")
    console.print(table)
    phases = {name: round(value, 3) for name, value in ours.items() if name not in ("step_s", "start_s", "peak_gb")}
    console.print("Lockstep by phase:", phases)
    finish(args, console, results, rounds, failures)


if __name__ == "__main__":
    main()
