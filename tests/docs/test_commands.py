"""Every command in the README and the docs runs, on a tiny model and a few rows; hub models are replaced by it.

Commands for many workers are validated and, one per page, run on two CPU processes. Blocks fenced as `sh` are templates
and are not run.
"""

import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import pytest
import yaml

from lockstep import api, cli
from lockstep.config import checks
from lockstep.config.commandline import config_from_command_line
from lockstep.config.compose import load_config
from lockstep.config.placement import controller_of
from lockstep.config.ppo import PPOConfig
from lockstep.config.preference import DPOConfig
from lockstep.config.sft import SFTConfig
from lockstep.config.short_names import RL
from lockstep.plan.estimate import plan_of
from lockstep.plan.hardware import DEVICES
from lockstep.plan.token_budgets import with_token_budgets
from lockstep.trainer import fsdp_sft_trainer, main_dpo, main_rm
from lockstep.trainer.main_ppo import main
from tests.hub import use_hub, write_cache
from tests.judge_server import serve, verdict
from tests.programs import run_python
from tests.tiny import save_tiny_model, save_tiny_moe, write_rows
from tests.tiny_vision import save_tiny_vision_model

if TYPE_CHECKING:
    from tests.shared_processes import SharedProcesses

pytestmark = pytest.mark.first

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "recipes"),
]
"""Those of docs/recipes are run by tests/examples/test_recipes.py."""
RUN_HERE = [page for page in PAGES if page.parent.name != "tutorials"]
"""Tutorials are run from top to bottom (test_tutorials.py)."""
SMALL = [
    "data.train_batch_size=4",
    "data.max_prompt_length=40",
    "data.max_response_length=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.total_training_steps=1",
    "trainer.val_before_train=false",
    "trainer.device=cpu",
]
ONE_PROMPT = ["data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1", "data.val_max_samples=1"]
"""For agents that are programs: each conversation starts one, which takes a second."""


def blocks(language: str) -> list[tuple[str, str]]:
    found = []
    for page in RUN_HERE:
        for block in re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.S):
            found.append((page.name, block.replace("\\\n", " ")))
    return found


LINES = [(page, line) for page, block in blocks("bash") for line in block.splitlines()]
COMMANDS = [(p, line) for p, line in LINES if re.search(r"lockstep (ppo|grpo) |main_ppo", line)]
VIEWS = [(p, line) for p, line in LINES if re.match(r"lockstep (plot|rollouts|timeline) ", line)]
QUICK_START = "checkpoints/gsm8k/qwen2.5-0.5b-instruct-gsm8k-grpo"
OWN_TESTS = ("environments.md", "sft.md", "preference_training.md", "vision.md")
"""Pages whose commands build on each other."""
MANY_WORKERS = re.compile(r"trainer\.(nnodes|n_gpus_per_node)=([2-9]|\d\d)")
TRAINING = [(page, line) for page, line in COMMANDS if not MANY_WORKERS.search(line) and page not in OWN_TESTS]
QUICK_PAGES = ("README.md", "training.md", "lora.md")
"""Their commands train in `make test`, those of all pages in `make test-all`."""
ON_RAY = [(page, line) for page, line in COMMANDS if MANY_WORKERS.search(line)]
ONE_A_PAGE = {page: line for page, line in ON_RAY if "ray_init" not in line}


@pytest.fixture(scope="module")
def judge_url() -> Iterator[str]:
    with serve(lambda body, number: verdict(1 + number % 5)) as server:
        yield server.url


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, judge_url: str) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("docs")
    save_tiny_model(folder / "model")
    for name in ("train.parquet", "test.parquet"):
        write_rows(folder / name, 4)
    ((reward,),) = [re.findall(r"# reward.py\n.*", b, flags=re.S) for _, b in blocks("python") if "# reward.py" in b]
    (folder / "reward.py").write_text(reward)
    conversation = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    (folder / "sft.jsonl").write_text(4 * (json.dumps({"messages": conversation}) + "\n"))
    pair = {"prompt": "1+1?", "chosen": "2", "rejected": "three"}
    (folder / "pairs.jsonl").write_text(4 * (json.dumps(pair) + "\n"))
    (folder / "train.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "It is 2.\n#### 2"}) + "\n")
    (config,) = [b for _, b in blocks("yaml") if b.startswith("# run.yaml")]
    (folder / "run.yaml").write_text(config)
    ((row,),) = [re.findall(r"{.*}\n", block) for page, block in blocks("json") if page == "data.md"]
    (folder / "rows.jsonl").write_text(4 * row)
    files = {
        "my_reward.py": "python",
        "tools.yaml": "yaml",
        "functions.py": "python",
        "agent.py": "python",
        "verl_loop.py": "python",
    }
    files |= {"ensemble.yaml": "yaml", "mixed.py": "python", "remote.py": "python", "grade.jinja": "jinja"}
    for name, language in files.items():
        (content,) = [block for _, block in blocks(language) if re.match(rf"(# |{{# ){name}", block)]
        (folder / name).write_text(content)
    shutil.copytree(folder / "model", folder / "first" / "global_step_100" / "actor" / "huggingface")
    fill_hub_cache(folder)
    return {
        "s3://bucket": fill_bucket(folder),
        "run.yaml": str(folder / "run.yaml"),
        "$MODEL": str(folder / "model"),
        "$MOE": str(save_tiny_moe(folder / "moe")),
        "$VLM": str(save_tiny_vision_model(folder / "vlm")),
        "$DATA": str(folder),
        "$RUN": str(folder),
        "$RAW": str(folder),
        "$OUT": str(folder / "out"),
        "Qwen/Qwen2.5-0.5B-Instruct": str(folder / "model"),
        "HuggingFaceTB/SmolLM2-135M-Instruct": str(folder / "model"),
        "data/gsm8k": str(folder),
        QUICK_START: str(folder / "first"),
        "$JUDGE": judge_url,
        "$PLUGINS": str(ROOT / "examples" / "plugins"),
    }


def fill_hub_cache(folder: Path) -> None:
    """The models and datasets that commands name on the Hub, in the cache `hub` of the folder."""
    commands = " ".join(command for _, command in COMMANDS)
    for repo in sorted(set(re.findall(r"path=([A-Z][\w-]+/[\w.-]+)", commands))):
        write_cache(folder / "hub", repo, folder / "model")
    entries = " ".join(re.findall(r"(?:train|val)_files=(\S+)", commands))
    for repo, config in sorted(set(re.findall(r"(?<![\w/$])([A-Za-z][\w-]+/[\w.-]+)(?::(\w+):)?", entries))):
        files = folder / "datasets" / repo.replace("/", "--")
        (files / "data").mkdir(parents=True)
        (files / "README.md").write_text(f"---\nconfigs:\n- config_name: {config or 'default'}\n---\n")
        for split in ("train", "test"):
            shutil.copy(folder / f"{split}.parquet", files / "data" / f"{split}-00000-of-00001.parquet")
        write_cache(folder / "hub", repo, files, "dataset")


def fill_bucket(folder: Path) -> str:
    """A model and data behind a URL."""
    remote = fsspec.filesystem("memory")
    remote.put(f"{folder}/model", "/bucket/qwen", recursive=True)
    for split in ("train", "test"):
        remote.pipe(f"/bucket/data/{split}.jsonl", write_rows(folder / "bucket.jsonl", 4).read_bytes())
    return "memory://bucket"


@pytest.fixture(scope="module", autouse=True)
def tiny_parts(places: dict[str, str]) -> None:
    """What the script of tiny_model.md writes."""
    (command,) = [line for page, line in LINES if "make_tiny_model.py" in line]
    program, *rest = filled(command, places)[1:]
    runpy.run_path(str(ROOT / program))["main"](rest)


def filled(command: str, places: dict[str, str]) -> list[str]:
    for name, place in places.items():
        command = command.replace(name, place)
    return [word for word in shlex.split(command) if not re.match(r"[A-Z]+=", word)]


def arguments(command: str, places: dict[str, str]) -> list[str]:
    """The arguments after the program's name."""
    words = filled(command, places)
    programs = ("ppo", "grpo", "lockstep.trainer.main_ppo", "sft", "lockstep.trainer.fsdp_sft_trainer")
    programs += ("rm", "dpo", "lockstep.trainer.main_dpo")
    start = next(i for i, word in enumerate(words) if word in programs)
    return ["algorithm=grpo"] * (words[start] == "grpo") + words[start + 1 :]


def made_small(words: list[str], *small: str) -> list[str]:
    """The arguments with other settings, which replace those that the command gives by short names."""
    replaced = [name for name, key in RL.items() if any(setting.startswith(f"{key}=") for setting in small)]
    return [*(word for word in words if word.partition("=")[0] not in replaced), *small]


def variables(places: dict[str, str]) -> dict[str, str]:
    return {name.removeprefix("$"): place for name, place in places.items() if name.startswith("$")}


def marks_of(page: str) -> list[pytest.MarkDecorator]:
    if page == "deepspeed.md":
        return [pytest.mark.deepspeed]
    return [] if page in QUICK_PAGES else [pytest.mark.slow]


@pytest.mark.usefixtures("no_registrations")
@pytest.mark.parametrize(
    ("page", "command"),
    [pytest.param(page, line, id=f"{page}-{i}", marks=marks_of(page)) for i, (page, line) in enumerate(TRAINING)],
)
def test_training_commands_train(
    page: str, command: str, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "load_in_4bit=true" in command:
        pytest.importorskip("bitsandbytes")
    if "react_agent" in command:
        pytest.importorskip("langgraph")
    if "strategy=deepspeed" in command:
        pytest.importorskip("deepspeed")
    monkeypatch.chdir(tmp_path)  # for relative output folders
    for name, value in variables(places).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # for programs of commands
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "copies"))
    use_hub(monkeypatch, Path(places["$DATA"]) / "hub", offline=True)
    command = command.replace("profile_steps=[3]", "profile_steps=[1]")
    small = [*SMALL, *(ONE_PROMPT if "agent.program" in command else [])]
    small.append(f"trainer.default_local_dir={tmp_path}/run")
    assert main(made_small(arguments(command, places), *small)) == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_text()


SHAPES = {  # vocabulary, width, inner, layers, heads, key heads
    "Qwen/Qwen2.5-0.5B-Instruct": (151936, 896, 4864, 24, 14, 2),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (49152, 576, 1536, 30, 9, 3),
}
"""Sizes of the models that commands name. $MODEL, which is the reader's, is planned as the first one."""
GPU = "A100-80G"
"""The GPU of a command, if its page does not say more."""
TRAINS = re.compile(r"lockstep (ppo|grpo|sft|rm|dpo) |lockstep\.trainer\.(main_ppo|fsdp_sft_trainer|main_rm|main_dpo)")
PROGRAMS = {"main_ppo": "ppo", "fsdp_sft_trainer": "sft", "main_rm": "rm", "main_dpo": "dpo"}
PLANNED = [
    (page, line) for page, line in LINES if TRAINS.search(line) and "trainer.val_only" not in line and "..." not in line
]


@pytest.fixture(scope="module")
def shapes(places: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with a model's sizes instead of the tiny one."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    found = {}
    for name, sizes in SHAPES.items():
        folder = tmp_path_factory.mktemp("shape")
        config = dict(zip((*names, "num_key_value_heads"), sizes)) | {
            "model_type": "qwen2",
            "tie_word_embeddings": True,
        }
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text("{}")
        found[name] = str(folder)
    model = found["Qwen/Qwen2.5-0.5B-Instruct"]
    others = ("$MODEL", "$OUT/rm", "$OUT", "$RUN/first/global_step_100", "s3://bucket/qwen")
    return (
        dict.fromkeys(others, model)
        | found
        | {name: place for name, place in places.items() if name not in (*others, *found)}
    )


@pytest.mark.parametrize(("page", "command"), PLANNED, ids=[f"{p}-{i}" for i, (p, _) in enumerate(PLANNED)])
def test_training_commands_fit(
    page: str,
    command: str,
    shapes: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables(shapes).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(checks, "find_spec", lambda name: object())  # what need not be installed
    words = filled(command.partition(" | ")[0], shapes)
    program = next(
        word for word in words if word in ("ppo", "grpo", "sft", "rm", "dpo") or word.startswith("lockstep.trainer")
    )
    rest = words[words.index(program) + 1 :]
    processes = [word.replace("_", "-") for word in words if word.startswith("--nproc_per_node=")]
    small = [word for word in rest if not word.startswith("ray_init.")]
    code = cli.main(["plan", PROGRAMS.get(program.rpartition(".")[2], program), *small, *processes, "--device", GPU])
    out, err = capsys.readouterr()
    assert code == 0, err or out.splitlines()[-1]


def test_python_example_of_the_readme_fits(
    shapes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[PPOConfig] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "run_ppo", lambda config, on_step=None: configs.append(config) or 0)
    ((_, text),) = [block for block in blocks("python") if block[0] == "README.md"]
    for name, place in shapes.items():
        text = text.replace(name, place)
    exec(text, {})
    (config,) = configs
    device = DEVICES[GPU]
    plan = plan_of(with_token_budgets(config, device), device)
    assert plan.fits and plan.job.prompts == 64 and plan.job.models[0].updates == 1


def test_sft_trains_the_model_that_grpo_starts_from(places: dict[str, str], tmp_path: Path) -> None:
    lines = [line for page, b in blocks("bash") if page == "sft.md" for line in b.splitlines()]
    sft, torchrun, grpo = (arguments(line, places | {"$OUT": str(tmp_path / "sft")}) for line in lines)
    small = ["data.train_batch_size=4", "trainer.total_training_steps=1", "trainer.device=cpu"]
    assert load_config(SFTConfig, torchrun).data.train_batch_size == 64
    assert fsdp_sft_trainer.main([*sft, *small]) == 0
    assert "val/loss" in json.loads((tmp_path / "sft" / "metrics.jsonl").read_text())
    assert main([*grpo, *SMALL, f"trainer.default_local_dir={tmp_path}/grpo"]) == 0
    assert (tmp_path / "grpo" / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_pictures_are_made_and_trained_on(
    places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line for page, b in blocks("bash") if page == "vision.md" for line in b.splitlines()]
    here = places | {"$OUT": str(tmp_path)}
    script, train = lines
    monkeypatch.chdir(ROOT)
    assert run_python(filled(script, here)[1:]) == 0
    longer = [setting for setting in SMALL if "max_prompt_length" not in setting]
    assert main(made_small(arguments(train, here), *longer)) == 0
    assert "actor/pg_loss" in (tmp_path / "shapes" / "metrics.jsonl").read_text()


def test_reward_model_scores_ppo_and_dpo_trains(places: dict[str, str], tmp_path: Path) -> None:
    lines = [line for page, b in blocks("bash") if page == "preference_training.md" for line in b.splitlines()]
    rm, ppo, dpo, torchrun = (arguments(line, places | {"$OUT": str(tmp_path)}) for line in lines)
    small = ["data.train_batch_size=4", "trainer.total_training_steps=1", "trainer.device=cpu"]
    assert load_config(DPOConfig, torchrun).data.train_batch_size == 64
    assert main_rm.main([*rm, *small]) == 0
    assert "val/accuracy" in json.loads((tmp_path / "rm" / "metrics.jsonl").read_text())
    assert main([*ppo, *SMALL, f"trainer.default_local_dir={tmp_path}/ppo"]) == 0
    assert json.loads((tmp_path / "ppo" / "metrics.jsonl").read_text())["critic/score/max"] != 0
    assert main_dpo.main([*dpo, *small]) == 0
    assert "val/rewards/accuracies" in json.loads((tmp_path / "dpo" / "metrics.jsonl").read_text())


@pytest.mark.parametrize(
    ("page", "command"),
    [
        pytest.param(page, line, id=f"{page}-{i}", marks=[pytest.mark.deepspeed] if page == "deepspeed.md" else [])
        for i, (page, line) in enumerate(ON_RAY)
    ],
)
def test_commands_for_many_workers_compose(
    page: str, command: str, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables(places).items():
        monkeypatch.setenv(name, value)
    config = config_from_command_line(arguments(command, places), PPOConfig)
    assert config is not None and controller_of(config) == "ray"


@pytest.mark.parametrize(
    "command",
    [pytest.param(line, id=page, marks=[pytest.mark.slow, *marks_of(page)]) for page, line in ONE_A_PAGE.items()],
)
def test_one_command_per_page_trains_on_ray(
    command: str,
    places: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shared_processes: "SharedProcesses",
) -> None:
    from tests.shared_processes import OnSharedProcesses  # imports Ray

    if "strategy=deepspeed" in command:
        pytest.importorskip("deepspeed")
    for name, value in variables(places).items():
        monkeypatch.setenv(name, value)
    use_hub(monkeypatch, Path(places["$DATA"]) / "hub", offline=True)
    small = [*SMALL, "trainer.nnodes=1", "trainer.n_gpus_per_node=2", f"trainer.default_local_dir={tmp_path}/run"]
    config = config_from_command_line(made_small(arguments(command, places), *small), PPOConfig)
    assert config is not None
    assert OnSharedProcesses(shared_processes).run(config) == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_text()


def test_yaml_blocks_are_yaml_and_pools_compose(places: dict[str, str]) -> None:
    pools = 0
    for page, text in blocks("yaml"):
        tree = yaml.safe_load(text)
        assert isinstance(tree, dict | list), page
        if "resource_pool_spec" in tree:
            paths = [
                f"actor_rollout_ref.model.path={places['$MODEL']}",
                f"data.train_files={places['$DATA']}/train.parquet",
            ]
            overrides = [line.replace(": ", "=", 1) for line in text.splitlines()]
            load_config(PPOConfig, [*paths, *overrides])
            pools += 1
    assert pools == 2


def test_templates_are_valid_shell() -> None:
    for page, text in blocks("sh"):
        subprocess.run(["bash", "-n", "-c", text], check=True)
        assert page in (
            "agents.md",
            "async_rollout.md",
            "cluster.md",
            "dashboard.md",
            "endpoint.md",
            "environments.md",
            "install.md",
            "large_models.md",
            "long_sequences.md",
            "lora.md",
            "quantization.md",
            "recipes.md",
            "replay.md",
            "rollout.md",
            "servers.md",
            "speculation.md",
        )


RAW_ROWS = {
    "dapo.jsonl": {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}},
    "aime_2025.jsonl": {"id": 0, "problem": "1+1?", "answer": "2"},
    "full_hh_rlhf.jsonl": {
        "prompt": "\n\nHuman: 1+1?\n\nAssistant:",
        "response": " 2",
        "chosen": " 2",
        "rejected": " 3",
    },
    "geo3k.jsonl": {"problem": "<image>Find x.", "answer": "4", "images": ["a.png"]},
    "apps.jsonl": {"problem_id": 0, "question": "1+1?", "input_output": '{"inputs": [""], "outputs": ["2"]}'},
}
"""Files in $RAW beside train.jsonl, with the columns of the published datasets."""
PREPROCESSING = [line for _, line in LINES if "data_preprocess" in line]


@pytest.mark.parametrize("command", PREPROCESSING, ids=[Path(line.split()[1]).stem for line in PREPROCESSING])
def test_data_scripts_write_rows(
    command: str, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = Path(places["$RAW"])
    published = tmp_path / "published"
    (published / "main").mkdir(parents=True)
    splits = "".join(f"\n  - split: {name}\n    path: main/{name}-*" for name in ("train", "test"))
    (published / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:{splits}\n---\n")
    for split in ("train", "test"):
        shutil.copy(raw / "train.jsonl", published / "main" / f"{split}-00000-of-00001.jsonl")
    write_cache(tmp_path / "hub", "openai/gsm8k", published, "dataset")
    use_hub(monkeypatch, tmp_path / "hub", offline=True)
    for name, row in RAW_ROWS.items():
        (raw / name).write_text(2 * (json.dumps(row) + "\n"))
    words = filled(command, places | {"$OUT": str(tmp_path), "data/gsm8k": str(tmp_path)})
    monkeypatch.chdir(ROOT)
    assert run_python(words[1:]) == 0
    assert Path(words[words.index("--output") + 1]).exists()


@pytest.fixture(scope="module")
def finished_runs(places: dict[str, str]) -> None:
    """The runs that the pages look at, all of them copies of one."""
    folder = Path(places["$RUN"])
    dumps = [f"trainer.{kind}_data_dir={folder}/first/{kind}" for kind in ("rollout", "validation")]
    command = [f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/test.parquet", *dumps]
    command += [f"actor_rollout_ref.model.path={folder}/model", "algorithm=grpo", *SMALL, "trainer.save_freq=0"]
    command += ["trainer.rollout_token_data=true"]
    command += [
        "trainer.total_training_steps=2",
        "trainer.total_epochs=2",
        "trainer.test_freq=1",
        "trainer.resume_mode=disable",
    ]
    assert main([*command, f"trainer.default_local_dir={folder}/first"]) == 0
    for copy in ("second", "tiny/run"):
        shutil.copytree(folder / "first", folder / copy)


@pytest.mark.parametrize(("page", "command"), VIEWS, ids=[f"{p}-{i}" for i, (p, _) in enumerate(VIEWS)])
def test_plot_and_rollouts_commands(
    page: str, command: str, places: dict[str, str], finished_runs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    command = re.sub(r"--step \d+", "--step 2", command.partition("#")[0])
    assert cli.main(filled(command, places)[1:]) == 0
    out, err = capsys.readouterr()
    assert out and "lockstep" not in err


def test_memory_table_by_model_is_its_arithmetic() -> None:
    rows = re.findall(r"^\| [\d.]+B \| ([\d.]+) B \|(.*)\|$", (ROOT / "docs/plan.md").read_text(), flags=re.M)
    assert len(rows) == 6
    for parameters, cells in rows:
        sizes = [float(cell.strip().removesuffix(" GB")) for cell in cells.split("|")[:4]]
        assert sizes == [pytest.approx(float(parameters) * number, abs=0.06) for number in (18, 8, 10, 16 / 8 + 2)]


def test_pages_link_to_existing_files() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+?)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_pages_name_existing_files() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    paths = re.findall(r"`(lockstep/[\w/]+\.py)`", page + (ROOT / "README.md").read_text())
    assert len(paths) >= 8
    for path in paths:
        assert (ROOT / path).is_file(), path


def test_the_source_tree_names_existing_files() -> None:
    (tree,) = re.findall(r"```\n(lockstep/\n.*?)```", (ROOT / "docs/architecture.md").read_text(), flags=re.S)
    folders: list[str] = []
    paths = []
    for line in tree.splitlines():
        columns = re.split(" {2,}", line.strip())
        names = list(itertools.takewhile(lambda part: re.fullmatch(r"[\w./]+(\.py|/)", part), columns))
        folders[(len(line) - len(line.lstrip())) // 2 :] = []
        paths += ["".join(folders) + name for name in names]
        folders.append(names[0])
    assert len(paths) > 100
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_documented_estimator_trains(places: dict[str, str], tmp_path: Path) -> None:
    ((text,),) = [re.findall(r"# centred.py\n.*", b, flags=re.S) for _, b in blocks("python") if "# centred.py" in b]
    (tmp_path / "centred.py").write_text(text)
    data, model = places["$DATA"], places["$MODEL"]
    command = [f"data.train_files={data}/train.parquet", f"actor_rollout_ref.model.path={model}"]
    command += [f"algorithm.adv_estimator={tmp_path}/centred.py:centred", "actor_rollout_ref.rollout.n=2"]
    assert main([*command, *SMALL, f"trainer.default_local_dir={tmp_path}/run"]) == 0
