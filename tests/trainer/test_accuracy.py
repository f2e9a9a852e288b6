"""pass@k, maj@k and confidence intervals by hand-computed cases, and `lockstep eval` on rows written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.trainer import main_eval
from lockstep.trainer.evaluation.accuracy import accuracy, confidence_interval, pass_at_k
from lockstep.trainer.ppo.validation import Responses


def test_pass_at_k_of_one_prompt() -> None:
    values = [1.0, 0.0, 0.0, 1.0, 0.5, 1.0]
    found = pass_at_k({"a": [0, 1, 2, 3], "b": [4], "c": [5]}, values, correct_score=1.0)
    # a: 2 of 4 correct; pass@2 = 1 - C(2,2)/C(4,2)
    assert found == {"pass@1": [0.5, 0.0, 1.0], "pass@2": [pytest.approx(5 / 6)], "pass@4": [1.0]}
    assert pass_at_k({"b": [4]}, values, correct_score=0.5) == {"pass@1": [1.0]}


def test_intervals() -> None:
    assert confidence_interval([1.0] * 8 + [0.0] * 2) == pytest.approx([0.4902, 0.9433], abs=1e-4)  # Wilson, 8 of 10
    assert confidence_interval([0.0] * 10) == pytest.approx([0.0, 0.2775], abs=1e-4)
    low, high = confidence_interval([0.2, 0.4] * 50)
    assert low < 0.3 < high and high - low == pytest.approx(2 * 1.96 * 0.1 / 10, rel=0.2)
    assert confidence_interval([0.2, 0.4] * 50) == [low, high], "the seed is fixed"


def test_main_metrics_are_of_acc_where_there_is_one() -> None:
    responses = Responses(
        scores=[-1.0, 1.0, 0.3],
        uids=["0", "0", "1"],
        data_sources=["math", "math", "other"],
        extra={"acc": [False, True, None], "pred": ["4", "5", None]},
    )
    metrics, intervals = accuracy(responses, correct_score=1.0)
    assert metrics["val-core/math/acc/mean@2"] == 0.5 == metrics["val-core/math/acc/pass@1"]
    assert metrics["val-core/math/acc/pass@2"] == 1.0 and metrics["val-aux/math/reward/mean@2"] == 0.0
    assert metrics["val-core/math/acc/maj@2/mean"] == pytest.approx(0.5, abs=0.05)
    assert metrics["val-core/other/reward/mean@1"] == metrics["test_score/other"] == 0.3
    assert metrics["test_score/math"] == 0.0
    assert intervals["val-core/math/acc/pass@2"] == pytest.approx([0.2065, 1.0], abs=1e-4)
    assert "val-core/other/reward/mean@1" in intervals and set(intervals) <= set(metrics)


OVERLONG = [
    "reward_model.reward_manager=dapo",
    "+reward_model.reward_kwargs.overlong_buffer_cfg={enable: true, len: 4}",
]


def row(responses: Any, truth: str = "4", **more: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "2+2?"}]
    answer = {"style": "rule", "ground_truth": truth}
    return {"data_source": "openai/gsm8k", "prompt": prompt, "reward_model": answer, "responses": responses, **more}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_eval_scores_with_the_built_in_scorer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(["#### 4", "#### 5"]), row("It is 9. #### 9", "9"), row(["#### 1", "#### 2"])]
    data = write(tmp_path / "rows.jsonl", rows)
    outputs = [f"data.output_path={tmp_path}/out/metrics.json", f"data.scores_path={tmp_path}/scores.jsonl"]
    assert main_eval.main([f"data.path={data}", *outputs]) == 0
    shown = capsys.readouterr().out.split()
    assert {"openai/gsm8k", "reward/pass@2", "reward/mean@2"} <= set(shown)
    written = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert written["metrics"]["val-core/openai/gsm8k/reward/pass@1"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert written["metrics"]["test_score/openai/gsm8k"] == pytest.approx(0.5)
    assert written["num_prompts"] == {"openai/gsm8k": 3}
    scores = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [s["score"] for s in scores] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert scores[0]["input"] == "user: 2+2?" and [s["uid"] for s in scores] == ["0", "0", "1", "2", "2"]


def test_data_sources_with_similar_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(data_source) / 10\n"
    )
    sources = ("math", "math/500", "my/math")
    data = write(tmp_path / "rows.jsonl", [row(["x"]) | {"data_source": source} for source in sources])
    assert main_eval.main([f"data.path={data}", f"custom_reward_function.path={tmp_path}/reward.py"]) == 0
    shown = [line.split()[:4] for line in capsys.readouterr().out.splitlines() if "mean@1" in line]
    values = ("0.4", "0.8", "0.7")
    assert shown == [[source, "1", "reward/mean@1", value] for source, value in zip(sources, values)]


def test_the_overlong_penalty_reads_the_lengths(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [row(["#### 4", "#### 4"], response_lengths=[4, 7])])
    command = [f"data.path={rows}", f"data.scores_path={tmp_path}/scores.jsonl", *OVERLONG]
    assert main_eval.main([*command, "data.max_response_length=8"]) == 0
    lines = (tmp_path / "scores.jsonl").read_text().splitlines()
    assert [json.loads(line)["score"] for line in lines] == [1.0, 0.25]  # 3 of 4 tokens into the buffer
    with pytest.raises(SystemExit, match="2"):
        main_eval.main(command)


def test_a_reward_function_that_always_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1 / 0\n"
    )
    rows = write(tmp_path / "rows.jsonl", [row(["x"])])
    assert main_eval.main([f"data.path={rows}", f"custom_reward_function.path={tmp_path}/bad.py"]) == 1
    assert "error: the reward function" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "overrides", "message"),
    [
        ([row(["x"]) | {"responses": None}], [], "row 0 has no 'responses'; set data.response_key"),
        ([row([1])], [], "'responses' must be a list of texts"),
        (
            [row(["x", "y"], response_lengths=[3])],
            [],
            "'response_lengths' must have one entry for each of the 2 responses",
        ),
        ([row(["x"], extra_info="gsm8k")], [], "'extra_info' must be an object, not 'gsm8k'"),
        ([row(["x"]) | {"data_source": "mine"}], [], "no scorer for data_source 'mine'"),
        ([row(["x"]) | {"reward_model": {"style": "rule"}}], [], "has no `ground_truth`"),
        ([row(["x"])], ["data.data_source_key=source"], "has no 'source'; set data.data_source_key"),
        ([row(["x"])], ["custom_reward_function.reward_kwargs.scorer=mth"], "no such scorer"),
        ([row(["x"])], [*OVERLONG, "data.max_response_length=8"], "has no 'response_lengths', which the overlong"),
    ],
)
def test_bad_rows_are_one_message(
    rows: list[dict[str, Any]],
    overrides: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main_eval.main([f"data.path={write(tmp_path / 'rows.jsonl', rows)}", *overrides]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("error: ") == 1 and "Traceback" not in error
