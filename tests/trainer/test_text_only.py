"""Vision models that are not supported, and rows with images for a text model, end every program with one sentence, before a model
is loaded."""

import json
from pathlib import Path

import pytest

from lockstep.api import train
from lockstep.cli import main
from lockstep.trainer.run.errors import RunError
from tests.tiny import save_tiny_model, tiny_tokenizer, write_rows

VISION = (
    "is a vision model (Mistral3ForConditionalGeneration: config.json has vision_config) of a type that cannot be used"
)
NO_IMAGES = "has 'images', but the model reads no images; give a vision-language model, or remove the column"


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", fail)
    monkeypatch.setattr("transformers.AutoModelForSequenceClassification.from_config", fail)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", 4)


@pytest.fixture
def images(rows: Path) -> Path:
    """The third row has an image, the others an empty list."""
    entries = [json.loads(line) | {"images": []} for line in rows.read_text().splitlines()]
    entries[2]["images"] = ["a.png"]
    file = rows.with_name("images.jsonl")
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return file


@pytest.fixture
def vision(tmp_path: Path) -> Path:
    folder = tmp_path / "vision"
    tiny_tokenizer().save_pretrained(folder)
    config = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


COMMANDS = {
    "ppo": "ppo actor_rollout_ref.model.path={model} data.train_files={rows} trainer.default_local_dir={run} {lengths}",
    "sft": "sft model.path={model} data.train_files={rows} trainer.default_local_dir={run}",
    "rm": "rm model.path={model} data.train_files={rows} trainer.default_local_dir={run}",
    "dpo": "dpo model.path={model} data.train_files={rows} trainer.default_local_dir={run}",
    "generate": "generate model.path={model} data.path={rows} data.output_path={run}.parquet {lengths}",
    "plan": "plan ppo actor_rollout_ref.model.path={model} data.train_files={rows}",
    "chat": "chat {model}",
    "serve": "serve {model} --port 0",
}


def run(name: str, model: Path, rows: Path, *settings: str) -> int:
    lengths = "data.max_prompt_length=16 data.max_response_length=16"
    command = COMMANDS[name].format(model=model, rows=rows, run=rows.parent / "run", lengths=lengths)
    try:
        return main([*command.split(), *settings])
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_vision_model_is_one_sentence(
    name: str, vision: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, vision, rows) == 2
    assert VISION in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("plan", "chat", "serve")])
def test_images_are_one_sentence(name: str, tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name, save_tiny_model(tmp_path / "model"), images) == 2
    assert f"{images}, row 2 {NO_IMAGES}" in capsys.readouterr().err


@pytest.mark.parametrize("name, key", [("ppo", "actor_rollout_ref.actor.strategy"), ("sft", "model.strategy")])
def test_a_training_engine_without_images_is_one_sentence(
    name: str, key: str, vision: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("megatron.core")
    config = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {}}
    (vision / "config.json").write_text(json.dumps(config))
    assert run(name, vision, images, f"{key}=megatron") == 2
    problem = f"row 2 has 'images', but {key}=megatron reads text alone; set {key}=fsdp, or remove the column"
    assert problem in capsys.readouterr().err


def test_the_python_api_says_the_same(vision: Path, tmp_path: Path) -> None:
    data = [{"prompt": "1+1=", "answer": "2", "data_source": "openai/gsm8k"}]
    with pytest.raises((ValueError, RunError), match=r"is a vision model"):
        train(str(vision), data, run_dir=tmp_path / "run")
    picture = {"prompt": "1+1=", "images": ["a.png"], "data_source": "x", "reward_model": {"ground_truth": "2"}}
    with pytest.raises((ValueError, RunError), match=rf"row 0 {NO_IMAGES}"):
        train(
            str(save_tiny_model(tmp_path / "model")),
            [picture],
            run_dir=tmp_path / "run",
            max_prompt_length=16,
            max_response_length=16,
        )
