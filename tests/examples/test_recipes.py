"""examples/recipes and docs/recipes: each recipe fits its GPUs, its page shows the plan, and its commands train."""

import asyncio
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lockstep import cli
from lockstep.agents.tools.load import load_tools
from lockstep.config import checks
from lockstep.config.commandline import config_from_command_line
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.plan.estimate import model_shape
from lockstep.trainer import main_ppo
from tests.hub import use_hub, write_cache
from tests.programs import run_python
from tests.tiny import save_tiny_model, save_tiny_moe

if TYPE_CHECKING:
    from tests.shared_processes import SharedProcesses

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "examples/recipes").glob("*.yaml"))
NAMES = [path.stem for path in RECIPES]
MARGIN = 0.92
"""A recipe needs at most this share of its GPU's memory: the plan is off by some percent, and so are GPUs."""

SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings"),
)
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(SIZES, sizes)) | {"tie_word_embeddings": False} | others
    for name, sizes, others in (
        (
            "Qwen/Qwen2.5-0.5B-Instruct",
            (896, 4864, 24, 14, 2, 151936, 32768),
            {"model_type": "qwen2", "tie_word_embeddings": True},
        ),
        (
            "Qwen/Qwen2.5-1.5B-Instruct",
            (1536, 8960, 28, 12, 2, 151936, 32768),
            {"model_type": "qwen2", "tie_word_embeddings": True},
        ),
        ("Qwen/Qwen2.5-7B", (3584, 18944, 28, 28, 4, 152064, 131072), {"model_type": "qwen2"}),
        ("Qwen/Qwen2.5-7B-Instruct", (3584, 18944, 28, 28, 4, 152064, 32768), {"model_type": "qwen2"}),
        ("Qwen/Qwen2.5-32B-Instruct", (5120, 27648, 64, 40, 8, 152064, 32768), {"model_type": "qwen2"}),
        ("Qwen/Qwen2.5-32B", (5120, 27648, 64, 40, 8, 152064, 131072), {"model_type": "qwen2"}),
        ("Qwen/Qwen3-8B", (4096, 12288, 36, 32, 8, 151936, 40960), {"model_type": "qwen3", "head_dim": 128}),
        (
            "Qwen/Qwen3-30B-A3B",
            (2048, 6144, 48, 32, 4, 151936, 40960),
            {"model_type": "qwen3_moe", "head_dim": 128}
            | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        ),
    )
}
"""The numbers of the published config.json files."""

MATH = {"problem": "1+1?", "solution": "It is \\boxed{2}.", "level": "Level 1", "type": "Algebra"}
DAPO = {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}}
HOTPOT = {
    "question": "Capital of France?",
    "answer": "Paris",
    "context": {"title": ["Paris", "Oslo"], "sentences": [["Paris is a capital."], ["Oslo too."]]},
}
DATASETS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "openai/gsm8k": ("main", [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(8)]),
    "DigitalLearningGmbH/MATH-lighteval": ("default", [MATH | {"problem": f"{i}+1?"} for i in range(8)]),
    "BytedTsinghua-SIA/DAPO-Math-17k": (
        "default",
        [DAPO | {"prompt": [{"role": "user", "content": f"{i}+1?"}]} for i in range(8)],
    ),
    "Maxwell-Jia/AIME_2024": ("default", [{"Problem": "1+1?", "Answer": 2}] * 2),
    "hotpotqa/hotpot_qa": ("distractor", [HOTPOT | {"question": f"{i}: the capital of France?"} for i in range(8)]),
}
"""Dataset of the Hub -> its config, and examples with the columns that it has."""

REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    right = float(len(solution_str) % 2)\n"
    "    return {'score': right, 'acc': right}\n"
)
SCALED = [
    *("data.train_batch_size=4", "data.max_prompt_length=400", "data.max_response_length=8"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=2"),
    *("actor_rollout_ref.rollout.val_kwargs.n=2", "data.val_max_samples=2"),
    *("trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.save_freq=-1", "trainer.device=cpu"),
    *("trainer.nnodes=1", "trainer.default_local_dir=run"),
]
"""Settings of every recipe, to train two steps of a tiny model on CPU."""
TWO_WORKERS = ["trainer.n_gpus_per_node=2"]
EMBEDDED = ["actor_rollout_ref.rollout.name=embedded", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
"""For vLLM, which has an environment and tests of its own: tensor parallelism of the embedded engine."""
ALSO_SCALED: dict[str, list[str]] = {
    "gsm8k_one_gpu": [],
    "lora_7b_24gb": ["actor_rollout_ref.model.lora_rank=4"],
    "grpo_7b_8gpu": TWO_WORKERS,
    "grpo_32b_vllm": [*TWO_WORKERS, *EMBEDDED],
    "dapo_32b": [
        *(*TWO_WORKERS, *EMBEDDED, "data.gen_batch_size=6"),
        *("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "algorithm.filter_groups.max_num_gen_batches=0"),
        *("reward_model.reward_kwargs.overlong_buffer_cfg.len=2", "custom_reward_function.path=reward.py"),
    ],
    "long_context_32k": [
        *(*TWO_WORKERS, "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"),
        "reward_model.reward_kwargs.overlong_buffer_cfg.len=2",
    ],
    "search_agent": [*TWO_WORKERS, "actor_rollout_ref.rollout.agent.num_workers=0"],
    "moe_30b_a3b": [*TWO_WORKERS, "actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
}
"""Recipe -> its further settings: recipes for several GPUs run on two CPU processes."""
EXPECTED = {
    "lora_7b_24gb": ["actor/kl_loss"],
    "dapo_32b": ["actor/pg_clipfrac_lower", "val-aux/aime24/overlong_reward/mean@2"],
    "search_agent": ["num_turns/mean"],
    "moe_30b_a3b": ["training/route_mismatch", "actor/route_mismatch"],
}
"""Recipe -> metrics that show what is special about it."""


def page_of(name: str) -> str:
    return (ROOT / "docs/recipes" / f"{name}.md").read_text()


def commands(name: str, start: str) -> list[list[str]]:
    """The words of the page's commands that begin with `start`."""
    blocks = re.findall(r"```bash\n(.*?)```", page_of(name), flags=re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(start)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory from which commands find `examples/`, as in a clone."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checks, "find_spec", lambda name: object())  # vLLM need not be installed
    yield tmp_path
    model_shape.cache_clear()  # models are relative to the directory


@pytest.fixture
def shapes(place: Path) -> None:
    for name, config in SHAPES.items():
        (place / name).mkdir(parents=True)
        (place / name / "config.json").write_text(json.dumps(config))


def test_every_recipe_has_a_page_and_the_index_lists_it() -> None:
    index = (ROOT / "docs/recipes.md").read_text()
    pages = sorted(page.stem for page in (ROOT / "docs/recipes").glob("*.md"))
    assert pages == NAMES == sorted(ALSO_SCALED)
    assert [name for name in NAMES if f"(recipes/{name}.md)" not in index] == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("shapes")
def test_recipe_fits_and_its_page_shows_the_plan(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = commands(name, "lockstep plan ")
    assert words[:5] == ["lockstep", "plan", "grpo", "--config-name", f"examples/recipes/{name}.yaml"]
    assert cli.main(words[1:]) == 0
    shown = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert f"```\n{shown}\n```" in page_of(name)
    peak, memory = map(float, re.findall(r"at most ([\d.]+) of ([\d.]+) GB", shown)[-1])
    assert peak <= MARGIN * memory


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("shapes")
def test_other_sizes_fit_as_the_page_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = commands(name, "lockstep plan ")
    rows = re.findall(r"^\| [^|]+ \| `([^`|]+)` \| (\S+) \| ([\d.]+) \| ([\d.,]+) \|$", page_of(name), flags=re.M)
    assert len(rows) >= 3
    for settings, gpu, peak, seconds in rows:
        words[words.index("--device") + 1] = gpu
        assert cli.main([*words[1:], *settings.split()]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert f"fits on {gpu}: at most {peak} of " in last and f"; about {seconds} s per step" in last


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("place")
def test_training_command_names_the_recipe_and_keeps_its_settings(name: str) -> None:
    for words in commands(name, "lockstep grpo "):
        assert words[2:4] == ["--config-name", f"examples/recipes/{name}.yaml"]
    file = f"examples/recipes/{name}.yaml"
    alone = load_config(PPOConfig, [], config_name=file, run_checks=False)
    assert alone.algorithm.adv_estimator == "grpo"
    assert load_config(PPOConfig, ["algorithm=grpo", *words[4:]], config_name=file, run_checks=False) == replace(
        alone, ray_init=replace(alone.ray_init, address="auto") if words[4:] else alone.ray_init
    )


def write_data(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the page's data commands, with a few examples in place of the published datasets."""
    for repo, (config, examples) in DATASETS.items():
        folder = place / "published" / repo.replace("/", "--")
        folder.mkdir(parents=True)
        splits = "".join(f"\n  - split: {split}\n    path: {split}-*" for split in ("train", "validation", "test"))
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:{splits}\n---\n")
        for split in ("train", "validation", "test"):
            (folder / f"{split}-0.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
        write_cache(place / "hub", repo, folder, "dataset")
    use_hub(monkeypatch, place / "hub", offline=True)
    for words in commands(name, "python examples/data_preprocess/"):
        assert run_python(words[1:]) == 0


def test_search_tool_finds_the_passages_of_the_data_script(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bm25s")
    write_data("search_agent", place, monkeypatch)
    (tool,) = load_tools("examples/tools/search.yaml", None).values()
    response, _, _ = asyncio.run(tool.execute("", {"query_list": ["Which city is Paris?"]}))
    assert str(response.text).startswith("Doc 1 (Title: Paris)\nParis is a capital.")


@pytest.mark.slow
@pytest.mark.usefixtures("no_registrations")
@pytest.mark.parametrize("name", NAMES)
def test_recipe_trains_scaled_down(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch, shared_processes: "SharedProcesses"
) -> None:
    from tests.shared_processes import OnSharedProcesses  # imports Ray

    if name == "lora_7b_24gb":
        pytest.importorskip("bitsandbytes")
    if name == "search_agent":
        pytest.importorskip("bm25s")
    write_data(name, place, monkeypatch)
    (place / "reward.py").write_text(REWARD)
    recipe = load_config(PPOConfig, [], config_name=f"examples/recipes/{name}.yaml", run_checks=False)
    saved = (save_tiny_moe if name.startswith("moe_") else save_tiny_model)(place / "tiny", max_position_embeddings=512)
    shutil.copytree(saved, place / recipe.actor_rollout_ref.model.path)
    words, *_ = commands(name, "lockstep grpo ")
    settings = [*words[2:], *SCALED, *ALSO_SCALED[name]]
    if "trainer.n_gpus_per_node=2" in settings:
        config = config_from_command_line(["algorithm=grpo", f"model={saved}", *settings], PPOConfig)
        assert config is not None
        assert OnSharedProcesses(shared_processes).run(config) == 0
    else:
        assert main_ppo.main(["algorithm=grpo", *settings]) == 0
    steps = [json.loads(line) for line in (place / "run/metrics.jsonl").read_text().splitlines()]
    assert "actor/grad_norm" in steps[-1] and any(key.startswith("val-core/") for key in steps[-1])
    assert [key for key in EXPECTED.get(name, []) if not any(key in step for step in steps)] == []
    assert (place / "run/global_step_2/manifest.json").is_file()
