"""custom_reward_function: loading, bound arguments, and signatures that are rejected at the start."""

import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.reward import CustomRewardFunctionConfig
from lockstep.rewards.custom import get_custom_reward_fn

SOURCE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return len(solution_str) + bonus

def loose(**kwargs):
    return kwargs

def old(solution_str, ground_truth):
    return 0.0

def greedy(data_source, solution_str, ground_truth, extra_info, weight):
    return 0.0

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "rewards_of_mine.py"
    path.write_text(SOURCE)
    return str(path)


def score(function: Any) -> Any:
    return function(data_source="d", solution_str="abc", ground_truth="g", extra_info={})


def test_no_path_means_no_function() -> None:
    assert get_custom_reward_fn(CustomRewardFunctionConfig()) is None


def test_file_name_and_kwargs(file: str) -> None:
    assert score(get_custom_reward_fn(CustomRewardFunctionConfig(file))) == 3.0
    assert score(get_custom_reward_fn(CustomRewardFunctionConfig(file, reward_kwargs={"bonus": 0.5}))) == 3.5
    loose = get_custom_reward_fn(CustomRewardFunctionConfig(file, "loose", {"k": 1}))
    assert score(loose) == {"data_source": "d", "solution_str": "abc", "ground_truth": "g", "extra_info": {}, "k": 1}


def test_package_path(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(file).parent))
    assert score(get_custom_reward_fn(CustomRewardFunctionConfig("pkg://rewards_of_mine"))) == 3.0
    sys.modules.pop("rewards_of_mine")


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        (
            "old",
            {},
            r"old\(solution_str, ground_truth\) .*cannot be called .*unexpected keyword argument 'data_source'",
        ),
        ("greedy", {}, r"missing a required argument: 'weight'.*custom_reward_function\.reward_kwargs"),
        ("compute_score", {"bonsu": 1}, r"unexpected keyword argument 'bonsu'"),
        ("compute_score", {"extra_info": {}}, r"reward_kwargs may not set extra_info: they come from the rows"),
        ("number", {}, "name=number: must be a function or a class, not 3"),
        ("compute_scor", {}, "no attribute 'compute_scor'.*Did you mean 'compute_score'"),
    ],
)
def test_unusable_functions_are_rejected(file: str, name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_custom_reward_fn(CustomRewardFunctionConfig(file, name, kwargs))


def test_missing_and_broken_files_name_the_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"custom_reward_function\.path=.*absent\.py.*no file"):
        get_custom_reward_fn(CustomRewardFunctionConfig(str(tmp_path / "absent.py")))
    with pytest.raises(ValueError, match=r"custom_reward_function\.path=pkg://no_such_package.*No module named"):
        get_custom_reward_fn(CustomRewardFunctionConfig("pkg://no_such_package"))
    (tmp_path / "broken.py").write_text("def compute_score(:\n")
    with pytest.raises(ValueError, match=r"broken\.py, name=compute_score: .*line 1: SyntaxError"):
        get_custom_reward_fn(CustomRewardFunctionConfig(str(tmp_path / "broken.py")))
