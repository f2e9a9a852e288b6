"""User code by reference: one error each, and the way to other processes."""

import os
import pickle
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lockstep.registry import ObjectReferences, Registry, find_registered, load_module, load_object, load_plugin

CODE = """
number = 3

def estimate(x):
    return x

class Base: pass
class Own(Base): pass
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine_of_registry.py").write_text(CODE)
    return str(tmp_path / "mine_of_registry.py")


def test_references(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(file).parent))
    assert load_plugin("some.key", f"{file}:estimate")(2) == 2
    assert load_plugin("some.key", file, "estimate") is load_plugin("some.key", f"{file}:estimate", "unused")
    assert load_plugin(None, "mine_of_registry:estimate") is load_plugin(None, "pkg://mine_of_registry", "estimate")
    base = load_object(f"{file}:Base")
    assert load_plugin("some.key", f"{file}:Own", base=base).__name__ == "Own"
    assert Registry("test thing", "some.key").get(f"{file}:estimate")(3) == 3
    sys.modules.pop("mine_of_registry")


def test_errors_name_the_key_and_the_cause(file: str, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import os\n\nvalue = os.nothing\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    cases = {
        f"{tmp_path}/absent.py:f": r"no file .*absent\.py",
        "no_such_module_here:f": r"No module named",
        f"{file}:estimat": r"has no attribute 'estimat'\. Did you mean 'estimate'",
        f"{file}:number": r"must be a function or a class, not 3",
        file: r"names no attribute; write it as .*mine_of_registry\.py:name",
        f"{tmp_path}/fails.py:f": r"fails\.py, line 3: AttributeError: module 'os' has no attribute 'nothing'",
        f"{tmp_path}/broken.py:f": r"broken\.py, line 1: SyntaxError",
        "python://gone": r"belongs to the Python program that started the run; pass it to lockstep\.train",
    }
    for reference, message in cases.items():
        with pytest.raises(ValueError, match=rf"^some\.key={re.escape(reference)}: .*{message}"):
            load_plugin("some.key", reference)
    (tmp_path / "one.py").write_text("LIMIT = 3\n\ndef reward(): ...\n")
    with pytest.raises(ValueError, match=r"no attribute 'compute_score'\. .*Write .*one\.py:reward to use it\.$"):
        load_plugin("some.key", f"{tmp_path}/one.py", "compute_score")
    with pytest.raises(ValueError, match=r"must be a subclass of builtins\.dict, not Own"):
        load_plugin("some.key", f"{file}:Own", base=dict)


def test_objects_are_valid_inside_their_context() -> None:
    with ObjectReferences() as objects:
        first, second = objects.add(test_references), objects.add(test_references)
        assert first == "python://test_references" != second
        assert load_object(first) is load_object(second) is test_references
    with pytest.raises(ValueError, match="belongs to the Python program"):
        load_object(first)
    assert find_registered("no such kind", "x") is None


OF_MAIN = """
from lockstep.algorithms.advantages import register_adv_est
from lockstep.algorithms.losses import register_policy_loss

factor = 3

@register_adv_est("of_main")
def of_main(token_level_rewards, values):
    return token_level_rewards * factor, values

@register_policy_loss("loss_of_main", prepare=lambda rows, config: {})
def loss_of_main(**kwargs):
    return factor

def reward(text):
    return len(text) * factor
"""

RECEIVER = """
import pickle, sys
pickle.loads(sys.stdin.buffer.read()).apply()
from lockstep.config.estimators import required_inputs
from lockstep.registry import find_registered, load_object
from lockstep.rewards.default import find_scorer
assert required_inputs("of_main") == {"values"}
assert find_registered("advantage estimator", "of_main")(2, 1) == (6, 1)
assert find_registered("policy loss", "loss_of_main")() == 3
assert find_registered("policy loss", "loss_of_main").prepare(1, 2) == {}
assert find_scorer("filed/x")("a", "b") == 0.5
assert load_object("python://reward")("ab") == 6
assert "torch" not in sys.modules
"""


@pytest.mark.usefixtures("no_registrations")
def test_user_code_of_a_program_reaches_its_other_processes(tmp_path: Path) -> None:
    from lockstep.single_controller.environment import ProcessEnvironment

    (tmp_path / "scorers.py").write_text(
        "from lockstep.rewards.default import SCORERS\n\n\n"
        "@SCORERS.register('filed/*')\ndef half(solution_str, ground_truth):\n    return 0.5\n"
    )
    load_module(str(tmp_path / "scorers.py"))
    program: dict[str, Any] = {"__name__": "__main__"}
    exec(OF_MAIN, program)
    with ObjectReferences() as objects:
        assert objects.add(program["reward"]) == "python://reward"
        environment = pickle.dumps(ProcessEnvironment.capture())
        assert objects.add(threading.Lock()) == "python://lock"
        with pytest.raises(ValueError, match=r"python://lock.* cannot be sent to other processes"):
            ProcessEnvironment.capture()
    done = subprocess.run([sys.executable, "-c", RECEIVER], input=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.usefixtures("no_registrations")
def test_an_edited_file_registers_again(tmp_path: Path) -> None:
    from lockstep.rewards.default import SCORERS

    code = "from lockstep.rewards.default import SCORERS\n\n\n@SCORERS.register('edited')\ndef score(text):\n    return {}\n"
    file = tmp_path / "scorer.py"
    for value, time in [(1, 1_000), (2, 2_000)]:
        file.write_text(code.format(value))
        os.utime(file, (time, time))
        assert load_module(str(file)) is load_module(str(file))
        assert SCORERS.get("edited")("") == value
    (tmp_path / "other.py").write_text(code.format(3))
    with pytest.raises(ValueError, match="'edited' is already registered"):
        load_module(str(tmp_path / "other.py"))


def test_threads_that_load_a_file_at_once_get_the_whole_module(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(0.2)\nvalue = 3\n")
    with ThreadPoolExecutor(2) as threads:
        values = list(threads.map(lambda path: load_module(str(path)).value, [tmp_path / "slow.py"] * 2))
    assert values == [3, 3]


@pytest.mark.parametrize("is_file", [True, False])
def test_memory_that_runs_out_while_a_module_is_loaded_is_no_fault_of_the_module(
    is_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "greedy_module.py").write_text("raise MemoryError")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MemoryError):
        load_module(f"{tmp_path}/greedy_module.py" if is_file else "greedy_module")
