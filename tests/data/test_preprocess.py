"""examples/data_preprocess: published files to dataset rows.

The scripts run on small generated files, and on the published files if LOCKSTEP_DATA is set.
"""

import io
import json
import os
import runpy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.config.data import DataConfig
from lockstep.config.preference import RMDataConfig
from lockstep.data.preference_dataset import PreferenceDataset
from lockstep.data.rl_dataset import RLHFDataset
from lockstep.data.rm_dataset import RMDataset
from lockstep.models.processor import hf_processor
from lockstep.models.tokenizer import hf_tokenizer
from lockstep.rewards.default import default_compute_score
from tests.hub import use_hub
from tests.programs import output_of
from tests.tiny import tiny_tokenizer
from tests.tiny_vision import save_tiny_vision_model, tiny_image

SCRIPTS = Path(__file__).parents[2] / "examples/data_preprocess"
PUBLISHED = os.environ.get("LOCKSTEP_DATA")


def run_script(script: str, source: Path, output: Path, *options: str) -> tuple[int, str]:
    """Its exit code and output."""
    return output_of(str(SCRIPTS / script), "--input", str(source), "--output", str(output), *options)


def convert(script: str, examples: list[dict[str, Any]], folder: Path, *options: str) -> tuple[list[Any], str]:
    """The rows as the dataset returns them, and the script's output."""
    source, output = folder / "published.jsonl", folder / "made" / "rows.parquet"
    source.write_text("".join(json.dumps(example) + "\n" for example in examples))
    code, shown = run_script(script, source, output, *options)
    assert code == 0, shown
    dataset = RLHFDataset(str(output), tiny_tokenizer(), DataConfig(max_prompt_length=2000))
    return [dataset[i] for i in range(len(dataset))], shown


def refusal(script: str, example: dict[str, Any], folder: Path) -> str:
    (folder / "bad.jsonl").write_text(json.dumps(example) + "\n")
    code, shown = run_script(script, folder / "bad.jsonl", folder / "bad.parquet")
    assert code != 0 and not (folder / "bad.parquet").exists()
    return shown


def test_gsm8k(tmp_path: Path) -> None:
    examples = [
        {"question": "One and one?", "answer": "1+1=<<1+1=2>>2\n#### 2"},
        {"question": "A thousand twice?", "answer": "It is 2,000.\n#### 2,000"},
    ]
    rows, _ = convert("gsm8k.py", examples, tmp_path, "--split", "test")
    assert rows[1]["reward_model"] == {"style": "rule", "ground_truth": "2000"}
    assert rows[1]["data_source"] == "openai/gsm8k" and rows[1]["ability"] == "math" and rows[1]["index"] == 1
    assert rows[1]["extra_info"] == {"split": "test", "index": 1} | examples[1]
    (message,) = rows[1]["raw_prompt"]
    assert message["content"].startswith("A thousand twice? ") and '"####"' in message["content"]
    assert "example 0: the answer has no '#### <number>'" in refusal(
        "gsm8k.py", {"question": "?", "answer": "two"}, tmp_path
    )
    assert "example 0 has no 'answer' (fields: question)" in refusal("gsm8k.py", {"question": "?"}, tmp_path)


def test_math_uses_the_answer_or_the_last_box(tmp_path: Path) -> None:
    examples = [
        {"problem": "a", "answer": "\\frac{1}{2}", "level": "Level 1"},
        {"problem": "b", "solution": "First \\boxed{1}, then $\\boxed{\\frac{3}{4}}$.", "level": "Level 2"},
        {"problem": "c", "answer": None, "level": "Level 3"},
        {"problem": "d", "solution": "so $\\boxed 7$ it is", "level": "Level 4"},
    ]
    rows, logged = convert("math_dataset.py", examples, tmp_path)
    truths = {row["index"]: row["reward_model"]["ground_truth"] for row in rows}
    assert truths == {0: "\\frac{1}{2}", 1: "\\frac{3}{4}", 3: "7"}
    assert "skipped 1 examples without an answer: 2" in logged
    assert rows[0]["data_source"] == "DigitalLearningGmbH/MATH-lighteval"
    assert rows[1]["extra_info"]["level"] == "Level 2"
    assert rows[0]["raw_prompt"][0]["content"].endswith("\\boxed{}.")


def test_aime_writes_whole_numbers(tmp_path: Path) -> None:
    examples = [
        {"problem": "a", "answer": "073"},
        {"problem": "b", "answer": "27.0"},
        {"problem": "c", "answer": "2.5"},
    ]
    rows, _ = convert("aime.py", examples, tmp_path)
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["73", "27", "2.5"]
    assert rows[0]["data_source"] == "aime24" and rows[0]["extra_info"] == {"split": "test", "index": 0}
    assert "the answer 'x' is not a number" in refusal("aime.py", {"problem": "a", "answer": "x"}, tmp_path)


def test_aime_layouts_of_the_hub(tmp_path: Path) -> None:
    examples: list[dict[str, Any]] = [
        {"ID": "2024-II-4", "Problem": "p", "Solution": "s", "Answer": 33},  # Maxwell-Jia/AIME_2024
        {
            "id": 60,
            "problem": "p",
            "solution": "s",
            "answer": "33",
            "url": "u",
            "year": "2024",
        },  # HuggingFaceH4/aime_2024
        {"question": "p", "answer": "033"},  # opencompass/AIME2025
    ]
    rows, _ = convert("aime.py", examples, tmp_path, "--data-source", "aime25")
    for row in rows:
        assert row["reward_model"]["ground_truth"] == "33" and row["data_source"] == "aime25"
        assert row["raw_prompt"][0]["content"].startswith("p\n")
    assert default_compute_score("aime25", "so \\boxed{33}", "33")["acc"]  # type: ignore[index]


def dapo_example(problem: str, answer: str, index: str) -> dict[str, Any]:
    asked = f'Solve the following math problem step by step.\n\n{problem}\n\nPut your answer on its own line after "Answer:".'
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": asked, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def test_dapo_math_keeps_each_problem_once(tmp_path: Path) -> None:
    examples = [dapo_example("1+1?", "2", "a"), dapo_example("2+2?", "4", "b"), dapo_example("1+1?", "2", "c")]
    rows, logged = convert("dapo_math.py", [*examples, dapo_example("2+2?", "5", "d")], tmp_path)
    assert [row["reward_model"] for row in rows] == [{"style": "rule", "ground_truth": truth} for truth in ("2", "4")]
    assert rows[1]["raw_prompt"] == [{"role": "user", "content": examples[1]["prompt"][0]["content"]}]
    assert rows[1]["extra_info"] == {"split": "train", "index": 1, "id": "b"} and rows[1]["data_source"] == "math_dapo"
    assert "4 examples are 2 problems" in logged and "1 problems have several answers" in logged
    processed = {"prompt": "1+1?", "solution": "2", "reward_model": {"ground_truth": "2", "style": "rule"}}
    rows, _ = convert("dapo_math.py", [processed], tmp_path)
    assert "`Answer:`" in rows[0]["raw_prompt"][0]["content"] and rows[0]["raw_prompt"][0]["content"].endswith("1+1?")


def test_full_hh_rlhf_for_sft_reward_models_and_rl(tmp_path: Path) -> None:
    def example(said: str) -> dict[str, str]:
        prompt = f"\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: {said}\n\nAssistant:"
        return {"prompt": prompt, "response": " good", "chosen": " good", "rejected": " bad"}

    examples = [*(example(said) for said in "abc"), example("d") | {"prompt": "no turns"}]
    source, output = tmp_path / "train.jsonl", tmp_path / "hh"
    source.write_text("".join(json.dumps(example) + "\n" for example in examples))
    code, shown = run_script("full_hh_rlhf.py", source, output)
    assert code == 0 and "skipped 1 prompts that are not conversations: 3" in shown
    pairs = pq.read_table(output / "sft/train.parquet").to_pylist()
    assert len(pairs) == 8 and pairs[1] == {"prompt": examples[0]["prompt"], "response": " bad"}
    assert len(RMDataset(str(output / "rm/train.parquet"), tiny_tokenizer())) == 3
    assert len(RMDataset(str(output / "rm/test.parquet"), tiny_tokenizer())) == 1
    dataset = RLHFDataset(str(output / "rl/train.parquet"), tiny_tokenizer(), DataConfig())
    turns = [(message["role"], message["content"]) for message in dataset[1]["raw_prompt"]]
    assert turns == [("user", "Hi"), ("assistant", "Yes?"), ("user", "b")] and len(dataset) == 3
    ids = PreferenceDataset(str(output / "rm/train.parquet"), tiny_tokenizer(), RMDataConfig())[1]["chosen"][
        "input_ids"
    ]
    prompt = dataset[1]["raw_prompt"]
    rollout = (
        tiny_tokenizer().apply_chat_template(prompt, add_generation_prompt=True, tokenize=False) + "good<|im_end|>"
    )
    assert tiny_tokenizer().decode(ids[ids > 0]) == rollout  # the reward model is trained on what RL samples
    assert dataset[1]["data_source"] == "Dahoas/full-hh-rlhf" and dataset[1]["reward_model"]["style"] == "model"
    assert "--split ppo: must be all, sft, rm, rl" in run_script("full_hh_rlhf.py", source, output, "--split=ppo")[1]


def test_apps_tests_become_the_ground_truth(tmp_path: Path) -> None:
    def example(number: int, tests: Any, starter_code: str = "") -> dict[str, Any]:
        text = tests if isinstance(tests, str) else json.dumps(tests)
        published = {"problem_id": number, "question": "Add.\n", "solutions": "[]", "input_output": text}
        return published | {"difficulty": "interview", "url": "u", "starter_code": starter_code}

    called = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}
    examples = [
        example(0, {"inputs": ["1 2\n"], "outputs": ["3\n"]}),
        example(1, called, "class Solution:\n    def add(self, a, b):\n"),
        example(2, ""),
        example(3, {"inputs": ["1"], "outputs": []}),
        example(4, '{"inputs": [' + "9" * 5000 + '], "outputs": [1]}'),
    ]
    rows, logged = convert("apps.py", examples, tmp_path)
    assert "skipped 3 problems without usable tests: 2, 3, 4" in logged
    assert [row["data_source"] for row in rows] == ["apps"] * 2 and rows[1]["extra_info"]["difficulty"] == "interview"
    prompts = [row["raw_prompt"][0]["content"] for row in rows]
    assert "standard input" in prompts[0] and "`add`" in prompts[1] and "def add(self, a, b):" in prompts[1]
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    assert json.loads(truths[1]) == called
    program = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    assert default_compute_score("apps", program, truths[0]) == 1.0
    method = "```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```"
    assert default_compute_score("apps", method, truths[1]) == 1.0


def test_folder_of_a_downloaded_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: Any = runpy.run_path(str(SCRIPTS / "rows.py"))

    def put(name: str, *values: int) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"n": values}), tmp_path / name)

    def numbers(folder: str, split: str) -> list[int]:
        return [example["n"] for example in rows["read_examples"](str(tmp_path / folder), "n", split=split)]

    put("a/data/train-00000-of-00002.parquet", 1, 2)
    put("a/data/train-00001-of-00002.parquet", 3)
    put("a/.cache/train.parquet", 9)
    (tmp_path / "a/dataset_infos.json").write_text("{}")
    assert numbers("a", "train") == numbers("a", "test") == [1, 2, 3]  # the only split
    put("a/data/test-00000-of-00001.parquet", 4)
    assert numbers("a", "train") == [1, 2, 3] and numbers("a", "test") == [4]
    with pytest.raises(SystemExit, match=r"--input=.*a: has no validation split, only test, train; name its files"):
        numbers("a", "validation")
    put("a/data/validation-00000-of-00001.parquet", 5)
    assert numbers("a", "test") == [4] and numbers("a", "validation") == [5]
    put("latest/data/train-00000-of-00001.parquet", 6)
    put("latest/data/test_latest-00000-of-00001.parquet", 7)
    with pytest.raises(SystemExit, match="has no test split, only test_latest, train"):
        numbers("latest", "test")
    put("d/test.parquet", 8)
    with pytest.raises(SystemExit, match="has no train split, only test"):
        numbers("d", "train")
    put("b/main/train.parquet", 1)
    put("b/socratic/train.parquet", 2)
    with pytest.raises(SystemExit, match=r"several configurations \(main, socratic\); pass the folder of one"):
        numbers("b", "train")
    (tmp_path / "c").mkdir()
    with pytest.raises(SystemExit, match=r"has no \.parquet, \.jsonl or \.json file \(found: nothing\)"):
        numbers("c", "train")
    use_hub(monkeypatch, tmp_path / "hub", offline=True)
    with pytest.raises(
        SystemExit, match=r"org/name: .*is not in the cache.* `hf download org/name --repo-type dataset`"
    ):
        list(rows["read_examples"]("org/name"))


def humaneval_example(task: str, *asserts: str) -> dict[str, Any]:
    test = "METADATA = {}\ndef check(candidate):\n" + "".join(f"    {line}\n" for line in asserts)
    return {"task_id": task, "prompt": "def add(a, b):\n", "entry_point": "add", "test": test}


def test_humaneval_checks_become_inputs_and_outputs(tmp_path: Path) -> None:
    examples = [
        humaneval_example(
            "H/0", "assert candidate(1, 'x\\ny') == (1, [2.5])", "assert candidate([], None) is True, 'm'"
        ),
        humaneval_example("H/1", "for i in range(3):", "    assert candidate(i, i) == i"),
        humaneval_example("H/2", "assert abs(candidate(1, 2) - 3) < 1e-6"),
        humaneval_example("H/3", "assert candidate((1, 2), 3) == 1"),  # JSON has no tuples
        humaneval_example("H/4", "assert candidate(1, 2) == 3", "assert True, 'always'"),
    ]
    rows, logged = convert("humaneval.py", examples, tmp_path)
    truths = [json.loads(row["reward_model"]["ground_truth"]) for row in rows]
    assert truths[0] == {"fn_name": "add", "inputs": ['1\n"x\\ny"', "[]\nnull"], "outputs": ["[1, [2.5]]", "true"]}
    assert truths[1] == {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}
    assert "skipped 3 tasks whose checks are not plain comparisons: H/1, H/2, H/3" in logged


def test_mbpp_finds_the_function_that_is_tested(tmp_path: Path) -> None:
    example = {"text": "Add.", "code": "def add(a, b):\n    return a + b", "test_list": ["assert add(1, 2) == 3"]}
    other = example | {"test_list": ["assert set(add([1], [2])) == {1, 2}"]}
    rows, logged = convert("mbpp.py", [example, other], tmp_path)
    assert json.loads(rows[0]["reward_model"]["ground_truth"]) == {
        "fn_name": "add",
        "inputs": ["1\n2"],
        "outputs": ["3"],
    }
    assert "assert add(1, 2) == 3" in rows[0]["raw_prompt"][0]["content"] and "skipped 1 tasks" in logged


@pytest.mark.skipif(PUBLISHED is None, reason="needs LOCKSTEP_DATA, a folder with the published files")
@pytest.mark.parametrize(
    ("script", "source", "ready", "options"),
    [
        ("gsm8k.py", "gsm8k/test.jsonl", "gsm8k/test.parquet", ["--split", "test"]),
        ("gsm8k.py", "gsm8k/train.jsonl", "gsm8k/train.parquet", ["--split", "train"]),
        (
            "math_dataset.py",
            "math/math500.jsonl",
            "math/math500.parquet",
            ["--split", "test", "--data-source", "HuggingFaceH4/MATH-500"],
        ),
        ("math_dataset.py", "math/math_train_deepscaler.jsonl", "math/math_train.parquet", []),
        ("aime.py", "math/aime24.jsonl", "math/aime24.parquet", []),
        ("aime.py", "math/amc23.jsonl", "math/amc23.parquet", ["--data-source", "math_dapo"]),
    ],
)
def test_published_files_give_the_expected_rows(
    tmp_path: Path, script: str, source: str, ready: str, options: list[str]
) -> None:
    folder = Path(str(PUBLISHED))
    assert run_script(script, folder / source, tmp_path / "rows.parquet", *options)[0] == 0
    wanted = {row["extra_info"]["index"]: row for row in pq.read_table(folder / ready).to_pylist()}
    made = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert all(row == wanted.pop(row["extra_info"]["index"]) for row in made)
    # Skipped rows have no answer in the published file either.
    assert all(row["reward_model"]["ground_truth"] in ("", "None") for row in wanted.values())


@pytest.mark.skipif(PUBLISHED is None, reason="needs LOCKSTEP_DATA, a folder with the published files")
@pytest.mark.parametrize(
    ("script", "source", "num_rows"), [("humaneval.py", "humaneval", 142), ("mbpp.py", "mbpp", 825)]
)
def test_reference_solutions_pass_the_generated_tests(tmp_path: Path, script: str, source: str, num_rows: int) -> None:
    published = Path(str(PUBLISHED)) / f"code/{source}.jsonl"
    assert run_script(script, published, tmp_path / "rows.parquet")[0] == 0
    examples = [json.loads(line) for line in published.read_text().splitlines()]
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert len(rows) == num_rows
    for row in rows:
        example, truth = examples[row["extra_info"]["index"]], json.loads(row["reward_model"]["ground_truth"])
        namespace: dict[str, Any] = {}
        exec(example["prompt"] + example["canonical_solution"] if "prompt" in example else example["code"], namespace)
        for arguments, expected in zip(truth["inputs"], truth["outputs"]):
            result = namespace[truth["fn_name"]](*map(json.loads, arguments.split("\n")))
            assert json.loads(json.dumps(result)) == json.loads(expected)


def test_hotpotqa_writes_questions_and_each_passage_once(tmp_path: Path) -> None:
    def example(question: str, *titles: str) -> dict[str, Any]:
        sentences = [[f"{title} is", " a city. "] for title in titles]
        return {"question": question, "answer": "Oslo", "context": {"title": list(titles), "sentences": sentences}}

    for examples in ([example("A?", "Oslo", "Rome"), example("B?", "Rome")], [example("C?", "Oslo", "Bonn")]):
        rows, _ = convert("hotpotqa.py", examples, tmp_path)
    (row,) = rows
    assert row["data_source"] == "searchR1_hotpotqa" and row["raw_prompt"][0]["content"].endswith("Question: C?")
    truth = row["reward_model"]["ground_truth"]
    assert default_compute_score("searchR1_hotpotqa", "<answer>oslo.</answer>", truth) == 1
    passages = [json.loads(line) for line in (tmp_path / "made/passages.jsonl").read_text().splitlines()]
    assert [passage["title"] for passage in passages] == ["Oslo", "Rome", "Bonn"]
    assert passages[0]["text"] == "Oslo is a city."


def test_geo3k_and_shapes_have_images(tmp_path: Path) -> None:
    picture = io.BytesIO()
    tiny_image().save(picture, "PNG")
    image = {"bytes": picture.getvalue(), "path": None}
    examples = [
        {"problem": "<image>Find x.", "answer": "4", "images": [image]},
        {"problem": "Compare.", "answer": "y", "images": [image, image]},
    ]
    source, output = tmp_path / "published.parquet", tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(examples), source)
    assert run_script("geo3k.py", source, output, "--split", "test")[0] == 0
    model = save_tiny_vision_model(tmp_path / "model")
    tokenizer = hf_tokenizer(model)
    processor = hf_processor(model, tokenizer, DataConfig())
    rows: Any = RLHFDataset(str(output), tokenizer, DataConfig(), processor)
    assert [len(row["multi_modal_inputs"].files) for row in rows] == [1, 2]
    assert rows[0]["data_source"] == "hiyouga/geometry3k" and rows[0]["reward_model"]["ground_truth"] == "4"
    kinds = [part["type"] for part in rows[1]["raw_prompt"][0]["content"]]
    assert kinds == ["image", "image", "text"]
    assert default_compute_score("hiyouga/geometry3k", "<think>so</think>\\boxed{4}", "4") == 1.0
    examples[0]["problem"] = "<image><image>"
    pq.write_table(pa.Table.from_pylist(examples[:1]), source)
    assert "more <image> than its 1 images" in run_script("geo3k.py", source, output)[1]
    code, _ = output_of(str(SCRIPTS / "shapes.py"), "--num-rows", "3", "--output", str(output))
    shapes: Any = RLHFDataset(str(output), tokenizer, DataConfig(), processor)
    assert code == 0 and len(shapes) == 3 and len(shapes[0]["multi_modal_inputs"].files) == 1
    assert default_compute_score(
        "shapes", f"#### {shapes[0]['reward_model']['ground_truth']}", shapes[0]["reward_model"]["ground_truth"]
    )


def test_missing_input_file(tmp_path: Path) -> None:
    code, shown = run_script("gsm8k.py", tmp_path / "none.jsonl", tmp_path / "x.parquet")
    assert code == 1 and "none.jsonl: no such file" in shown
