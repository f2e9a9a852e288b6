"""Reward functions as Python users write them, as one function for the manager `functions`.

    per sample   reward(solution_str, ground_truth)                       any of `ROW_NAMES` and the columns
    per batch    reward(prompts, completions, answer, **kwargs) -> list   as in TRL; columns are lists

The score is the weighted sum; each function's result is logged under its name if there are several.
"""

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
    """Whether the function can be called with exactly these arguments by name."""
    try:
        inspect.signature(function).bind(**dict.fromkeys(arguments))
    except TypeError:
        return False
    return True


class RewardFunctions:
    """Functions with weights, called as `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`.

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
        self,
        data_sources: list[str],
        solution_strs: list[str],
        ground_truths: list[Any],
        extra_infos: list[dict[str, Any]],
    ) -> list[dict[str, Any]]:
        columns = zip(data_sources, solution_strs, ground_truths, extra_infos)
        rows = [dict(zip(ARGUMENTS, values)) for values in columns]
        results = [
            _call_batch(f, rows) if is_per_batch(f) else [_call_row(f, row) for row in rows] for f, _ in self.functions
        ]
        return [self._combined(of_row) for of_row in zip(*results)]

    def _combined(self, results: Sequence[Any]) -> dict[str, Any]:
        combined: dict[str, Any] = {"score": 0.0}
        for name, (_, weight), result in zip(self.names, self.functions, results):
            own = dict(result) if isinstance(result, Mapping) else {"score": result}
            score = own.pop("score", None)
            combined |= own
            if score is not None:
                combined["score"] += weight * float(score)
            if len(self.names) > 1:
                combined[name] = score
        return combined


def _call_row(function: RewardFunction, row: Mapping[str, Any]) -> Any:
    extra = row["extra_info"]
    return function(**_wanted(function, {**extra, "completion": row["solution_str"], **row}))


def _call_batch(function: RewardFunction, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    extras = [row["extra_info"] for row in rows]
    names = dict.fromkeys(name for extra in extras for name in extra)
    columns = {name: [extra.get(name) for extra in extras] for name in names if name != "prompt"}
    prompts = [extra.get("prompt") for extra in extras]
    completions = [_completion(row["solution_str"], prompt) for row, prompt in zip(rows, prompts)]
    columns |= {
        "ground_truth": [row["ground_truth"] for row in rows],
        "data_source": [row["data_source"] for row in rows],
    }
    result = function(**_wanted(function, {**columns, "prompts": prompts, "completions": completions}))
    scores = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(scores, list | tuple) or len(scores) != len(rows):
        got = f"{len(scores)} values" if isinstance(scores, list | tuple) else type(scores).__name__
        raise ValueError(
            f"{defined_at(function)} returned {got} for {len(rows)} completions; it must return one number each"
        )
    return list(scores)


def _completion(text: str, prompt: Any) -> Any:
    """Text for a prompt that is text, else messages, as in TRL."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _wanted(function: RewardFunction, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the function has parameters for."""
    parameters = parameters_of(function)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(values)
    return {name: values[name] for name in parameters if name in values}
