"""The tables of `report.py`: stored results between `<!-- report NAME -->` and `<!-- end -->` in README.md and docs/."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from report import Results

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("performance", "large_models", "quantization", "speculation", "exact", "long_sequences")
    ),
)
NAMES = {"vllm": "vLLM", "trl": "TRL", "trl+vllm": "TRL + vLLM"}
"""How tables write a side or package; others as they are."""
Side = dict[str, float]
"""Figure -> number."""


def side_name(side: str) -> str:
    return NAMES.get(side, side)


def tokens(figures: Side) -> str:
    memory = f", {figures['peak_gb']:.1f} GB" if figures.get("peak_gb") else ""
    return f"{figures['tokens_per_s']:,.0f} tokens/s{memory}"


def engine(figures: Side) -> str:
    """A form of the embedded engine."""
    drift = f", log-probs differ by {figures['drift']:.3f}" if "drift" in figures else ""
    accepted = f", {figures['acceptance']:.2f} accepted" if "acceptance" in figures else ""
    return f"{figures['tokens_per_s']:,.0f} tokens/s{drift}{accepted}"


def step(figures: Side) -> str:
    phases = {"generation": "gen_s", "update": "update_actor_s", "weights and proof": "update_weights_s"}
    parts = [f"{name} {figures[key]:.2f}" for name, key in phases.items() if figures.get(key)]
    memory = f"{figures['peak_gb']:.1f} GB" if figures.get("peak_gb") else ""
    digits = 2 if figures["step_s"] < 10 else 1
    time = f"{figures['step_s']:.{digits}f} s"
    return (
        time
        + (f": {', '.join(parts)}" if parts else "")
        + ("; " if parts and memory else ", " if memory else "")
        + memory
    )


def start(figures: Side) -> str:
    return f"{figures['start_s']:.1f} s"


CELLS: dict[str, Callable[[Side], str]] = {"tokens_per_s": tokens, "step_s": step, "start_s": start}
"""Figure that two sides are compared by -> how a side is written."""


@dataclass(frozen=True)
class Row:
    """Lockstep beside a peer ("": none). peer_run: the run that measured it, if it is another; short: the label in the README."""

    label: str
    run: str
    figure: str
    peer: str
    case: str = ""
    short: str = ""
    peer_run: str = ""

    def text(self, results: "Results", label: str) -> str:
        cell, peer_run = CELLS[self.figure], self.peer_run or self.run
        ours = results.side(self.run, "lockstep", self.case)
        theirs = results.side(peer_run, self.peer, self.case) if self.peer else None
        peer = results.why_missing(peer_run, self.peer) if self.peer else ""
        peer = f"{side_name(self.peer)} {cell(theirs)}" if theirs else peer
        ratio = f"{_faster(ours, theirs, self.figure)}x" if ours and theirs else ""
        return f"| {label} | {cell(ours) if ours else 'not measured'} | {peer} | {ratio} |"


def _faster(ours: Side, theirs: Side, figure: str) -> str:
    ratio = ours[figure] / theirs[figure]
    ratio = ratio if figure.endswith("_per_s") else 1 / ratio
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"


TOKENS, STEP, START = CELLS
CPU, SMALL, LARGE = "135m uniform x32", "0.5b uniform x256", "7b uniform x256"
"""Cases of rollout.py."""
# fmt: off
ROWS: dict[str, list[Row]] = {
    "cpu": [
        Row("rollout, 32 requests of 32 + 64 tokens", "rollout-cpu", TOKENS, "vllm", CPU),
        Row("the same", "rollout-cpu", TOKENS, "transformers", CPU),
        Row("GRPO step, 4 prompts x 4 samples, 32 + 32 tokens", "grpo-cpu", STEP, "trl",
            short="GRPO step, SmolLM2-135M, 2 CPU cores"),
    ],
    "gpu": [
        Row("rollout, 0.5B, 256 requests of 256 + 256 tokens", "rollout-0.5b", TOKENS, "vllm", SMALL,
            "generate 256 x (256 + 256) tokens, 0.5B"),
        Row("rollout, 0.5B, 512 requests, answers of 16 to 1024 tokens with stop tokens", "rollout-0.5b", TOKENS, "vllm",
            "0.5b mixed x512"),
        Row("rollout, 7B, 256 requests of 256 + 256 tokens", "rollout-7b", TOKENS, "vllm", LARGE, "the same, 7B"),
        Row("command to first token, 0.5B, warm start", "rollout-0.5b", START, "vllm", SMALL, "command to first token, 0.5B"),
        Row("the same, 7B", "rollout-7b", START, "vllm", LARGE),
        Row("the same, 0.5B, Triton kernels not compiled", "uncompiled", START, "", "0.5b uniform x1"),
        Row("forward + backward + AdamW, 16,384 packed tokens, half of them responses, 0.5B", "train", TOKENS, "transformers",
            short="train on 16,384 packed tokens, 0.5B"),
        Row("GRPO step, 32 prompts x 8 samples, 256 + 256 tokens, 0.5B", "grpo", STEP, "trl+vllm",
            short="GRPO step, 32 prompts x 8, 256 + 256 tokens, 0.5B"),
        Row("command to the end of its first step, cold start", "grpo", START, "trl+vllm"),
        Row("GRPO step, 16 prompts x 8 samples, 512 + 1024 tokens, 1.5B", "grpo-1.5b", STEP, "trl+vllm",
            short="GRPO step, 16 prompts x 8, 512 + 1024 tokens, 1.5B"),
        Row("GRPO step, 16 prompts x 8 samples, 256 + 512 tokens, 7B, bfloat16 masters, gradient checkpointing", "grpo-7b", STEP,
            "trl+vllm", short="GRPO step, 16 prompts x 8, 256 + 512 tokens, 7B with bfloat16 masters"),
        Row("the same with float32 masters and optimizer offload", "grpo-7b-offload", STEP, ""),
    ],
    "sft": [
        Row("TRL with packing (bfd), sdpa", "sft", TOKENS, "trl"),
        Row("the same with `use_liger_kernel`", "sft-liger", TOKENS, "trl",
            short="SFT with packing, 0.5B; TRL with Liger, without flash-attn"),
        Row("command to the end of the first step", "sft", START, "trl"),
    ],
    "requests": [
        Row(f"{count} at once", "rollout-requests", TOKENS, "vllm", f"0.5b uniform x{count}") for count in (1, 8, 64, 256, 1024)
    ],
    "vllm": [
        Row("step, `rollout.name=vllm`", "grpo-vllm", STEP, "trl+vllm", peer_run="grpo"),
        Row("step, embedded engine", "grpo", STEP, "trl+vllm"),
        Row("command to the end of the first step, `rollout.name=vllm`", "grpo-vllm", START, "trl+vllm", peer_run="grpo"),
    ],
    "families": [
        Row("rollout, Gated DeltaNet hybrid, 1.5B, 128 requests of 256 + 256 tokens", "rollout-hybrid", TOKENS, "vllm",
            "hybrid-1.5b uniform x128"),
        Row("rollout, a quarter of Qwen3-30B-A3B's layers, 128 requests of 256 + 256 tokens", "rollout-moe", TOKENS, "vllm",
            "qwen3-30b-a3b-quarter uniform x128"),
        Row("GRPO step, the hybrid, 16 prompts x 8 samples, 256 + 256 tokens", "grpo-hybrid", STEP, "trl+vllm"),
        Row("GRPO step, the mixture, 16 prompts x 8 samples, 256 + 256 tokens, bfloat16 masters, gradient checkpointing",
            "grpo-moe", STEP, "trl+vllm", short="GRPO step, 12 layers of Qwen3-30B-A3B"),
        Row("GRPO step, Qwen2.5-VL-3B, 16 prompts x 8 samples, one picture of 448 x 448 and 64 + 256 tokens", "grpo-vl", STEP,
            "trl+vllm", short="GRPO step with images, Qwen2.5-VL-3B"),
    ],
    "long": [
        Row("1.5B, all parameters", "long-1.5b", STEP, "trl+vllm", "1.5b", peer_run="long-1.5b-trl"),
        Row("7B, LoRA of rank 32, 2 prompts", "long-7b", STEP, "", "7b-lora"),
    ],
}
# fmt: on
"""Table -> its rows."""


def comparison(name: str, results: "Results") -> list[str]:
    header = ["| | Lockstep | peer | Lockstep is faster by |", "|---|---|---|---|"]
    return [*header, *(row.text(results, row.label) for row in ROWS[name])]


def fp8_table(results: "Results") -> list[str]:
    forms = {"bfloat16": "lockstep", "weights": "embedded-fp8", "weights and KV cache": "embedded-fp8-cache"}
    label = "rollout, 7B, 256 requests of 256 + 256 tokens | Lockstep | vLLM in bfloat16"
    return engines_table(results, "rollout-fp8", LARGE, label, forms, peer_run="rollout-7b")


def ragged_table(results: "Results") -> list[str]:
    forms = {"plain": "lockstep", "drafts, 0.9 of the history right": "embedded-drafts"}
    label = "rollout, 3B, 192 requests of 64 to 1,024 + 128 to 3,072 tokens | Lockstep | vLLM"
    return engines_table(results, "drafts-ragged", "3b ragged x192", label, forms, peer_run="drafts-ragged-vllm")


def engines_table(
    results: "Results", run: str, case: str, label: str, forms: dict[str, str], peer_run: str = ""
) -> list[str]:
    """rollout.py: forms of the embedded engine, by the name of their row, beside vLLM. peer_run: that of vLLM, by default `run`."""
    lines = [f"| {label} | Lockstep is faster by |", "|---|---|---|---|"]
    theirs = results.side(peer_run or run, "vllm", case)
    peer = f"{theirs[TOKENS]:,.0f} tokens/s" if theirs else "not measured"
    for name, side in forms.items():
        ours = results.side(run, side, case)
        ratio = f"{_faster(ours, theirs, TOKENS)}x" if ours and theirs else ""
        lines.append(f"| {name} | {engine(ours) if ours else 'not measured'} | {peer} | {ratio} |")
    return lines


def learning_table(results: "Results") -> list[str]:
    """history_learning.py: a row per temperature and epoch."""
    lines = [
        "| temperature, epoch | generation | with drafts | faster by | accepted | of all tokens | tokens per answer | reward"
        " | same text |",
        "|---|" + "---|" * 8,
    ]
    runs = {"1.0": "drafts-learning", "0.7": "drafts-learning-0.7"}
    for temperature, number in product(runs, (1, 2, 3)):
        label = f"{temperature}, {number}"
        if (found := results.side(runs[temperature], str(number))) is None:
            lines.append(f"| {label} | not measured | | | | | | | |")
            continue
        times = f"{found['plain_s']:.1f} s | {found['drafts_s']:.1f} s | {found['faster']:.2f}x"
        drafts = f"{found['acceptance']:.2f} | {found['drafted_share']:.2f}"
        answers = f"{found['mean_length']:.0f} | {found['reward']:.3f} | {found['same']:.1%}"
        lines.append(f"| {label} | {times} | {drafts} | {answers} |")
    return lines


def exact_table(results: "Results") -> list[str]:
    lines = ["| GRPO step | default | exact | takes longer by |", "|---|---|---|---|"]
    for label, default, exact in (("0.5B", "grpo-alone", "grpo-exact"), ("7B", "grpo-7b-alone", "grpo-7b-exact")):
        sides = [results.side(run, "lockstep") for run in (default, exact)]
        cells = [step(side) if side else "not measured" for side in sides]
        ratio = f"{sides[1][STEP] / sides[0][STEP]:.2f}x" if sides[0] and sides[1] else ""
        lines.append(f"| {label} | {' | '.join(cells)} | {ratio} |")
    return lines


def drafts_table(results: "Results") -> list[str]:
    shares = {"none": "none", "0.8": "0.8 right", "0.95": "0.95 right", "1": "all right"}
    lines = [f"| sequences, 256 tokens each | {' | '.join(shares.values())} |", "|---|" + "---|" * len(shares)]
    for count in (1, 4, 16, 64, 256, 512):
        found = (results.side("drafts", share, f"x{count}") for share in shares)
        cells = (
            f"{side['speedup']:.2f}x, {side['acceptance']:.2f} accepted" if side else "not measured" for side in found
        )
        lines.append(f"| {count} | {' | '.join(cells)} |")
    return lines


def memory_table(results: "Results") -> list[str]:
    """long_sequences.py: peaks in GB."""
    lines = ["| | generation planned | measured | update planned | measured |", "|---|---|---|---|---|"]
    for label, run, case in (
        ("1.5B, all parameters", "long-1.5b", "1.5b"),
        ("7B, LoRA of rank 32, 2 prompts", "long-7b", "7b-lora"),
    ):
        found = results.side(run, "lockstep", case)
        cells = (
            _number(found, f"{kind}_gb/{phase}", 1) for phase in ("gen", "update_actor") for kind in ("planned", "peak")
        )
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


CLASSES = (
    "products",
    "attention",
    "log-prob head",
    "norms and element-wise",
    "gradient sums",
    "optimizer",
    "copies",
    "host gaps",
    "step",
)
"""Of kernels, in train_profile.py."""


def profile_table(results: "Results") -> list[str]:
    runs = {"1.5B, one row of 33,024 tokens": "profile-1.5b", "7B, 32 rows of 512 tokens": "profile-7b"}
    lines = [f"| | {' | | '.join(runs)} | |", "|---|" + "---|" * (2 * len(runs))]
    for name in CLASSES:
        cells = []
        for run in runs.values():
            found = results.side(run, name)
            none = "0.0 ms" if results.side(run, "step") else "not measured"
            cells += [f"{_number(found, 'ms', 1)} ms" if found else none]
            cells += [f"{found['tflops']:.0f} TFLOP/s" if found and "tflops" in found else ""]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


PHASED = {
    "0.5B, 256 requests": "phases-0.5b",
    "Gated DeltaNet hybrid, 1.5B, 128 requests": "phases-hybrid",
    "a quarter of Qwen3-30B-A3B's layers, 128 requests": "phases-moe",
}


def phases_table(results: "Results") -> list[str]:
    """rollout_profile.py."""
    lines = [
        "| 256 + 256 tokens | rollout | prefill | of it kernels | decode step | of it kernels |",
        "|---|---|---|---|---|---|",
    ]
    for label, run in PHASED.items():
        if (usual := results.side(run, "usual")) is None:
            lines.append(f"| {label} | not measured | | | | |")
            continue
        prefill, decode = (results.found[run]["figures"][""][name] for name in ("prefill", "decode"))
        of_prefill = f"{prefill['seconds']:.2f} s | {prefill['kernel_ms'] * prefill['steps'] / 1e3:.2f} s"
        of_step = f"{decode['step_ms']:.2f} ms | {decode['kernel_ms']:.2f} ms"
        lines.append(f"| {label} | {usual['seconds']:.2f} s | {of_prefill} | {of_step} |")
    return lines


def readme_table(results: "Results") -> list[str]:
    header = ["| | Lockstep | peer | faster by |", "|---|---|---|---|"]
    rows = [row for name in ("gpu", "families", "sft", "cpu") for row in ROWS[name] if row.short]
    return [*header, *(row.text(results, row.short) for row in rows)]


def controller_table(results: "Results") -> list[str]:
    lines = ["| | seconds |", "|---|---|"]
    for label, side in (("local", "local"), ("Ray, 2 workers, cluster started by the command", "ray x2")):
        found = results.side("startup", side)
        lines.append(f"| command to the end of the first step, {label} | {_number(found, 'first_step_s', 1)} |")
    found = results.side("dispatch", "lockstep")
    for label, key in (
        ("64 MB to four workers and back", "there_and_back_s"),
        ("the same bytes with plain Ray actors", "plain_s"),
        ("the same bytes with one `ray.put` and `get`", "put_get_s"),
    ):
        lines.append(f"| {label} | {_number(found, key, 3)} |")
    found = results.side("large-step", "lockstep")
    for label, key in (
        ("16,384 rows of up to 33,792 tokens, 4,096 on average: advantages", "advantages_s"),
        ("their metrics", "metrics_s"),
        ("their mini-batches for 512 ranks", "lay_out_s"),
        ("serialisation for the ranks", "send_s"),
    ):
        lines.append(f"| {label} | {_number(found, key, 1)} |")
    if found:
        lines.append(
            f"| memory for all of it | {found['peak_gb']:.1f} GB for {found['real_gb']:.1f} GB of tokens and numbers |"
        )
    return lines


def cluster_table(results: "Results") -> list[str]:
    lines = [
        "| ranks | step | controller | share | forming batches | serialisation | calls | sent, received | scoring, one core |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for ranks in (8, 64, 256, 512, 1024):
        if (found := results.side("cluster", str(ranks))) is None:
            lines.append(f"| {ranks:,} | not measured | | | | | | | |")
            continue
        seconds = (f"{found[key]:.1f} s" for key in ("form_s", "serialise_s", "calls_s"))
        share = f"{found['share']:.1%}, {found['share_with_scoring']:.1%} with scoring"
        step = f"{found['step_s']:,.0f} s | {found['controller_s']:.1f} s | {share}"
        moved = f"{found['sent_gb']:.2f}, {found['received_gb']:.2f} GB"
        lines.append(f"| {ranks:,} | {step} | {' | '.join(seconds)} | {moved} | {found['score_s']:.1f} s |")
    return lines


def _number(figures: Side | None, key: str, digits: int) -> str:
    return f"{figures[key]:.{digits}f}" if figures and key in figures else "not measured"


def demo_table(results: "Results") -> list[str]:
    found = results.side("demo", "lockstep") or {}
    lines = ["| | before | after | steps | seconds |", "|---|---|---|---|---|"]
    if found:
        accuracies = f"{found['val_before']:.1%} | {found['val_after']:.1%}"
        lines.append(f"| accuracy on held-out sums | {accuracies} | {found['steps']:.0f} | {found['seconds']:.0f} |")
    return lines


PHASES = {
    "generate": "generate",
    "sleep": "sleep (level 2)",
    "train": "train",
    "wake weights": "wake weights",
    "update": "update",
    "checksums": "checksums",
    "wake cache": "wake KV cache",
    "canary": "canary",
}


def cycle_table(results: "Results") -> list[str]:
    shapes = {"0.5B": "hybrid-0.5b", "7B": "hybrid-7b"}
    sizes = {shape: _number(results.side(run, "weights"), "gb", 2) for shape, run in shapes.items()}
    header = " | ".join(
        f"{shape} ({size} GB) | GiB used at its end, second and last cycle" for shape, size in sizes.items()
    )
    lines = [f"| phase | {header} |", "|---|---|---|---|---|"]
    for phase, label in PHASES.items():
        cells = []
        for run in shapes.values():
            found = results.side(run, phase)
            used = ", ".join(_number(found, key, 2) for key in ("second_gib", "last_gib"))
            cells += [f"{_number(found, 'seconds', 2)} s", used]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


# fmt: off
LIMITS: list[tuple[str, str, str, str, str, Callable[[Side], float]]] = [
    ("0.5B, 256 x (256 + 256) tokens", "65 TFLOP; 2.2 GB per step", "0.21 s", "rollout-0.5b", SMALL, lambda f: 65536 / f[TOKENS]),
    ("7B, 256 x (256 + 256) tokens", "855 TFLOP; 21 GB per step", "2.7 s", "rollout-7b", LARGE, lambda f: 65536 / f[TOKENS]),
    ("training step, 0.5B, 16,384 tokens", "43 TFLOP", "0.055 s", "train", "", lambda f: f["ms"] / 1e3),
    ("update of the GRPO step, 74,000 tokens", "212 TFLOP", "0.27 s", "grpo", "", lambda f: f["update_actor_s"]),
]
# fmt: on
"""What is computed, its work, the seconds that 790 TFLOP/s and 4.3 TB/s allow, and the run, case and seconds measured."""


def limits_table(results: "Results") -> list[str]:
    lines = ["| | compute and memory traffic | lower bound | measured |", "|---|---|---|---|"]
    for label, work, bound, run, case, seconds in LIMITS:
        found = results.side(run, "lockstep", case)
        lines.append(f"| {label} | {work} | {bound} | {f'{seconds(found):.3g} s' if found else 'not measured'} |")
    return lines


Table = Callable[["Results"], list[str]]
TABLES: dict[str, Table] = {
    **{name: partial(comparison, name) for name in ROWS},
    "readme": readme_table,
    "controller": controller_table,
    "cluster": cluster_table,
    "demo": demo_table,
    "cycle": cycle_table,
    "fp8": fp8_table,
    "exact": exact_table,
    "drafts": drafts_table,
    "ragged": ragged_table,
    "learning": learning_table,
    "memory": memory_table,
    "profile": profile_table,
    "limits": limits_table,
    "phases": phases_table,
}


def origins(results: "Results", names: Iterable[str]) -> list[str]:
    """One line per commit and machine: when and where the named runs were measured."""
    groups: dict[str, list[str]] = {}
    for name in names:
        result = results.found[name]
        busy = [f"load {result['load']:.1f} per core"] if (result["load"] or 0.0) > 0.5 else []
        versions = [f"{side_name(package)} {version}" for package, version in result["versions"].items()]
        origin = ", ".join([result["machine"], result["date"], f"commit {result['commit']}", *busy, *versions])
        groups.setdefault(origin, []).append(name)
    return [f"- {', '.join(members)}: {origin}" for origin, members in groups.items()]


def filled(text: str, results: "Results", tables: dict[str, Table] = TABLES) -> str:
    """The page with every marked table written from the results, and below it where its rows were measured."""

    def table(match: re.Match[str]) -> str:
        name = match[1]
        if name not in tables:
            raise ValueError(f"report.py has no table {name}; it has {', '.join(sorted(tables))}")
        results.used = []
        lines = tables[name](results)
        if not results.used:
            lines = ["Not measured yet."]
        elif name != "readme":
            lines += ["", "Measured on:", *origins(results, results.used)]
        return "\n".join([f"<!-- report {name} -->", "", *lines, "", "<!-- end -->"])

    return re.sub(r"<!-- report (\S+) -->.*?<!-- end -->", table, text, flags=re.S)


def write_tables(results: "Results", pages: Sequence[Path] = PAGES) -> None:
    for page in pages:
        page.write_text(filled(page.read_text(), results))
