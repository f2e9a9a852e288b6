"""Rows that a package makes: `reasoning_gym:TASK` in `data.train_files`."""

from typing import Any

import pytest

from lockstep.config.compose import load_config
from lockstep.config.data import DataConfig
from lockstep.config.errors import ConfigError
from lockstep.config.ppo import PPOConfig
from lockstep.data.create_dataset import create_rl_dataset
from lockstep.data.generated import TRAIN_SIZE, VAL_SEED, VAL_SIZE, digest
from lockstep.data.loader import create_dataloader
from lockstep.rewards.default import default_compute_score
from lockstep.utils.dataset_files import local_data_files
from lockstep.utils.generated_data import parse_generated
from tests.tiny import tiny_tokenizer, write_rows

reasoning_gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (make test-environments)")

SUMS = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&system_prompt=null"


def dataset_of(*entries: str, max_samples: int = -1, use: Any = "train", **settings: Any) -> Any:
    config = DataConfig(**{"max_prompt_length": 100} | settings)
    return create_rl_dataset(list(entries), tiny_tokenizer(), config, max_samples, use)


def questions(dataset: Any, count: int) -> list[str]:
    return [dataset[number]["raw_prompt"][-1]["content"] for number in range(count)]


def test_rows_are_the_problems_of_the_package() -> None:
    dataset = dataset_of(SUMS, seed=7)
    problems = reasoning_gym.create_dataset("chain_sum", min_terms=2, max_terms=2, seed=7, size=10)
    assert len(dataset) == TRAIN_SIZE and questions(dataset, 10) == [problem["question"] for problem in problems]
    row = dataset[5]
    assert row["data_source"] == "reasoning_gym/chain_sum" and row["ability"] == "arithmetic" and row["index"] == 5
    assert row["reward_model"] == {"style": "rule", "ground_truth": problems[5]["answer"]}
    assert dataset[TRAIN_SIZE - 1]["index"] == TRAIN_SIZE - 1
    with pytest.raises(IndexError):
        dataset[TRAIN_SIZE]


def test_seeds_sizes_and_system_prompts() -> None:
    assert questions(dataset_of(SUMS), 8) == questions(dataset_of(SUMS, seed=0), 8)
    assert questions(dataset_of(SUMS), 8) != questions(dataset_of(SUMS, seed=1000), 8)
    validation = dataset_of(SUMS, use="val")
    assert len(validation) == VAL_SIZE and not set(questions(validation, 50)) & set(questions(dataset_of(SUMS), 50))
    assert questions(validation, 4) == questions(dataset_of(f"{SUMS}&seed={VAL_SEED}"), 4)
    assert len(dataset_of(f"{SUMS}&size=12")) == 12 and len(dataset_of(SUMS, max_samples=3)) == 3
    with_prompt = dataset_of("reasoning_gym:chain_sum?system_prompt=direct", max_prompt_length=500)[0]["raw_prompt"]
    assert [message["role"] for message in with_prompt] == ["system", "user"]
    assert "<answer>" in dataset_of("reasoning_gym:chain_sum", max_prompt_length=900)[0]["raw_prompt"][0]["content"]


def test_tasks_take_turns_until_they_end() -> None:
    dataset = dataset_of(
        f"{SUMS}&size=4", "reasoning_gym:leg_counting?size=2&system_prompt=null", max_prompt_length=300
    )
    sources = [dataset[number]["data_source"].removeprefix("reasoning_gym/") for number in range(len(dataset))]
    assert sources == ["chain_sum", "leg_counting"] * 2 + ["chain_sum"] * 2
    indices = [dataset[number]["extra_info"]["reasoning_gym"]["index"] for number in range(len(dataset))]
    assert indices == [0, 0, 1, 1, 2, 3]
    assert set(dataset.data_sources) == {"reasoning_gym/chain_sum", "reasoning_gym/leg_counting"}


def test_a_problem_that_is_too_long_is_replaced() -> None:
    limits = {"max_prompt_length": 92, "filter_overlong_prompts": True}
    entry = "reasoning_gym:chain_sum?min_terms=2&max_terms=3&size=200&system_prompt=null"
    dataset = dataset_of(entry, **limits)
    lengths = [len(dataset[number]["raw_prompt_ids"]) for number in range(200)]
    unlimited = dataset_of(entry, max_prompt_length=400)
    whole = [len(unlimited[number]["raw_prompt_ids"]) for number in range(200)]
    assert max(lengths) <= 92 < max(whole)
    assert [a for a, b in zip(lengths, whole) if b <= 92] == [b for b in whole if b <= 92]
    with pytest.raises(ValueError, match=r"row \d+: the prompt has \d+ tokens, more than data.max_prompt_length=92"):
        dataset_of(entry, max_prompt_length=92)
    with pytest.raises(ValueError, match=r"every prompt is longer than data.max_prompt_length=20"):
        dataset_of(entry, max_prompt_length=20, filter_overlong_prompts=True)


def test_a_loader_resumes_exactly_and_notices_other_options() -> None:
    def loader(entry: str = SUMS) -> Any:
        return create_dataloader(dataset_of(entry), batch_size=4, shuffle=True, seed=3)

    first = loader()
    batches = [batch["extra_info"] for batch, _ in zip(first, range(3))]
    state = first.state_dict()
    again = loader()
    again.load_state_dict(state)
    expected = next(iter(first))["extra_info"].tolist()
    assert next(iter(again))["extra_info"].tolist() == expected and expected != batches[-1].tolist()
    with pytest.raises(ValueError, match=r"cannot resume the data order: .*chain_sum"):
        loader(f"{SUMS}&min_digits=2").load_state_dict(state)


def test_wrong_entries_are_refused() -> None:
    for entry, problem in [
        ("reasoning_gym:chain_sums", "has no task chain_sums. Did you mean 'chain_sum'"),
        ("reasoning_gym:chain_sum?min_term=2", "task chain_sum has no option min_term. Did you mean 'min_terms'"),
        ("reasoning_gym:chain_sum?min_terms=0", "min_terms must be positive"),
        ("reasoning_gym:chain_sum?system_prompt=other", "system_prompt=other is not one of"),
        ("reasoning_gym:ransom_note", "ransom_note cannot be used: its problems depend on the hash seed"),
        ("reasoning_gym:game_of_life_halting", "its scorer gives every answer the full score"),
    ]:
        with pytest.raises(ValueError, match=f"data.train_files: .*{problem}"):
            dataset_of(entry)
    for entry, problem in [
        ("reasoning_gym:", "names nothing"),
        ("reasoning_gym:chain_sum?size", "'size' is not option="),
    ]:
        with pytest.raises(ConfigError, match=f"data.train_files={entry}.*{problem}".replace("?", r"\?")):
            load_config(PPOConfig, [f"data.train_files='{entry}'", "actor_rollout_ref.model.path=x"])
    with pytest.raises(ValueError, match=r"data.train_files=.*only lockstep ppo and lockstep grpo read it"):
        local_data_files([SUMS], "train", "data.train_files")


def test_files_and_tasks_do_not_mix(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="generated data and files cannot be mixed"):
        dataset_of(SUMS, str(write_rows(tmp_path / "rows.jsonl")))


def test_options_are_json_or_text() -> None:
    data = parse_generated('reasoning_gym:basic_arithmetic?operators=["%2B"]&allow_negation=true&format_style=simple')
    assert data.options == {"operators": ["+"], "allow_negation": True, "format_style": "simple"}


def test_the_package_scores_the_answers() -> None:
    def score(entry: str, answer: str) -> Any:
        row = dataset_of(entry, max_prompt_length=2000)[0]
        return default_compute_score(row["data_source"], answer, None, row["extra_info"])

    row = dataset_of(SUMS)[0]
    right = row["reward_model"]["ground_truth"]
    assert score(SUMS, f"so <answer> {right} </answer>") == {"score": 1.0, "acc": 1.0, "pred": right}
    assert score(SUMS, right)["score"] == 1.0 and score(SUMS, "<answer>no</answer>")["score"] == 0.0
    assert 0 < score(SUMS, f"it is {right}")["score"] < 1  # the package's partial credit
    with pytest.raises(ValueError, match="extra_info has no `reasoning_gym`"):
        default_compute_score("reasoning_gym/chain_sum", "1", "1", {})


def test_answers_are_not_evaluated() -> None:
    """Both tasks call `eval` or sympy's `parse_expr` on answers in the package."""
    from lockstep.rewards.scorers.reasoning_gym import compute_score

    def score(task: str, answer: str) -> float:
        question = digest(reasoning_gym.create_dataset(task, seed=1, size=10)[0]["question"])
        place = {"task": task, "options": {"seed": 1, "size": 10}, "index": 0, "question": question}
        found: float = compute_score(f"<answer>{answer}</answer>", None, {"reasoning_gym": place})["score"]
        return found

    for task in ("countdown", "n_queens", "polynomial_equations", "spiral_matrix"):
        problem = reasoning_gym.create_dataset(task, seed=1, size=10)[0]
        assert score(task, str(problem["answer"])) == 1.0, task
        forged = "__import__('reasoning_gym').games.countdown.CountdownDataset.score_answer.__setattr__('x', 1)"
        assert score(task, forged) <= 0.05, task
        assert score(task, "(" * 500 + "9**9**9**9") <= 0.05, task
        assert score(task, str(problem["answer"])) == 1.0, task


def test_answers_that_the_package_cannot_read_are_wrong() -> None:
    """The scorer of the first task raises ValueError for them, and the distance to NaN is none for that of the second."""
    for task, answer in [("prime_factorization", "no idea"), ("complex_arithmetic", "NaN")]:
        row = dataset_of(f"reasoning_gym:{task}", max_prompt_length=2000)[0]
        right = row["reward_model"]["ground_truth"]
        assert default_compute_score(row["data_source"], right, None, row["extra_info"])["score"] == 1.0
        assert default_compute_score(row["data_source"], answer, None, row["extra_info"])["score"] == 0.0


def test_a_problem_that_cannot_be_made_again_is_an_error() -> None:
    row = dataset_of(SUMS)[0]
    row["extra_info"]["reasoning_gym"] |= {"question": digest("another one")}
    with pytest.raises(ValueError, match="its question differs from that of the row"):
        default_compute_score(row["data_source"], "1", None, row["extra_info"])
