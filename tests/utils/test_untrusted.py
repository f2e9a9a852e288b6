"""Text of models on a terminal."""

import logging
import sys

import pytest

from lockstep.observability.console import LogHandler
from lockstep.utils.untrusted import printable


@pytest.mark.parametrize(
    "kept", ["plain", "two\nlines\tand a tab", "\u5168\u89d2\u3000\u7a7a", "a\xa0b", "\U0001f469\u200d\U0001f4bb", ""]
)
def test_text_is_kept(kept: str) -> None:
    assert printable(kept) == kept


@pytest.mark.parametrize(
    "removed", ["\x1b", "\x07", "\r", "\x08", "\x9b", "\u202e", "\u2028", "\ud800", "\x00", "\x7f"]
)
def test_what_a_terminal_obeys_is_removed(removed: str) -> None:
    assert printable(f"a{removed}[2Jb") == "a\ufffd[2Jb"


def test_log_records(capsys: pytest.CaptureFixture[str]) -> None:
    handler = LogHandler()
    handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "the model wrote %s", ("\x1b]0;title\x07",), None))
    sys.stderr.flush()
    assert capsys.readouterr().err == "the model wrote \ufffd]0;title\ufffd\n"
