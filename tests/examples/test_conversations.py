"""Many conversations at once through the embedded engine; tools that hang, raise or return bytes cost only their own."""

import re
import runpy
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "conversations.py"


@pytest.mark.usefixtures("no_registrations")
def test_no_conversation_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(BENCHMARK))["main"]
    assert main(["--conversations", "200"]) == 0
    found = dict(re.findall(r"(\w+) ([\d.e+]+)", capsys.readouterr().out.splitlines()[-1]))
    assert (found["conversations"], found["lost"], found["wrong"]) == ("200", "0", "0")
    assert float(found["sampled_tokens"]) > 200 * 5
