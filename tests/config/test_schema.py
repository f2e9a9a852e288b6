"""Dataclasses as a schema: defaults, types, problems collected."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from omegaconf import II, OmegaConf

from lockstep.config.errors import ConfigError
from lockstep.config.ppo import PPOConfig
from lockstep.config.schema import as_written, coerce, defaults, keys, leaves, sections, to_dataclass, to_plain


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    follows: float = II("inner.rate")
    hidden: dict[str, Any] = field(default_factory=dict, metadata={"internal": True})


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    size: int | None = None
    names: list[str] = field(default_factory=list)
    pair: tuple[float, float] = (0.1, 0.2)
    kind: Literal["red", "green"] = "red"
    free: dict[str, Any] = field(default_factory=dict)


def test_defaults_are_nested_and_keep_interpolations() -> None:
    assert defaults(Outer) == {
        "inner": {"rate": 0.5, "follows": "${inner.rate}"},
        "size": None,
        "names": [],
        "pair": [0.1, 0.2],
        "kind": "red",
        "free": {},
    }


def test_internal_fields_are_not_keys() -> None:
    assert "inner.hidden" not in keys(Outer)
    assert list(sections(Outer)) == ["inner"]


def test_an_instance_resolves_interpolations() -> None:
    config = to_dataclass(Outer, {"inner": {"rate": "1e-6"}, "names": "one", "pair": [1, 2], "free": {"a": {"b": 1}}})
    assert config == Outer(inner=Inner(rate=1e-6, follows=1e-6), names=["one"], pair=(1.0, 2.0), free={"a": {"b": 1}})
    assert to_dataclass(Outer, to_plain(config)) == config


@dataclass(frozen=True)
class Followers:
    size: int = 3
    flag: bool = True
    rate: float = 1e-6
    nothing: str | None = None
    names: list[str] = field(default_factory=lambda: ["a", "b"])
    free: dict[str, Any] = field(default_factory=lambda: {"a": {"b": [1]}})
    other: Any = "${flag}"
    text: Any = None


@pytest.mark.parametrize(
    "text",
    [
        *("${size}", "${free}", "${free.a.b}", "${names}", "${nothing}", "${other}"),
        *("n${size}/${flag} ${rate} ${nothing}", "${other}${other}", "${oc.decode:'${size}'}", "${names[1]}"),
    ],
)
def test_references_are_those_of_omegaconf(text: str) -> None:
    expected = OmegaConf.to_container(OmegaConf.create(defaults(Followers) | {"text": text}), resolve=True)
    assert isinstance(expected, dict)
    found = to_dataclass(Followers, {"text": text}).text
    assert found == expected["text"] and type(found) is type(expected["text"])


def test_a_copy_is_its_own() -> None:
    config = to_dataclass(Followers, {"text": "${free}"})
    config.text["a"]["b"].append(2)
    assert config.free == {"a": {"b": [1]}}


def test_malformed_text_is_the_problem_of_its_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST_VARIABLE", "x")
    with pytest.raises(ConfigError, match=r"text=\$\{: interpolation failed") as caught:
        to_dataclass(Followers, {"text": "${", "other": "${oc.env:LOCKSTEP_TEST_VARIABLE}"})
    assert [problem.key for problem in caught.value.problems] == ["text"]


@pytest.mark.parametrize("value", [len, {"f": len}, [{1}], {"a": {None: 1}}])
def test_what_is_not_plain_data_is_a_problem(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        to_dataclass(Followers, {"text": value})
    assert [problem.key for problem in caught.value.problems] == ["text"]


def test_variables_behind_a_nested_config_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST_VARIABLE", "secret")
    nested = {"d": OmegaConf.create({"k": "${oc.env:LOCKSTEP_TEST_VARIABLE}"})}
    settings = {"custom_reward_function": {"reward_kwargs": nested}}
    settings["trainer"] = {"experiment_name": "${custom_reward_function.reward_kwargs.d.k}"}
    config = to_dataclass(PPOConfig, settings)
    assert config.trainer.experiment_name == "secret" and "secret" not in str(as_written(config))


def test_a_circle_is_a_problem() -> None:
    with pytest.raises(ConfigError, match="interpolation failed"):
        to_dataclass(Text, {"word": "${text}", "text": "${word}"})


@dataclass(frozen=True)
class Text:
    word: str = "x"
    text: str = ""


@pytest.mark.parametrize(
    ("text", "expected"), [("a ${word}", "a x"), (r"a \${word}", "a ${word}"), (r"${word}\${word}", "x${word}")]
)
def test_an_escaped_interpolation_stays_text(text: str, expected: str) -> None:
    assert to_dataclass(Text, {"text": text}).text == expected


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        ("1e-6", float, 1e-6),
        (3, float, 3.0),
        (1e3, int, 1000),
        ("12", int, 12),
        ("True", bool, True),
        (7, str, "7"),
        (None, int | None, None),
        ("None", str | None, None),
        ("4", int | None, 4),
        ("x", list[str], ["x"]),
        (None, list[str], []),
        ([1, "2"], list[int], [1, 2]),
        (None, dict[str, Any], {}),
    ],
)
def test_values_are_converted_to_their_type(value: Any, annotation: Any, expected: Any) -> None:
    assert coerce(value, annotation) == expected
    assert type(coerce(value, annotation)) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        ("x", int, "an integer"),
        (1.5, int, "an integer"),
        (float("inf"), int, "an integer"),
        (True, int, "an integer"),
        (True, float, "a number"),
        (1, bool, "true or false"),
        (None, str, "a string"),
        (False, str, "a string"),
        ("x", int | None, "an integer or null"),
        ("gren", Literal["red", "green"], "one of red, green; did you mean green?"),
        (["a", 1.5], list[int], "a list, each item an integer"),
        ([1.0], tuple[float, float], "a list of 2, each item a number"),
        ("x", dict[str, Any], "a mapping"),
    ],
)
def test_mismatch_says_what_is_allowed(value: Any, annotation: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        coerce(value, annotation)


def test_all_problems_are_collected() -> None:
    with pytest.raises(ConfigError) as caught:
        to_dataclass(Outer, {"inner": {"rate": "fast", "rat": 1}, "size": "big", "kind": "blue", "colour": 1})
    assert {problem.key for problem in caught.value.problems} == {"inner.rate", "inner.rat", "size", "kind", "colour"}
    text = str(caught.value)
    assert text.startswith("5 problems in the configuration:")
    assert "inner.rate=fast: must be a number" in text  # inner.follows, which follows it, is not reported
    assert "inner.rat=1: no such key. Did you mean inner.rate?" in text
    assert "size=big: must be an integer or null" in text


def test_broken_interpolation_names_its_key() -> None:
    with pytest.raises(ConfigError, match=r"size=\$\{nowhere\}: interpolation failed"):
        to_dataclass(Outer, {"size": "${nowhere}"})


def test_missing_value_must_be_set() -> None:
    with pytest.raises(ConfigError, match=r"size=\?\?\?: must be set on the command line"):
        to_dataclass(Outer, {"size": "???"})


def test_defaults_of_the_whole_configuration_are_consistent() -> None:
    config = to_dataclass(PPOConfig, {"data": {"max_response_length": 64}})
    assert config.actor_rollout_ref.rollout.response_length == 64
    assert config.actor_rollout_ref.actor.clip_ratio_high == config.actor_rollout_ref.actor.clip_ratio == 0.2
    assert config.critic.ppo_mini_batch_size == 256
    assert config.trainer.default_local_dir == "checkpoints/lockstep/run"


def test_leaves_of_a_tree() -> None:
    tree = {"a": {"b": 1, "c": {"d": [2]}, "e": {}}, "f": None}
    assert list(leaves(tree)) == [("a.b", 1), ("a.c.d", [2]), ("a.e", {}), ("f", None)]
    assert list(leaves({"x": 1}, "s")) == [("s.x", 1)]
