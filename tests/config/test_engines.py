"""What each engine can do: built in, registered or in a file, and what the checks of a config make of it."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.config.actor_rollout_ref import RolloutConfig, max_expected_gap
from lockstep.config.compose import load_config, log_once
from lockstep.config.engines import ROLLOUT_ENGINES, TRAIN_ENGINES, EngineRegistry, RolloutEngineInfo
from lockstep.config.errors import ConfigError
from lockstep.config.old_log_probs import old_log_probs_source
from lockstep.config.ppo import PPOConfig
from lockstep.config.roles import sections_of
from lockstep.config.schema import keys, sections
from lockstep.config.sft import SFTConfig
from lockstep.trainer.ppo.audit import is_gap_expected

PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
TRAINED = f"{PLUGINS / 'training_engine.py'}:PlainEngine"


def problems(root: type, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(root, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("engines", "name"),
    [(engines, name) for engines in (ROLLOUT_ENGINES, TRAIN_ENGINES) for name in engines.built_in],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_built_in_engines_have_their_entry(engines: EngineRegistry[Any], name: str) -> None:
    info = engines.built_in[name]
    assert engines.problem(name) is None and engines.info(name) is info and name in engines
    with pytest.raises(ValueError, match=f"{engines.kind} '{name}' is already registered"):
        engines.register(name)
    if engines is TRAIN_ENGINES and info.package is not None:
        pytest.importorskip(info.package)
    if not (Path(lockstep.__file__).parents[1] / (info.engine.partition(":")[0].replace(".", "/") + ".py")).is_file():
        pytest.skip("module missing")
    assert engines.get(name).info is info


def test_unread_keys_exist() -> None:
    known = {*keys(RolloutConfig), *(f"{section}." for section in sections(RolloutConfig))}
    for name, info in ROLLOUT_ENGINES.built_in.items():
        assert set(info.unread) <= known, name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["name=hf", "quantization=fp8"],
            "quantization=fp8: not supported by .*name=hf; set null, or .*=embedded or vllm",
        ),
        (["quantization=int4"], "quantization=int4: .*name=embedded quantises to fp8; set that or null"),
        (["quantization=fp8", "tensor_model_parallel_size=2"], "several ranks hold .* set null, or .*parallel_size=1"),
        (
            ["quantization=fp8", "calculate_log_probs=false"],
            "its drift is measured by .* set .*calculate_log_probs=true",
        ),
        (
            ["quantization=fp8", "exact=true"],
            "1 problem .*\n.*exact=true: .* 8 bits; set .*quantization=null, or .*exact=false",
        ),
        (["quantization=fp8", "quantization_max_gap=0"], "quantization_max_gap=0"),
        (
            ["name=hf", "kv_cache_dtype=fp8"],
            "1 problem .*\n.*kv_cache_dtype=fp8: not supported by .*name=hf; set null, or .*=embedded or vllm",
        ),
        (["name=server", "kv_cache_dtype=fp8"], "kv_cache_dtype=fp8: not supported by .*name=server; set null"),
        (["kv_cache_dtype=fp8_e5m2"], "kv_cache_dtype=fp8_e5m2: .*name=embedded quantises to fp8; set that or null"),
        (["kv_cache_dtype=fp8", "tensor_model_parallel_size=2"], "kv_cache_dtype=fp8: .*several ranks .*set null, or"),
        (
            ["kv_cache_dtype=fp8", "calculate_log_probs=false"],
            "kv_cache_dtype=fp8: its drift is measured by .* set .*calculate_log_probs=true",
        ),
        (
            ["kv_cache_dtype=fp8", "exact=true"],
            "1 problem .*\n.*exact=true: .* 8 bits; set .*kv_cache_dtype=null, or .*exact=false",
        ),
    ],
)
def test_quantization_that_is_refused(settings: list[str], message: str, minimal: list[str]) -> None:
    workers = ["trainer.n_gpus_per_node=2"] if "tensor_model_parallel_size=2" in settings else []
    found = problems(PPOConfig, *minimal, *workers, *(f"{ROLLOUT}.{setting}" for setting in settings))
    assert re.search(message, found), found


@pytest.mark.parametrize("key", ["quantization", "kv_cache_dtype"])
def test_a_quantised_rollout_is_corrected_unless_the_user_says_otherwise(
    key: str, minimal: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    correction = "algorithm.rollout_correction"
    fp8 = [*minimal, f"{ROLLOUT}.{key}=fp8"]
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        config = load_config(PPOConfig, fp8)
    assert config.algorithm.rollout_correction.rollout_is == "token"
    assert old_log_probs_source(config, is_one_update=True) == "pass"
    assert caplog.text.count("rollout_is=token); set that key to null to train without") == 1
    assert max_expected_gap(config.actor_rollout_ref.rollout) == 0.2 and not is_gap_expected(config)
    for setting in (f"{correction}.rollout_is=null", f"{correction}.bypass_mode=true"):
        chosen = load_config(PPOConfig, [*fp8, setting])
        assert chosen.algorithm.rollout_correction.rollout_is is None and not is_gap_expected(chosen)
    assert f"{ROLLOUT}.{key}=fp8: samples are of a policy that is not quite the trainer's" in caplog.text
    for other in ([f"{ROLLOUT}.name=vllm"], ["trainer.device=cpu", f"{ROLLOUT}.{key}=null"]):
        plain = load_config(PPOConfig, [*fp8, *other], run_checks=False)
        assert plain.algorithm.rollout_correction.rollout_is is None
        assert max_expected_gap(plain.actor_rollout_ref.rollout) is None
    assert is_gap_expected(load_config(PPOConfig, [*minimal, f"{correction}.rollout_is=token"]))


@pytest.mark.usefixtures("no_registrations")
def test_an_engine_that_is_registered_says_what_it_can_do(minimal: list[str]) -> None:
    @ROLLOUT_ENGINES.register("toy")
    class Toy:
        info = RolloutEngineInfo(tensor_parallel=True)

    assert ROLLOUT_ENGINES.info("toy") is Toy.info and "toy" in ROLLOUT_ENGINES
    parallel = [f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"]
    load_config(PPOConfig, [*minimal, f"{ROLLOUT}.name=toy", *parallel])
    assert "each worker holds the whole rollout model" in problems(PPOConfig, *minimal, f"{ROLLOUT}.name=hf", *parallel)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("embeded", "no such name. Did you mean 'embedded'? Known: embedded, hf, server, sglang, tgi, vllm"),
        ("engine.py", "names a file; add the class: engine.py:CLASS"),
        ("no_such_file.py:Engine", "no file "),
        (f"{PLUGINS / 'rollout_engine.py'}:Plain", "has no attribute 'Plain'"),
        (TRAINED, "is not a rollout engine"),
    ],
)
def test_engines_that_do_not_exist(minimal: list[str], engine: str, message: str) -> None:
    found = problems(PPOConfig, *minimal, f"{ROLLOUT}.name={engine}")
    assert "1 problem in the configuration" in found and f"{ROLLOUT}.name={engine}: " in found and message in found
    found = problems(PPOConfig, *minimal, f"{ACTOR}.strategy={engine.replace('training', 'rollout')}")
    assert "1 problem in the configuration" in found, "not again for the roles that follow the actor"


def test_a_training_engine_that_cannot_do_what_a_run_asks(minimal: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = f"{ACTOR}.strategy={TRAINED}"
    load_config(PPOConfig, [*minimal, strategy])
    found = problems(PPOConfig, *minimal, strategy, "actor_rollout_ref.model.lora_rank=4")
    assert (
        f"actor_rollout_ref.model.lora_rank=4: {strategy} trains no adapters; set 0, or {ACTOR}.strategy=fsdp" in found
    )
    found = problems(PPOConfig, *minimal, strategy, "trainer.n_gpus_per_node=2", f"{ACTOR}.use_kl_loss=true")
    assert "1 problem in" in found and f"{strategy}: trains in one process, not 2; set fsdp" in found
    load_config(PPOConfig, [*minimal, "trainer.n_gpus_per_node=2", "actor_rollout_ref.model.lora_rank=4"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    supervised = [part.replace("actor_rollout_ref.", "") for part in minimal]
    assert ": trains in one process, not 2; set fsdp" in problems(SFTConfig, *supervised, f"model.strategy={TRAINED}")
    assert "model.strategy=fdsp: no such name. Did you mean" in problems(SFTConfig, *supervised, "model.strategy=fdsp")


def test_notices_about_keys_that_the_users_engine_does_not_read(
    minimal: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    name = f"{PLUGINS / 'rollout_engine.py'}:PlainRollout"
    load_config(PPOConfig, [*minimal, f"{ROLLOUT}.name={name}", f"{ROLLOUT}.kv_block_size=8", f"{ROLLOUT}.dtype=fp32"])
    assert f"{ROLLOUT}.kv_block_size=8 has no effect: {ROLLOUT}.name is {name}" in caplog.text
    assert f"{ROLLOUT}.dtype" not in caplog.text


@pytest.mark.parametrize("role", ["actor", "actor_rollout", "rollout", "ref", "critic", "rm", "model"])
def test_sections_of_roles_exist(role: str) -> None:
    root = SFTConfig if role == "model" else PPOConfig
    found = sections_of(role)
    assert {found.role, found.model, *found.engines().values()} <= set(sections(root)) and found.strategy in keys(root)
    config = root()
    assert found.config(config).strategy == "fsdp" or "${" in found.config(config).strategy
    assert f"{found.role}.ulysses_sequence_parallel_size" in keys(root)
