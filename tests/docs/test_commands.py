"""Every command in the README and the docs runs, on a tiny model and a few rows."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.trainer.main_ppo import main
from tests.tiny import save_tiny_model, write_rows

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SMALL = [
    "data.train_batch_size=4",
    "data.max_prompt_length=40",
    "data.max_response_length=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.total_training_steps=1",
    "trainer.device=cpu",
]


def blocks(language: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.S):
            found.append((page.name, block.replace("\\\n", " ")))
    return found


TRAINING = [
    (p, line) for p, b in blocks("bash") for line in b.splitlines() if "lockstep ppo" in line or "main_ppo" in line
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("docs")
    save_tiny_model(folder / "model")
    for name in ("train.parquet", "test.parquet"):
        write_rows(folder / name, 4)
    ((reward,),) = [re.findall(r"# reward.py\n.*", b, flags=re.S) for _, b in blocks("python") if "# reward.py" in b]
    (folder / "reward.py").write_text(reward)
    (folder / "train.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "It is 2.\n#### 2"}) + "\n")
    return {
        "$MODEL": str(folder / "model"),
        "$DATA": str(folder),
        "$RUN": str(folder),
        "$RAW": str(folder),
        "$OUT": str(folder / "out"),
    }


def filled(command: str, places: dict[str, str]) -> list[str]:
    for name, place in places.items():
        command = command.replace(name, place)
    return [word for word in shlex.split(command) if not re.match(r"[A-Z]+=", word)]


@pytest.mark.parametrize(("page", "command"), TRAINING, ids=[f"{p}-{i}" for i, (p, _) in enumerate(TRAINING)])
def test_training_commands_train(page: str, command: str, places: dict[str, str], tmp_path: Path) -> None:
    words = filled(command, places)
    overrides = [w for w in words if "=" in w]
    assert main([*overrides, *SMALL, f"trainer.default_local_dir={tmp_path}/run"]) == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_text()


def test_the_data_script_makes_rows(places: dict[str, str], tmp_path: Path) -> None:
    (command,) = [line for _, b in blocks("bash") for line in b.splitlines() if "data_preprocess" in line]
    words = filled(command, places | {"$OUT": str(tmp_path)})
    subprocess.run([sys.executable, *words[1:]], check=True, cwd=ROOT)
    assert (tmp_path / "train.parquet").is_file()


def test_pages_link_to_files_that_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+?)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_names_files_that_exist() -> None:
    for path in re.findall(r"`(lockstep/[\w/]+\.py)`", (ROOT / "README.md").read_text()):
        assert (ROOT / path).is_file(), path


def test_the_documented_estimator_trains(places: dict[str, str], tmp_path: Path) -> None:
    ((text,),) = [re.findall(r"# centred.py\n.*", b, flags=re.S) for _, b in blocks("python") if "# centred.py" in b]
    (tmp_path / "centred.py").write_text(text)
    data, model = places["$DATA"], places["$MODEL"]
    command = [f"data.train_files={data}/train.parquet", f"actor_rollout_ref.model.path={model}"]
    command += [f"algorithm.adv_estimator={tmp_path}/centred.py:centred", "actor_rollout_ref.rollout.n=2"]
    assert main([*command, *SMALL, f"trainer.default_local_dir={tmp_path}/run"]) == 0
