"""The wheel has everything and works without the source; the files around it agree with the package."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from lockstep import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_citation_has_the_required_keys_and_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # required by its schema
    assert citation["cff-version"] == "1.2.0" and citation["version"] == __version__
    assert citation["license"] == PROJECT["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]


def test_changelog_has_the_version_below_unreleased() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert headings[:2] == ["Unreleased", __version__]


def test_install_page_lists_every_extra_and_the_wheel() -> None:
    page = (ROOT / "docs/install.md").read_text()
    assert [extra for extra in PROJECT["optional-dependencies"] if f"`{extra}`" not in page] == []
    wheels = re.findall(r"lockstep_rl-([\d.]+)-py3", page)
    assert wheels and set(wheels) == {__version__}


def instructions() -> list[tuple[str, str]]:
    """Instruction and arguments of each line of the Containerfile, without comments and continuations."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Containerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(name, rest.strip()) for name, rest in re.findall(r"^([A-Z]+) (.+)$", text, flags=re.M)]


def test_container_file_copies_what_exists_and_pins_its_base() -> None:
    found = instructions()
    bases = [rest.split()[0] for name, rest in found if name == "FROM"]
    assert len(bases) == 2 and all(re.fullmatch(r"python:3\.\d+-slim-[a-z]+", base) for base in bases)
    oldest = re.search(r">=3\.(\d+)", PROJECT["requires-python"])
    assert oldest is not None and bases[0].startswith(f"python:3.{oldest[1]}-")  # the one of the tests
    copied = [word for name, rest in found if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]]
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert set(copied) == set(sent)
    (pins,) = re.findall(r"pip install .* build==(\S+) setuptools==(\S+)", dict(found[::-1])["RUN"])
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    assert {f"build=={pins[0]}", f"setuptools=={pins[1]}"} <= set(constraints)


def test_container_installs_known_extras_and_does_not_run_as_root() -> None:
    found = dict(instructions())
    extras = re.findall(r"^ARG EXTRAS=(.+)$", (ROOT / "Containerfile").read_text(), flags=re.M)
    assert set(extras[0].split(",")) <= set(PROJECT["optional-dependencies"])
    assert found["USER"] not in ("root", "0") and found["ENTRYPOINT"] == '["lockstep"]'


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command that sees neither the source tree nor the settings of the tests."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


def data_files() -> set[str]:
    """The package's files that are not Python."""
    folders = [path for path in (ROOT / "lockstep").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(ROOT)) for path in folders if path.suffix != ".py"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, in a copy: a build writes into its folder."""
    pytest.importorskip("build")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, source)
    shutil.copy(ROOT / "constraints.txt", source)
    shutil.copytree(ROOT / "lockstep", source / "lockstep", ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", source / "dist", source, cwd=source.parent)
    (sdist,) = (source / "dist").glob("*.tar.gz")
    (wheel,) = (source / "dist").glob("*.whl")
    assert (sdist.name, wheel.name) == (
        f"lockstep_rl-{__version__}.tar.gz",
        f"lockstep_rl-{__version__}-py3-none-any.whl",
    )
    return wheel


@pytest.mark.slow
def test_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "lockstep").rglob("*.py")}
    assert {"lockstep/observability/timeline.html", "lockstep/config/presets/algorithm/grpo.yaml"} <= data_files()
    assert sorted((modules | data_files()) - names) == []
    assert [name for name in names if not name.startswith(("lockstep/", "lockstep_rl-"))] == []


@pytest.mark.slow
def test_installed_wheel_trains_the_demo(wheel: Path, tmp_path: Path) -> None:
    """In a new environment, whose other packages are those of this one."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    # A path that is added this way comes after the wheel, and its own .pth files, as of an editable install, are not read.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = tmp_path / "elsewhere"
    where.mkdir()
    found = run(python, "-c", "import lockstep, sys; print(lockstep.__file__, *sys.path)", cwd=where).split()
    assert Path(found[0]).is_relative_to(packages) and str(ROOT) not in found
    command = tmp_path / "venv/bin/lockstep"
    assert "usage: lockstep PROGRAM" in run(command, "--help", cwd=where)
    assert run(command, "--version", cwd=where) == f"lockstep {__version__}\n"
    run(command, "demo", "--steps", "2", "--warmup-steps", "2", "--device", "cpu", "--out", "demo", cwd=where)
    assert len((where / "demo/metrics.jsonl").read_text().splitlines()) >= 2
    run(command, "timeline", "demo", cwd=where)
    assert list(where.rglob("*.html"))
