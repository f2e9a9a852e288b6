"""The demo: its problems, reward, warm-up examples, and a very short full run."""

import json
import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep import cli
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.demo import main_demo
from lockstep.demo.main_demo import Algorithm, as_overrides, command_line, demo_folder, training_overrides
from lockstep.demo.model import make_model_folder, make_tokenizer
from lockstep.demo.products import parse_product, split_products
from lockstep.demo.report import plot
from lockstep.demo.reward import compute_score
from lockstep.demo.task import Problem, answer_text, parse_question, split_problems, write_rows
from lockstep.demo.tasks import forgot_carry
from lockstep.demo.warmup import WarmUp, warm_up_settings, write_examples
from lockstep.trainer import fsdp_sft_trainer

pytestmark = pytest.mark.first


@pytest.mark.parametrize(
    "a, b, right, careless", [(47, 85, 132, 22), (12, 34, 46, 46), (55, 55, 110, 0), (91, 18, 109, 9)]
)
def test_careless_answer_forgets_the_carry(a: int, b: int, right: int, careless: int) -> None:
    problem = Problem(a, b)
    assert (problem.right_answer, problem.careless_answer) == (right, careless)
    assert parse_question(problem.question) == problem


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_validation_problems_are_not_in_training_in_either_order(seed: int) -> None:
    train, validation = split_problems(seed)
    assert len(train) + len(validation) == len({*train, *validation}) == 90 * 90
    assert 512 <= len(validation) <= 513
    seen = {frozenset((p.a, p.b)) for p in train}
    assert not any(frozenset((p.a, p.b)) in seen for p in validation)
    assert split_problems(seed) == (train, validation)
    assert split_problems(seed + 1)[1] != validation
    right_anyway = sum(p.careless_answer == p.right_answer for p in validation) / len(validation)
    assert 0.15 < right_anyway < 0.35  # accuracy of a model that never carries: 0.244 over all problems


def test_rows_have_the_columns_of_training_files(tmp_path: Path) -> None:
    write_rows(tmp_path / "new" / "rows.parquet", [Problem(47, 85)], "train")
    assert pq.read_table(tmp_path / "new" / "rows.parquet").to_pylist() == [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": "47+85"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "132"},
            "extra_info": {"split": "train", "index": 0},
        }
    ]


@pytest.mark.parametrize(
    "answer, truth, score, form",
    [
        ("=132", "132", 1.0, 1.0),
        ("=057", "57", 1.0, 1.0),
        ("=022", "132", 0.0, 1.0),
        ("=57", "57", 0.0, 0.0),
        ("132", "132", 0.0, 0.0),
        ("=132=", "132", 0.0, 0.0),
        ("=132\n", "132", 0.0, 0.0),
        ("", "132", 0.0, 0.0),
    ],
)
def test_only_the_correct_number_in_the_correct_format_is_rewarded(
    answer: str, truth: str, score: float, form: float
) -> None:
    assert compute_score("sums", answer, truth) == {"score": score, "acc": score, "form": form}


def test_one_token_per_character_and_two_for_the_template() -> None:
    tokenizer = make_tokenizer()
    messages = [{"role": "user", "content": "47+85"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|user|>47+85<|assistant|>"
    ids = tokenizer.encode(text)
    assert len(ids) == 7
    assert tokenizer.decode(ids, skip_special_tokens=True) == "47+85"
    answered = [*messages, {"role": "assistant", "content": "=132"}]
    assert tokenizer.apply_chat_template(answered, tokenize=False) == text + "=132<|end|>"
    assert tokenizer.encode("4x") == [tokenizer.convert_tokens_to_ids("4"), tokenizer.unk_token_id]


def test_warm_up_rows_mix_careless_and_correct_answers(tmp_path: Path) -> None:
    problems = [Problem(47, 85), Problem(58, 67)]
    assert write_examples(tmp_path / "rows.parquet", problems, WarmUp(steps=9, batch_size=2), seed=0) == 6
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert sorted(row["response"] for row in rows if row["prompt"] == "47+85") == ["=022", "=022", "=132"]
    assert write_examples(tmp_path / "rows.parquet", problems, WarmUp(steps=2, batch_size=2), seed=0) == 4
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist() == rows[:4]


def test_warm_up_trains_the_model(tmp_path: Path) -> None:
    assert make_model_folder(tmp_path / "model", seed=3) < 200_000
    recipe = WarmUp(steps=12, batch_size=32)
    num_rows = write_examples(tmp_path / "rows.parquet", split_problems(seed=3)[0], recipe, seed=3)
    run = tmp_path / "run"
    settings = warm_up_settings(tmp_path / "model", tmp_path / "rows.parquet", num_rows, run, recipe, 3, "cpu")
    assert fsdp_sft_trainer.main(as_overrides(settings)) == 0
    losses = [json.loads(line)["train/loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.3

    tokenizer = make_tokenizer()
    ids = torch.tensor([tokenizer.encode("<|user|>47+85<|assistant|>=022<|end|>")])
    labels = torch.where(torch.arange(ids.shape[1]) < 7, -100, ids)
    folders = (tmp_path / "model", run / "global_step_12" / "huggingface")
    with torch.no_grad():
        fresh, warm = (AutoModelForCausalLM.from_pretrained(f)(input_ids=ids, labels=labels).loss for f in folders)
    assert warm < fresh - 0.3
    assert AutoTokenizer.from_pretrained(folders[1]).chat_template


def test_plot_draws_means_between_zero_and_one() -> None:
    assert plot([0.0, 0.5, 1.0], width=64, height=2, unicode=False).splitlines() == [" 1.0 |  #", " 0.0 | ##"]
    assert plot([0.0, 0.25, 1.0], width=64, height=2, unicode=True).splitlines() == [" 1.0 │  █", " 0.0 │ ▄█"]
    rising = [i / 1000 for i in range(1000)]
    assert max(len(line) for line in plot(rising, width=10, height=4, unicode=True).splitlines()) == 16
    assert plot([], width=10, height=2, unicode=True)


def test_only_a_wrong_answer_counts_as_a_forgotten_carry() -> None:
    assert forgot_carry({"input": "47+85", "output": "=022"})
    assert not forgot_carry({"input": "47+85", "output": "=132"})
    assert not forgot_carry({"input": "12+34", "output": "=046"})


def test_overrides_quote_any_folder_name() -> None:
    folder = Path("it's a {run}, with=signs")
    for algorithm in ("grpo", "ppo"):
        overrides = training_overrides(folder, folder / "model", folder, algorithm, steps=1, seed=2, device="cpu")
        config = load_config(PPOConfig, overrides, run_checks=False)
        assert config.trainer.default_local_dir == str(folder)
        assert config.data.train_files == [str(folder / "data" / "train.parquet")]
        assert shlex.split(command_line(overrides).replace("\\\n", ""))[2:] == overrides


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_short_demo_writes_its_files_and_shows_its_sections(
    algorithm: Algorithm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    options = ["--algorithm", algorithm, "--out", str(out), "--device", "cpu", "--steps", "2", "--warmup-steps", "3"]
    assert cli.main(["demo", *options]) == 0
    shown = capsys.readouterr().out
    for section in ("Problems and model", "Warm-up: 3 supervised", f"{algorithm.upper()}: 2 steps", "Before and after"):
        assert section in shown
    for text in (
        "forget every carry",
        "lockstep ppo",
        "Three answers",
        "Mean reward, steps 1 to 2",
        "Files in",
        "never",
    ):
        assert text in shown

    summary = json.loads((out / "summary.json").read_text())
    assert list(summary) == ["val_before", "val_after", "steps", "seconds"]
    assert summary["steps"] == 2 and summary["seconds"] > 0
    assert 0 <= summary["val_before"] <= 1 and 0 <= summary["val_after"] <= 1
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3
    assert len((out / "validation" / "2.jsonl").read_text().splitlines()) >= 512
    AutoModelForCausalLM.from_pretrained(out / "global_step_2" / "actor" / "huggingface")
    assert (out / "global_step_2" / "critic").is_dir() == (algorithm == "ppo")

    again = shlex.split((out / "train_again.sh").read_text().replace("\\\n", ""))
    config = load_config(PPOConfig, again[2:])
    assert again[:2] == ["lockstep", "ppo"]
    assert config.trainer.default_local_dir == f"{out}-again"
    assert config.algorithm.adv_estimator == ("gae" if algorithm == "ppo" else "grpo")


@pytest.mark.slow
def test_short_demo_with_a_tool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    options = ["--task", "tools", "--out", str(out), "--device", "cpu", "--steps", "1", "--warmup-steps", "60"]
    assert cli.main(["demo", *options]) == 0
    shown = capsys.readouterr().out
    for text in ("has a calculator", "Four of five examples guess", "called the calculator", "Three conversations"):
        assert text in shown
    (step,) = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines() if "num_turns" in line]
    assert 2 < step["num_turns/mean"] <= 7 and step["tool_call_counts/mean"] + step["malformed_call_counts/mean"] > 0
    assert yaml.safe_load((out / "tools.yaml").read_text())["tools"][0]["class_name"] == "calculator"
    assert not [r for r in caplog.records if r.levelname == "WARNING" and "template" in r.getMessage()]


def test_products_have_six_digits_and_are_split() -> None:
    train, validation = split_products(seed=3)
    assert not {*train} & {*validation} and len({*train, *validation}) == len(train) + len(validation)
    assert all(len(str(problem.right_answer)) == 6 for problem in (*train, *validation))
    assert parse_product(train[0].question) == train[0]


def test_non_empty_folder_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    assert cli.main(["demo", "--out", str(tmp_path)]) == 2
    assert "choose another folder or remove it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("option", [["--steps", "0"], ["--seed", "-1"], ["--algorithm", "dpo"]])
def test_wrong_options_are_rejected(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo", *option])
    assert stopped.value.code == 2
    assert option[0] in capsys.readouterr().err


def test_default_folder_is_the_first_free_or_unfinished_one(tmp_path: Path) -> None:
    default = tmp_path / "outputs" / "demo"
    options = {"seed": 1}
    first, lock = demo_folder(None, default, options)
    second, _other = demo_folder(None, default, options)  # the first is running
    third, _third = demo_folder(None, default, {"seed": 2})
    assert [first.name, second.name, third.name] == ["demo", "demo-2", "demo-3"]
    lock.close()
    again, lock = demo_folder(None, default, options)
    assert again == first
    lock.close()
    (first / "summary.json").write_text("{}")
    assert demo_folder(None, default, options)[0].name == "demo-4"
    (tmp_path / "empty").mkdir()
    assert demo_folder(tmp_path / "empty", default, options)[0] == tmp_path / "empty"
    with pytest.raises(ValueError, match="choose another folder"):
        demo_folder(third, default, options)


def test_demo_continues_after_a_kill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended in the warm-up and before training; a kill leaves the same files."""

    def end(*args: object) -> None:
        raise KeyboardInterrupt

    command = ["demo", "--out", str(tmp_path / "run"), "--device", "cpu", "--steps", "1", "--warmup-steps", "2"]
    for module in (main_demo.fsdp_sft_trainer, main_demo.main_ppo):
        with monkeypatch.context() as patch:
            patch.setattr(module, "main", end)
            assert cli.main(command) == 130
        assert "the same command continues" in capsys.readouterr().out
    warm = tmp_path / "run" / "warmup" / "global_step_2" / "huggingface" / "model.safetensors"
    model = warm.read_bytes()
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "Continuing the unfinished demo" in shown and "Warm-up" not in shown
    assert warm.read_bytes() == model
    assert (tmp_path / "run" / "summary.json").is_file()
    assert cli.main(command) == 2  # it is finished
    assert "choose another folder" in capsys.readouterr().err


def test_every_warm_up_answer_has_the_expected_format() -> None:
    for problem in split_problems(seed=0)[0][:200]:
        for number in (problem.right_answer, problem.careless_answer):
            right = float(number == problem.right_answer)
            result = compute_score("sums", answer_text(number), str(problem.right_answer))
            assert result == {"score": right, "acc": right, "form": 1.0}
