"""Reward functions as Python users write them, as one function for the manager `functions`.

    per sample   reward(solution_str, ground_truth)                       any of `ROW_NAMES` and the columns
    per batch    reward(prompts, completions, answer, **kwargs) -> list   as in TRL; columns are lists

The score is the weighted sum; each function's result is logged under its name if there are several.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from lockstep.registry import defined_at
from lockstep.rewards.custom import ARGUMENTS

RewardFunction = Callable[..., Any]

BATCH_NAMES = {"prompts", "completions"}
ROW_NAMES = {*ARGUMENTS, "prompt", "completion"}
"""What a function can always read, besides the columns of the data."""


def parameters_of(function: RewardFunction) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def is_per_batch(function: RewardFunction) -> bool:
    """Whether the function has TRL's signature."""
    return "completions" in parameters_of(function)


def accepts(function: RewardFunction, arguments: Collection[str]) -> bool:
    """Whether the function can be called with these arguments by name, and names no other."""
    try:
        inspect.signature(function).bind(**dict.fromkeys(arguments))
    except TypeError:
        return False
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(p.name in arguments or p.kind in variable for p in parameters_of(function).values())


class RewardFunctions:
    """Functions with weights, for the manager `functions`.

    Each row's `extra_info` has its columns, and the prompt under `prompt`. None, as a result, is a function that does not apply
    to the row: it adds nothing.
    """

    def __init__(self, functions: Sequence[tuple[RewardFunction, float]]) -> None:
        self.functions = [(function, float(weight)) for function, weight in functions]
        self.names = [getattr(function, "__name__", type(function).__name__) for function, _ in self.functions]
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"reward: the functions must have different names, not {', '.join(self.names)}")
        for function, _ in self.functions:
            if inspect.iscoroutinefunction(function):
                raise ValueError(
                    f"reward: {defined_at(function)} is a coroutine function; write it as compute_score({', '.join(ARGUMENTS)}) "
                    "and pass it alone, or without async"
                )
        self.by_name = dict(zip(self.names, self.functions))
        self.__name__ = self.__qualname__ = " + ".join(self.names)
        self.__module__ = getattr(self.functions[0][0], "__module__", __name__)

    def check(self, columns: Collection[str]) -> None:
        """ValueError if a function needs an argument that no row has."""
        for function, _ in self.functions:
            known = {*columns, *(BATCH_NAMES if is_per_batch(function) else ROW_NAMES)}
            named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            parameters = parameters_of(function).values()
            missing = [p.name for p in parameters if p.kind in named and p.default is p.empty and p.name not in known]
            if missing:
                raise ValueError(
                    f"reward: {defined_at(function)} needs {', '.join(missing)}, which the rows do not have. Known: "
                    f"{', '.join(sorted(known))}"
                )

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
    ) -> dict[str, Any]:
        """The results of the per-sample functions for one response, by name."""
        row = dict(zip(ARGUMENTS, (data_source, solution_str, ground_truth, extra_info)))
        values = {**extra_info, "completion": solution_str, **row}
        return {
            name: function(**_wanted(function, values))
            for name, (function, _) in self.by_name.items()
            if not is_per_batch(function)
        }

    def per_batch(self) -> dict[str, Callable[..., Any]]:
        """The functions with TRL's signature by name, each as a function of `rows`: the arguments of `__call__` per response."""
        return {name: _of_rows(function) for name, (function, _) in self.by_name.items() if is_per_batch(function)}


def _of_rows(function: RewardFunction) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(rows: Sequence[Mapping[str, Any]]) -> Any:
        return function(**_wanted(function, _columns(rows)))

    return call


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    extras = [row["extra_info"] for row in rows]
    names = dict.fromkeys(name for extra in extras for name in extra)
    columns = {name: [extra.get(name) for extra in extras] for name in names if name != "prompt"}
    prompts = [extra.get("prompt") for extra in extras]
    completions = [_completion(row["solution_str"], prompt) for row, prompt in zip(rows, prompts)]
    for name in ("ground_truth", "data_source"):
        columns[name] = [row[name] for row in rows]
    return columns | {"prompts": prompts, "completions": completions}


def _completion(text: str, prompt: Any) -> Any:
    """Text for a prompt that is text, else messages, as in TRL."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _wanted(function: RewardFunction, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the function has parameters for."""
    parameters = parameters_of(function)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(values)
    return {name: values[name] for name in parameters if name in values}
