"""Convert Python asserts to test cases of the code scorer: `assert f(1, 2) == 3` becomes input "1\\n2" and output "3".

Arguments and results are JSON, so they must be literals that JSON preserves. In results the scorer accepts a list for a
tuple; in arguments a function may need the tuple.
"""

import ast
import json
from typing import Any


def test_cases(source: str, function: str) -> dict[str, Any] | None:
    """`{"inputs", "outputs"}` of the asserts in `source` about `function`; None if one cannot be converted."""
    inputs, outputs = [], []
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.For | ast.While | ast.If | ast.Assign):
            return None
        if isinstance(statement, ast.Assert) and not isinstance(statement.test, ast.Constant):
            case = _case(statement.test, function)
            if case is None:
                return None
            inputs.append(case[0])
            outputs.append(case[1])
    return {"inputs": inputs, "outputs": outputs} if inputs else None


def _case(test: ast.expr, function: str) -> tuple[str, str] | None:
    """One comparison of a call with its result."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq | ast.Is):
        return None
    call, expected = test.left, test.comparators[0]
    if (
        not isinstance(call, ast.Call)
        or not isinstance(call.func, ast.Name)
        or call.func.id != function
        or call.keywords
    ):
        return None
    try:
        arguments = [_as_json(ast.literal_eval(argument)) for argument in call.args]
        return "\n".join(arguments), _as_json(_lists(ast.literal_eval(expected)))
    except ValueError:
        return None


def _as_json(value: Any) -> str:
    """JSON that round-trips to `value`; ValueError if there is none."""
    try:
        text = json.dumps(value, allow_nan=False)
    except TypeError as error:
        raise ValueError(str(error)) from error
    if json.loads(text) != value:
        raise ValueError(f"JSON changes {value!r}")
    return text


def _lists(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_lists(item) for item in value]
    return {key: _lists(item) for key, item in value.items()} if isinstance(value, dict) else value
