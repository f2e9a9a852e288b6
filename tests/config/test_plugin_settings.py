"""Settings of a user's loss and estimator: keyword-only parameters, checked against the signature."""

from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from lockstep.config.compose import load_config
from lockstep.config.errors import ConfigError
from lockstep.config.plugin_settings import estimator_settings, loss_settings
from lockstep.config.ppo import PPOConfig


def loss(
    old_log_prob: Any,
    rollout_is_weights: Any = None,
    *,
    beta: float,
    mode: Literal["hard", "soft"] = "soft",
    steps: int = 3,
    sizes: list[float] = [],  # noqa: B006 (never changed)
    limit: Optional[float] = None,  # noqa: UP045
    inferred=True,  # type: ignore[no-untyped-def]
    written: "int" = 1,
    config: Any = None,
) -> None: ...


def test_values_have_the_types_of_the_parameters_and_the_rest_their_defaults() -> None:
    values = loss_settings(loss, {"beta": 1, "mode": "hard", "sizes": ["1e-3", 2], "inferred": "false", "written": "7"})
    assert values == {
        "beta": 1.0,
        "mode": "hard",
        "steps": 3,
        "sizes": [1e-3, 2.0],
        "limit": None,
        "inferred": False,
        "written": 7,
    }
    assert type(values["beta"]) is float and type(values["written"]) is int
    assert loss_settings(lambda log_prob: None, {}) == {}


def test_bounds_of_a_setting(minimal: list[str]) -> None:
    plugin = Path(__file__).parents[2] / "examples" / "plugins" / "loss.py"
    overrides = [*minimal, f"actor_rollout_ref.actor.policy_loss.loss_mode={plugin}:near_policy"]
    width = "actor_rollout_ref.actor.policy_loss.loss_kwargs.width"
    load_config(PPOConfig, [*overrides, f"{width}=1"])
    with pytest.raises(ConfigError, match=r"loss_kwargs\.width=-1: must be greater than 0"):
        load_config(PPOConfig, [*overrides, f"{width}=-1"])
    with pytest.raises(ConfigError, match=r"loss_kwargs\.width=wide: must be a number"):
        load_config(PPOConfig, [*overrides, f"{width}=wide"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "loss_kwargs.beta: must be set; loss needs it"),
        ({"bta": 1}, "loss_kwargs.bta=1: loss has no such setting. Did you mean 'beta'? Known: beta, inferred, limit"),
        ({"beta": "much"}, "loss_kwargs.beta=much: must be a number"),
        ({"beta": 1, "mode": "harder"}, "loss_kwargs.mode=harder: must be one of hard, soft; did you mean hard?"),
        ({"beta": 1, "steps": 1.5}, "loss_kwargs.steps=1.5: must be an integer"),
        ({"beta": 1, "written": "x"}, "loss_kwargs.written=x: must be an integer"),
        ({"beta": 1, "inferred": 3}, "loss_kwargs.inferred=3: must be true or false"),
        ({"beta": 1, "old_log_prob": 3}, "loss_kwargs.old_log_prob=3: loss has an ordinary parameter of this name"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        loss_settings(loss, given)
    assert f"actor_rollout_ref.actor.policy_loss.{message}" in str(error.value)


def test_arguments_of_an_estimator_may_be_keyword_only() -> None:
    def estimator(*, token_level_rewards: Any, response_mask: Any, index: Any, scale: float = 1.0) -> None: ...

    assert estimator_settings(estimator, {"scale": 2}) == {"scale": 2.0}
    with pytest.raises(ConfigError, match=r"algorithm\.adv_kwargs\.scal=2: .*Did you mean 'scale'\? Known: scale\."):
        estimator_settings(estimator, {"scal": 2})


CODE = """
def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None, *, beta: float):
    ...

def estimator(token_level_rewards, response_mask, index, *, scale: float, **kwargs):
    ...
"""


def test_they_are_checked_with_the_config(minimal: list[str], tmp_path: Path) -> None:
    """All problems come together, before anything but the user's file is loaded; YAML and command line are the same."""
    (tmp_path / "mine.py").write_text(CODE)
    keys = {"policy_loss": "actor_rollout_ref.actor.policy_loss", "algorithm": "algorithm"}
    mine = [
        f"{keys['policy_loss']}.loss_mode='{tmp_path}/mine.py:loss'",
        f"algorithm.adv_estimator='{tmp_path}/mine.py:estimator'",
        "actor_rollout_ref.rollout.n=4",
    ]
    with pytest.raises(ConfigError) as error:
        load_config(PPOConfig, [*minimal, *mine, "algorithm.adv_kwargs.scale=wide"])
    assert [problem.key for problem in error.value.problems] == [
        f"{keys['policy_loss']}.loss_kwargs.beta",
        "algorithm.adv_kwargs.scale",
    ]
    (tmp_path / "my.yaml").write_text("algorithm: {adv_kwargs: {scale: 2}}")
    config = load_config(
        PPOConfig,
        [*minimal, *mine, f"{keys['policy_loss']}.loss_kwargs.beta=1e-3"],
        config_name=str(tmp_path / "my.yaml"),
    )
    assert config.actor_rollout_ref.actor.policy_loss.loss_kwargs == {"beta": 1e-3}
    assert config.algorithm.adv_kwargs == {"scale": 2}


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("loss", "FUNCTION"),
        ("algorithm.adv_estimator", "FUNCTION"),
        ("reward_model.reward_manager", "CLASS"),
    ],
)
def test_a_file_without_a_name_is_one_problem(
    key: str, name: str, minimal: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    settings = {"loss": ["loss_kwargs.beta=1"], "algorithm.adv_estimator": ["adv_kwargs.scale=1"]}.get(key, [])
    with pytest.raises(ConfigError) as error:
        load_config(PPOConfig, [*minimal, f"{key}=mine.py", *settings])
    (problem,) = error.value.problems
    assert problem.message == f"names a file; add the {name.lower()}: mine.py:{name}"


@pytest.mark.parametrize(
    ("override", "name"),
    [("actor_rollout_ref.actor.policy_loss.loss_kwargs.beta=1", "vanilla"), ("algorithm.adv_kwargs.scale=1", "gae")],
)
def test_built_in_ones_have_none(override: str, name: str, minimal: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{name} takes no settings"):
        load_config(PPOConfig, [*minimal, override])
