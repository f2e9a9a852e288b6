"""`lockstep chat` over a pipe: answers, commands, errors."""

import io
from pathlib import Path

import fsspec
import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from lockstep import cli
from lockstep.policy import Policy
from lockstep.trainer.run.checkpoint import CheckpointStore
from tests.tiny import save_tiny_model

GREEDY = ["--temperature", "0", "--max-tokens", "40"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("chat") / "model")


def chat(monkeypatch: pytest.MonkeyPatch, lines: list[str], *arguments: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return cli.main(["chat", *arguments])


def test_answers_are_those_of_generate(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    CheckpointStore(run).save(2, lambda folder: None)
    CheckpointStore(run).save(3, lambda folder: (folder / "actor").mkdir())
    (run / "global_step_3" / "actor" / "huggingface").symlink_to(model)
    shown: list[str] = []
    monkeypatch.setattr("lockstep.chat._printable", lambda text: shown.append(text) or text)
    lines = ["1+1=", "/reset", "1+1=", "/system Add.", "1+1=", "and 2+2=?", "/what", "", "/quit", "1+1="]
    assert chat(monkeypatch, lines, str(run), *GREEDY) == 0
    out, err = capsys.readouterr()
    assert "unknown command /what" in err

    policy = Policy(model)
    user = [{"role": "user", "content": "1+1="}]
    first = policy.generate(user, temperature=0, max_tokens=40)
    told = [{"role": "system", "content": "Add."}, *user]
    second = policy.generate(told, temperature=0, max_tokens=40)
    turns = [*told, {"role": "assistant", "content": second}, {"role": "user", "content": "and 2+2=?"}]
    third = policy.generate(turns, temperature=0, max_tokens=40)
    assert "".join(shown) == first + first + second + third
    assert out == f"{first}\n{first}\n{second}\n{third}\n"


def test_a_stream_is_what_generate_gives(model: Path) -> None:
    policy = Policy(model)
    for seed in (0, 5):
        parts = list(policy.stream("1+1=", max_tokens=50, seed=seed, temperature=0.9))
        assert "".join(parts) == policy.generate("1+1=", max_tokens=50, seed=seed, temperature=0.9)
    assert len(parts) > 1


def test_an_adapter_ends_answers_as_its_base_does(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base")
    (base / "generation_config.json").write_text('{"eos_token_id": [1, 11]}')
    config = LoraConfig(r=2, target_modules=["q_proj"], base_model_name_or_path=str(base))
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(tmp_path / "adapter")
    assert {1, 11} <= set(Policy(tmp_path / "adapter")._load()[2])


def test_a_conversation_longer_than_the_model(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, ["x" * 300, "1+1="], str(model), *GREEDY) == 0
    out, err = capsys.readouterr()
    assert "longer than the model's 256 positions; /reset" in err and out.strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/at/all"], "no such folder"),
        (["{model}/.."], "is neither a model, a checkpoint nor a run: it has no config.json"),
        (["{model}", "--top-p", "2"], "top_p=2.0"),
        (["{model}", "--max-tokens", "0"], "--max-tokens 0: must be 1 or more"),
    ],
)
def test_bad_arguments(
    arguments: list[str],
    message: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert chat(monkeypatch, [], *(word.format(model=model) for word in arguments)) == 2
    assert message in capsys.readouterr().err


def test_a_policy_behind_a_url_keeps_it(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    fsspec.filesystem("memory").put(str(model), "/bucket/policy", recursive=True)
    policy = Policy("memory://bucket/policy")
    assert str(policy.path) == "memory://bucket/policy" and repr(policy) == "Policy('memory://bucket/policy')"
    assert policy.num_tokens("1+1?") > 1
