"""The whole project: files load, modules import, docs and pins agree."""

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

import lockstep
from lockstep.agents.tools.load import load_tools
from lockstep.config.compat import UNSUPPORTED_VALUES
from lockstep.config.compose import PRESETS, load_config
from lockstep.config.ppo import PPOConfig
from lockstep.config.sft import SFTConfig

ROOT = Path(__file__).parents[1]
OPTIONAL = (
    *("ray", "vllm", "wandb", "mlflow", "swanlab", "starlette", "uvicorn", "langgraph", "langchain_core"),
    *("mcp", "bm25s", "reasoning_gym", "skyrl_gym", "openenv", "verifiers", "megatron", "deepspeed"),
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def project_files(suffix: str) -> Iterator[Path]:
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith(".") or name in (".ci", ".github")]
        yield from (Path(folder) / name for name in names if name.endswith(suffix))


def test_every_yaml_file_loads() -> None:
    for path in [*project_files(".yaml"), *project_files(".yml")]:
        yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_preset_composes(path: Path) -> None:
    config = SFTConfig if path.parent.name in ("engine", "optim") else PPOConfig
    load_config(config, [f"{path.parent.name}={path.stem}"], run_checks=False)


def test_every_example_configuration_loads() -> None:
    paths = list((ROOT / "examples").glob("**/*.yaml"))
    paths.remove(ROOT / "examples/tools/search.yaml")  # needs a corpus; tests/examples/test_recipes.py loads it
    assert paths
    for path in paths:
        if path.parent.name == "tools":
            assert load_tools(str(path), None)
        else:
            load_config(PPOConfig, [], config_name=path.stem, config_dir=path.parent, run_checks=False)


def test_every_module_imports_without_the_extras() -> None:
    modules = [module.name for module in pkgutil.walk_packages(lockstep.__path__, "lockstep.")]
    # these import Ray and Megatron; nothing else does
    needing = (".ray_backend", ".verl.single_controller.ray.", ".engines.train.megatron")
    modules = [name for name in modules if not any(part in name for part in needing)]
    for name in ("agents.endpoint.server", "observability.dashboard.app"):
        modules.remove(f"lockstep.{name}")  # these import Starlette and uvicorn; nothing else does
    modules.remove("lockstep.agents.loops.chat_model")  # imports LangChain; nothing else does
    script = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"  # None makes the import fail
        f"for name in {modules!r}:\n"
        "    try:\n        importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error:\n"  # kernels need Triton, which CPU-only installs lack
        "        if error.name != 'triton':\n            raise\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]


def test_every_module_has_a_docstring() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "lockstep").rglob("*.py")
        if path.stat().st_size and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def imports_of(name: str, path: Path, modules: Mapping[str, Path]) -> set[str]:
    """The modules of the project that one imports, wherever the import stands; `from package import name` is its `__init__`."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                source = ".".join([*package.split(".")[: len(package.split(".")) + 1 - node.level], *source.split()])
            members = {f"{source}.{alias.name}" for alias in node.names}
            found |= {member if member in modules else source for member in members}
    return found & set(modules)


def circles(graph: Mapping[str, set[str]]) -> set[str]:
    """The modules that are left once those that import none of the others are taken away: a circle, and who imports it."""
    left = set(graph)
    while leaves := {name for name in left if not graph[name] & left}:
        left -= leaves
    while roots := left - set().union(*(graph[name] for name in left)):
        left -= roots
    return left


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {"b", "c"}


def test_imports_have_no_circles() -> None:
    modules = {}
    for path in (ROOT / "lockstep").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {name: imports_of(name, path, modules) for name, path in modules.items()}
    assert circles(graph) == set()


def test_pins_are_within_ranges_and_every_dependency_is_documented() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    page = (ROOT / "docs" / "dependencies.md").read_text().lower()
    extras = PROJECT["optional-dependencies"]
    own = PROJECT["name"]  # an extra that consists of others
    for text in [*PROJECT["dependencies"], *(item for extra in extras.values() for item in extra)]:
        if text.startswith(own):
            continue
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        assert name in page, f"docs/dependencies.md does not explain {name}"
        if name in versions:
            assert requirement.specifier.contains(versions[name]), f"constraints.txt pins {name} outside {text}"
    unpinned = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]} - set(versions)
    assert not unpinned


def test_links_between_pages_are_valid() -> None:
    broken = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []


def test_extras_exist_and_none_installs_what_the_config_rejects() -> None:
    extras = set(PROJECT["optional-dependencies"])
    rejected = {value for values in UNSUPPORTED_VALUES.values() for value in values}
    assert "trtllm" in rejected and not extras & rejected
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "lockstep").rglob("*.py")]
    for path in texts:
        text = path.read_text()
        offered = re.findall(r"lockstep-rl\\*\[(\w+)\]", text) + re.findall(r"\.\[(\w+)\]", text)
        for extra in offered if path.suffix == ".md" else re.findall(r"lockstep-rl\\*\[(\w+)\]", text):
            assert extra in extras, f"{path.relative_to(ROOT)} offers {extra}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = [path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"]
    assert [name for name in pages if f"({name})" not in index] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_test_is_run_by_one_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    quick, slow, *engines = re.findall(r"pytest -m (.+) \$\(PYTEST_ARGS\)(.*)", makefile)
    assert quick == ('"not slow and not megatron and not deepspeed"', "")
    assert slow == ('"($(LONG)) and not deepspeed"', "") and "\nLONG ?= slow and not megatron\n" in makefile
    assert [marker for marker, _ in engines] == ["megatron", "deepspeed", "vllm"]
    for marker, places in engines:
        marked = [file for file in (ROOT / "tests").rglob("test_*.py") if f"pytest.mark.{marker}" in file.read_text()]
        folders = [ROOT / place for place in places.split()]
        assert [file for file in marked if not {file, *file.parents} & set(folders)] == []
    calls = (ROOT / ".ci/run").read_text()
    assert '\nmake test test-all LONG="slow or megatron"\nmake test-deepspeed\n' in calls and "then make test-vllm" in calls


def test_the_command_is_the_cli() -> None:
    module, _, attribute = PROJECT["scripts"]["lockstep"].partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))
