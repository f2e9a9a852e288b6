"""The configurations of generation and evaluation: verl's files compose as printed, wrong settings are named."""

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.config import checks, evaluation, generation, generation_compat
from lockstep.config.compat import Tables
from lockstep.config.compose import load_config
from lockstep.config.errors import ConfigError
from lockstep.config.evaluation import EvaluationConfig
from lockstep.config.generation import GenerationConfig
from lockstep.config.normalize import merge
from lockstep.config.reference import field_docs
from lockstep.config.schema import keys, sections

DOCUMENTED = yaml.safe_load((Path(__file__).parent / "documented_blocks.yaml").read_text())


def documented(name: str) -> dict[str, Any]:
    """A documented file, from the blocks that the document splits it into."""
    tree: dict[str, Any] = {}
    for block in DOCUMENTED:
        if block["from"].startswith(f"document 3, {name}"):
            tree = merge(tree, block["settings"])
    return tree


@pytest.mark.parametrize(
    ("cls", "tables"),
    [(GenerationConfig, generation_compat.GENERATION), (EvaluationConfig, generation_compat.EVALUATION)],
)
def test_every_key_is_documented_and_tables_match_the_schema(cls: type, tables: Tables) -> None:
    assert [key.name for key in keys(cls).values() if not field_docs(key.owner).get(key.field)] == []
    known = {*keys(cls), *sections(cls)}
    assert {target for target in tables.aliases.values() if target not in tables.keys} <= known
    assert {*tables.unsupported_values, *tables.value_aliases} <= known
    assert not known & tables.keys


def test_the_documented_generation_file_composes_as_printed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "generation.yaml").write_text(yaml.safe_dump(documented("generation.yaml")))
    with caplog.at_level(logging.WARNING):
        config = load_config(GenerationConfig, config_name=str(tmp_path / "generation.yaml"), run_checks=False)
    assert (config.data.n_samples, config.data.batch_size) == (5, 128)
    assert config.data.path[0].endswith("data/rlhf/math/test.parquet") and "~" not in config.data.path[0]
    assert (config.data.max_prompt_length, config.data.max_response_length) == (1536, 512)
    assert (config.rollout.top_k, config.rollout.top_p, config.rollout.dtype) == (50, 0.7, "bfloat16")
    assert config.rollout.name == "vllm" and "rollout.load_format" in caplog.text
    as_run = generation.as_validation(config)
    assert (as_run.trainer.n_gpus_per_node, as_run.trainer.device, as_run.trainer.val_only) == (8, "cuda", True)
    rollout = as_run.actor_rollout_ref.rollout
    assert (rollout.prompt_length, rollout.response_length) == (1536, 512)
    assert (rollout.val_kwargs.n, rollout.val_kwargs.top_k, rollout.val_kwargs.do_sample) == (5, 50, True)
    assert as_run.actor_rollout_ref.actor.fsdp_config.dtype == "bfloat16"


def test_the_documented_evaluation_file_composes_as_printed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "evaluation.yaml").write_text(yaml.safe_dump(documented("evaluation.yaml")))
    config = load_config(EvaluationConfig, config_name=str(tmp_path / "evaluation.yaml"), run_checks=False)
    assert config.data.response_key == "responses" and config.custom_reward_function.name == "compute_score"
    assert evaluation.as_validation(config).data.reward_fn_key == "data_source"
    assert caplog.messages == [], "ray_init has only nulls"


@pytest.mark.parametrize(
    ("cls", "override", "message"),
    [
        (GenerationConfig, "data.n_sample=2", "Did you mean data.n_samples?"),
        (GenerationConfig, "data.n_samples=0", "must be greater than 0"),
        (GenerationConfig, "data.output_path=x.csv", "must end in .parquet"),
        (GenerationConfig, "rollout.temperature=0", "sampling needs a temperature above 0"),
        (GenerationConfig, "rollout.exact=true rollout.name=hf", "rollout.exact=true: only the embedded engine"),
        (GenerationConfig, "rollout.exact=true rollout.quantization=fp8", "rollout.exact=true: the trainer does not"),
        (GenerationConfig, "rollout.n=4", "data.n_samples is the number of responses"),
        (GenerationConfig, "rollout.val_kwargs.n=4", "set rollout.temperature, top_k"),
        (GenerationConfig, "rollout.name=trtllm", "not supported: set embedded, hf, vllm, sglang, tgi or server"),
        (
            GenerationConfig,
            "rollout.name=sglang",
            "not supported without running servers: list them in rollout.server.urls",
        ),
        (GenerationConfig, "rollout.tensor_model_parallel_size=4", "does not divide the number of workers (1)"),
        (GenerationConfig, "rollout.max_model_len=8", "is 2048; set that or more"),
        (GenerationConfig, "data.path=nowhere.parquet", "no such file or folder"),
        (EvaluationConfig, "data.responses_key=x", "Did you mean data.response_key?"),
        (EvaluationConfig, "data.output_path=x.parquet", "must end in .json"),
        (EvaluationConfig, "reward_model.reward_manager=naiv", "naive"),
        (EvaluationConfig, "custom_reward_function.path=nowhere.py", "no such file"),
    ],
)
def test_wrong_settings_are_named(cls: type, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(cls, override.split())
    (problem,) = [p for p in raised.value.problems if override.startswith(p.key)]
    assert message in str(problem)


def test_vllm_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def problems(*overrides: str) -> str:
        with pytest.raises(ConfigError) as raised:
            load_config(GenerationConfig, ["rollout.name=vllm", *overrides])
        return str(raised.value)

    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    assert 'rollout.name=vllm: needs vLLM: pip install "lockstep-rl[vllm]"' in problems()
    monkeypatch.setattr(checks, "find_spec", lambda name: object())
    shared = ["trainer.n_gpus_per_node=4", "rollout.tensor_model_parallel_size=3"]
    assert "size=3: does not divide the number of workers (4); set a divisor" in problems(*shared)
    fits = problems("trainer.n_gpus_per_node=4", "rollout.tensor_model_parallel_size=2")
    assert "rollout" not in fits, "only files are missing"
