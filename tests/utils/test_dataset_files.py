"""Data entries: files, folders, datasets of the Hub and URLs, and the split that each use reads."""

from pathlib import Path

import fsspec
import pytest

from lockstep.data.files import read_rows
from lockstep.utils.dataset_files import FORMS, HubDataset, local_data_files, locate_data, split_of
from lockstep.utils.hub import HubName
from tests.hub import hub_server, use_hub, write_cache
from tests.tiny import write_rows

KEY = "data.train_files"
GSM8K_CARD = b"""---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# Dataset
"""
GSM8K = {
    "README.md": GSM8K_CARD,
    ".gitattributes": b"",
    "main/train-00000-of-00002.parquet": b"1",
    "main/train-00001-of-00002.parquet": b"2",
    "main/test-00000-of-00001.parquet": b"3",
    "socratic/train-00000-of-00001.parquet": b"4",
}
DATASETS = {
    "openai/gsm8k": GSM8K,
    "Maxwell-Jia/AIME_2024": {"README.md": b"# no card", ".gitattributes": b"", "aime_2024_problems.parquet": b"5"},
    "org/pushed": {
        ".gitattributes": b"",
        "dataset_infos.json": b"{}",
        "data/train_sft-00000-of-00001.parquet": b"6",
        "data/test_sft-00000-of-00001.parquet": b"7",
    },
    "org/folders": {".gitattributes": b"", "en/train.jsonl": b"8", "de/train.jsonl": b"9", "de/dev.jsonl": b"10"},
    "org/splits": {f"{split}.jsonl": split.encode() for split in ("train", "validation", "test")},
    "org/csv": {".gitattributes": b"", "train.csv": b""},
    "org/card": {
        "README.md": b"---\nconfigs:\n- config_name: a\n  data_files: [x.jsonl, sub]\n  default: true\n"
        b"- config_name: b\n  data_dir: other\n- config_name: c\n  data_files: {train: x.csv}\n---\n",
        ".gitattributes": b"",
        "x.csv": b"",
        "x.jsonl": b"11",
        "sub/y.jsonl": b"12",
        "other/validation.jsonl": b"13",
        "other/train.jsonl": b"14",
    },
}


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")


def names_in(folder: Path, use: str = "train") -> list[str]:
    return [path.relative_to(folder).as_posix() for path in local_data_files(str(folder), use, KEY)]


def test_splits_by_name() -> None:
    for name, split in {
        "train.parquet": "train",
        "gsm8k_train.jsonl": "train",
        "data/train-00000-of-00002.parquet": "train",
        "data/train_sft-00000-of-00002-1f0c.parquet": "train_sft",
        "main/test-00000-of-00001.parquet": "test",
        "validation/0000.parquet": "validation",
        "my-dev.json": "validation",
        "train/test.jsonl": "test",
        "problems.parquet": None,
        "trained_latest.parquet": None,
    }.items():
        assert split_of(name) == split, name


def test_folders(tmp_path: Path) -> None:
    touch(
        tmp_path / "verl", "train.parquet", "test.parquet", "train.jsonl", "dataset_info.json", ".cache/train.parquet"
    )
    assert names_in(tmp_path / "verl") == ["train.parquet"]
    assert names_in(tmp_path / "verl", "val") == ["test.parquet"]
    touch(tmp_path / "parts", "b.jsonl", "a.jsonl", "sub/c.jsonl", "notes.txt", "dataset_info.json")
    assert names_in(tmp_path / "parts") == names_in(tmp_path / "parts", "val") == ["a.jsonl", "b.jsonl", "sub/c.jsonl"]
    touch(tmp_path / "all", "train.json", "validation.json", "test.json")
    assert names_in(tmp_path / "all", "val") == names_in(tmp_path / "all", "validation") == ["validation.json"]
    assert names_in(tmp_path / "all", "test") == ["test.json"]
    touch(tmp_path / "tests", "test.parquet")
    with pytest.raises(ValueError, match=r"=.*tests: has no train split, only test; name its files instead"):
        names_in(tmp_path / "tests")
    (tmp_path / "empty").mkdir()
    touch(tmp_path / "csv", "train.csv", "dataset_info.json")
    for folder, found in {"empty": "nothing", "csv": r"\.csv, \.json"}.items():
        with pytest.raises(ValueError, match=rf"has no \.parquet, \.jsonl or \.json file \(found: {found}\)"):
            locate_data(tmp_path / folder, "train")


def test_accepted_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "data" / "more").mkdir(parents=True)
    write_rows(tmp_path / "data" / "train.parquet", 3)
    write_rows(tmp_path / "data" / "more" / "train.parquet", 2)
    write_rows(tmp_path / "data" / "test.parquet", 5)
    write_rows(tmp_path / "empty.parquet", 1)
    touch(tmp_path / "data", "dataset_info.json", "README.md")
    assert locate_data(tmp_path / "data", "train")
    assert len(read_rows(str(tmp_path / "data"))) == 5
    assert [row.location for row in read_rows(tmp_path / "data", 1)] == [f"{tmp_path}/data/more/train.parquet, row 0"]
    (tmp_path / "lines").mkdir()
    write_rows(tmp_path / "lines" / "a.jsonl", 2)
    touch(tmp_path / "lines", "b.jsonl")
    assert len(read_rows(str(tmp_path / "lines"))) == 2  # an empty shard is no error


def test_entries_that_are_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for entry in (
        "nowhere",
        "./a/b",
        "data/train.parquet",
        "a/b/c",
        "org/name:a:b:c",
        "org/name:",
        f"{tmp_path}/x",
        "s/t:d.jsonl",
    ):
        with pytest.raises(ValueError) as caught:
            locate_data(entry, "train")
        assert str(caught.value) == f"no such file or folder; {FORMS}", entry
    touch(tmp_path, "rows.csv")
    with pytest.raises(ValueError, match=r"^data\.train_files=rows\.csv: is not a \.parquet, \.jsonl or \.json file$"):
        local_data_files("rows.csv", "train", KEY)


def test_names_of_datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_hub(monkeypatch, tmp_path)
    for entry, config, split in (
        ("org/x", None, None),
        ("org/x:test", None, "test"),
        ("org/x:main:train", "main", "train"),
    ):
        assert locate_data(entry, "train") == HubDataset(HubName("org/x", None, "dataset"), config, split)
    pinned = locate_data("org/x@refs/convert/parquet:main:train", "train")
    assert pinned == HubDataset(HubName("org/x", "refs/convert/parquet", "dataset"), "main", "train")
    use_hub(monkeypatch, tmp_path, offline=True)
    fetch = r"the Hub's dataset of this name is not in the cache .*; run `hf download org/x --repo-type dataset` with network"
    with pytest.raises(ValueError, match=fetch):
        locate_data("org/x:main:train", "train")


def test_datasets_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def contents(*entries: str, use: str = "train") -> bytes:
        return b" ".join(file.read_bytes() for file in local_data_files(entries, use, KEY))

    with hub_server({f"datasets/{name}": files for name, files in DATASETS.items()}) as (url, sent):
        use_hub(monkeypatch, tmp_path, url)
        assert contents("openai/gsm8k:main:train") == b"1 2"
        assert "main/test-00000-of-00001.parquet" not in sent
        assert contents("openai/gsm8k:main:test", "openai/gsm8k:socratic:train") == b"3 4"
        assert contents("Maxwell-Jia/AIME_2024") == contents("Maxwell-Jia/AIME_2024", use="val") == b"5"
        assert contents("org/pushed:train_sft") == b"6"
        assert contents("org/folders:de:train") == b"9"
        assert contents("org/folders:de:validation", use="val") == b"10"
        for split in ("train", "validation", "test"):
            assert contents("org/splits", use=split) == split.encode()
        assert contents("org/splits", use="val") == b"validation"
        assert contents("org/splits:test", use="validation") == b"test"  # what the entry names comes first
        assert contents("org/card") == b"12 11" and contents("org/card:b:validation") == b"13"
        for entry, message in {
            "openai/gsm8k": "has the configs main, socratic; write openai/gsm8k:CONFIG:SPLIT",
            "openai/gsm8k:train": "has the configs main, socratic; write openai/gsm8k:CONFIG:SPLIT",
            "openai/gsm8k:other:train": "has no config other; it has the configs main, socratic; write",
            "openai/gsm8k:socratic:test": "has no test split, only train; write openai/gsm8k:socratic:SPLIT",
            "org/pushed": "has no train split, only test_sft, train_sft; write org/pushed:SPLIT",
            "org/csv": r"has no .parquet, .jsonl or .json file (found: .csv)",
            "org/card:c:train": "its README names x.csv, which are no parquet or JSON files; the Hub's parquet copy may be",
            "org/absent": "no such folder, and the Hub has no dataset of this name",
        }.items():
            with pytest.raises(ValueError) as caught:
                contents(entry)
            assert str(caught.value).startswith(f"{KEY}={entry}: {message}")
    use_hub(monkeypatch, tmp_path, offline=True)
    assert contents("openai/gsm8k:main:train") == b"1 2"  # the cache is enough
    with pytest.raises(ValueError, match=r"HF_HUB_OFFLINE=1\); run `hf download org/folders"):  # not all of it
        contents("org/folders:en:train")


def test_cache_with_a_missing_shard_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path / "files", "data/train-00000-of-00002.parquet")
    use_hub(monkeypatch, tmp_path / "cache", offline=True)
    folder = write_cache(tmp_path / "cache", "org/x", tmp_path / "files", "dataset")
    with pytest.raises(ValueError, match=r"a part of data/train \(1 files of 2\) is not in .*run `hf download org/x "):
        local_data_files("org/x", "train", KEY)
    touch(folder, "data/train-00001-of-00002.parquet")
    assert len(local_data_files("org/x", "train", KEY)) == 2


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    remote = fsspec.filesystem("memory")
    for name in ("train.jsonl", "test.jsonl", "validation.jsonl"):
        remote.pipe(f"/data/{name}", write_rows(tmp_path / name, 3).read_bytes())
    remote.pipe("/data/notes.txt", b"")
    try:
        for use, name in {"val": "validation.jsonl", "test": "test.jsonl", "train": "train.jsonl"}.items():
            assert [path.name for path in local_data_files("memory://data", use, KEY)] == [name]
        assert len(read_rows(["memory://data", "memory://data/test.jsonl"])) == 6
        with pytest.raises(ValueError, match=r"=memory://data/notes.txt: is not a \.parquet"):
            local_data_files("memory://data/notes.txt", "train", KEY)
    finally:
        remote.rm("/", recursive=True)
