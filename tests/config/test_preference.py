"""The configurations of reward models and DPO."""

import subprocess
import sys

import pytest

from lockstep.config import sft_compat
from lockstep.config.compose import load_config
from lockstep.config.errors import ConfigError
from lockstep.config.preference import DPOConfig, RMConfig
from lockstep.config.reference import field_docs
from lockstep.config.schema import keys, sections

FILES = ["model.path=Qwen/Qwen2.5-0.5B-Instruct", "data.train_files=data/hh/train.parquet"]


@pytest.mark.parametrize("cls", [RMConfig, DPOConfig])
def test_every_key_is_documented_and_tables_match_the_schema(cls: type) -> None:
    assert [key.name for key in keys(cls).values() if not field_docs(key.owner).get(key.field)] == []
    known, tables = {*keys(cls), *sections(cls)}, sft_compat.PREFERENCE_TABLES
    assert {target for target in tables.aliases.values() if target not in tables.keys} <= known
    assert set(tables.unsupported_values) <= known
    assert not known & tables.keys


def test_defaults_and_spellings() -> None:
    rm = load_config(RMConfig, [*FILES, "data.micro_batch_size=2", "use_remove_padding=false"], run_checks=False)
    assert rm.trainer.default_local_dir == "checkpoints/hh/qwen2.5-0.5b-instruct-hh-rm"
    assert rm.data.micro_batch_size_per_gpu == 2 and not rm.data.use_dynamic_bsz and not rm.model.use_remove_padding
    assert rm.data.prompt_key == "prompt" and rm.optim.lr == 1e-5 and rm.trainer.total_epochs == 1
    dpo = load_config(DPOConfig, [*FILES, "dpo.loss_type=ipo"], run_checks=False)
    assert dpo.trainer.experiment_name == "qwen2.5-0.5b-instruct-hh-dpo"
    assert dpo.optim.lr == 1e-6 and dpo.dpo.loss_type == "ipo"


def test_keys_of_sft_columns_are_unknown() -> None:
    for override in ("data.messages_key=x", "data.response_key=x", "data.multiturn.enable=true"):
        with pytest.raises(ConfigError, match="no such key"):
            load_config(DPOConfig, [override], run_checks=False)


def test_errors_need_no_torch() -> None:
    script = (
        "import sys\nfrom lockstep.cli import main\n"
        "try:\n    main(['dpo', 'data.nope=1'])\nexcept SystemExit as stop:\n    print(stop.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["2", "False"] and "data.nope=1: no such key" in done.stderr
