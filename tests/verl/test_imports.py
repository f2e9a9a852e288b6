"""Names that public programs import from verl: served by `lockstep.verl`, or refused with what to use instead."""

import csv
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.verl._names import NOT_SERVED, instead_of

ROOT = Path(__file__).parents[2]
with open(Path(__file__).parent / "imports.csv", newline="") as table:
    ROWS = list(csv.DictReader(table))
IMPORTS = [(row["module"], row["name"], int(row["projects"])) for row in ROWS]
"""Module, name, and the number of public projects that import it, or an estimate of it."""
MEGATRON = [(row["module"], row["name"]) for row in ROWS if row["needs"] == "megatron"]


def is_served(module: str, name: str) -> bool:
    try:
        exec(f"from lockstep.verl.{module} import {name}")
    except ImportError as error:
        assert "is not served: " in str(error), error
        return False
    return True


def test_nine_tenths_of_the_imports_are_served() -> None:
    served = {(module, name) for module, name, _ in IMPORTS if is_served(module, name)}
    weighted = sum(projects for module, name, projects in IMPORTS if (module, name) in served)
    assert weighted / sum(projects for *_, projects in IMPORTS) >= 0.9
    assert len(served) / len(IMPORTS) >= 0.9


@pytest.mark.parametrize(("module", "name"), MEGATRON)
def test_names_of_megatron_are_served(module: str, name: str) -> None:
    assert is_served(module, name)


@pytest.mark.parametrize("name", sorted(NOT_SERVED))
def test_a_name_that_is_not_served_says_what_to_use(name: str) -> None:
    module, _, attribute = f"lockstep.verl.{name}".rpartition(".")
    reason = instead_of(name)
    with pytest.raises(ImportError) as raised:
        exec(f"from {module} import {attribute}")
    assert reason is not None and reason in str(raised.value)


def test_a_module_inside_one_that_is_not_served() -> None:
    with pytest.raises(ImportError, match=r"rollout is not served: the rollout engine is chosen by actor_rollout_ref"):
        importlib.import_module("lockstep.verl.workers.rollout.vllm_rollout.vllm_async_server")
    with pytest.raises(ImportError, match="Lockstep has no such module; see docs/migrate_from_verl"):
        importlib.import_module("lockstep.verl.utils.no_such_module")
    with pytest.raises(ImportError, match="no_such_name"):
        exec("from lockstep.verl.utils.fs import no_such_name")


def test_the_migration_page_lists_every_name_that_is_not_served() -> None:
    page = (ROOT / "docs" / "migrate_from_verl.md").read_text()
    missing = [name for name in NOT_SERVED if f"`{name}`" not in page]
    assert not missing


def test_light_modules_do_not_import_torch() -> None:
    light = (
        "",
        ".utils",
        ".trainer",
        ".trainer.constants_ppo",
        ".trainer.main_ppo",
        ".trainer.fsdp_sft_trainer",
        ".utils.config",
        ".workers.config",
    )
    imports = "\n".join(f"import lockstep.verl{name}" for name in light)
    check = f"{imports}\nimport sys\nassert 'torch' not in sys.modules and 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, cwd=ROOT)


def test_sft_is_the_program_of_lockstep() -> None:
    from lockstep.trainer import fsdp_sft_trainer
    from lockstep.trainer.supervised.sft import SFTTrainer
    from lockstep.verl.trainer.fsdp_sft_trainer import FSDPSFTTrainer, main

    assert issubclass(FSDPSFTTrainer, SFTTrainer) and main is fsdp_sft_trainer.main


def test_no_module_outside_refers_to_the_package() -> None:
    """`lockstep.verl` is for programs; the rest of the package does not know it."""
    files = [path for path in (ROOT / "lockstep").rglob("*.py") if "verl" not in path.relative_to(ROOT).parts]
    assert files and not [path for path in files if "lockstep.verl" in path.read_text()]
