"""YAML that may be hostile."""

import re
from pathlib import Path

import pytest

from lockstep.utils.untrusted_yaml import read_yaml


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a: " + b"[" * 50_000, "nested more than 100 levels"),
        (b"- " * 50_000, "nested more than 100 levels"),
        (b"{a: " * 50_000, "nested more than 100 levels"),
        (b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (i, i, i - 1, i - 1) for i in range(1, 40)), "more than 16 aliases"),
        (b"!!python/object/apply:os.system ['false']", "could not determine a constructor"),
        (b"a: [", "expected"),
        (b"\xff\xfe\xff", "utf-8"),
        (b"\x00", "special characters are not allowed|control characters are not allowed"),
        (b" " * (17 << 20), "larger than 16 MiB"),
    ],
)
def test_what_harms_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=re.compile(words)):
        read_yaml(tmp_path / "config.yaml")


def test_the_rest_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: &a [1, 2]\nb: *a\nc: {d: é}\n")
    assert read_yaml(tmp_path / "config.yaml") == {"a": [1, 2], "b": [1, 2], "c": {"d": "é"}}
