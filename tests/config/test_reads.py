"""No silent key: every field of the configuration is read by the code, or a notice says that it has no effect."""

import logging
import re
from pathlib import Path
from typing import get_args

import pytest

import lockstep
from lockstep.config.algorithm import AdvantageEstimator
from lockstep.config.checks import _FIXED_VALUES
from lockstep.config.compose import load_config
from lockstep.config.data import SFTDataConfig
from lockstep.config.evaluation import EvaluationConfig
from lockstep.config.generation import GenerationConfig
from lockstep.config.generation_checks import NEVER_READ as NEVER_READ_IN_GENERATION
from lockstep.config.policy_loss import BUILT_IN_LOSSES
from lockstep.config.ppo import PPOConfig
from lockstep.config.preference import DPOConfig, RMConfig
from lockstep.config.schema import Key, defaults, get_in, keys
from lockstep.config.sft import SFTConfig
from lockstep.config.sft_checks import NEVER_READ as NEVER_READ_IN_SFT
from lockstep.config.without_effect import LORA_SETTINGS, NEVER_READ
from tests.config.config_reads import fields_read

READ_ELSEWHERE = {
    "actor_rollout_ref.ref.enable": "false makes a KL term an error (config/ppo_checks.py)",
    "ulysses_sequence_parallel_size": "`ranks_per_row` reads it from any section",
}
"""Field, or key, that `fields_read` cannot see."""
OF_ONE_SECTION = {
    **dict.fromkeys(("optimizer_offload", "seed", "model_dtype"), "TrainEngineConfig"),
    "full_determinism": "FSDPEngineConfig",
    **dict.fromkeys(("grad_offload", "use_distributed_optimizer", "override_ddp_config"), "McoreEngineConfig"),
    **dict.fromkeys(
        ("enable_gradient_checkpointing", "custom_chat_template", "lora_rank", *LORA_SETTINGS), "HFModelConfig"
    ),
}
"""Fields of `NEVER_READ` that other sections of the same class read."""


@pytest.fixture(scope="module")
def reads() -> set[tuple[str, str]]:
    sources = [path.read_text() for path in Path(lockstep.__file__).parent.rglob("*.py")]
    audits = {name for source in sources for name in re.findall(r'\b(?:found|checks|problem)\(\s*"(\w+)"', source)}
    named = {(cls, name) for name in audits for cls in ("SupervisedAuditConfig", "AuditConfig")}
    return fields_read(source for source in sources if "onfig" in source) | named


def is_read(key: Key, reads: set[tuple[str, str]]) -> bool:
    """Whether the field is read, also under the name of a base class."""
    return any((cls.__name__, key.field) in reads for cls in key.owner.__mro__)


def is_explained(key: Key, followed: set[str]) -> bool:
    has_one_value = ".".join(key.name.rsplit(".", 2)[-2:]) in _FIXED_VALUES or len(get_args(key.annotation)) == 1
    explained = (*READ_ELSEWHERE, *NEVER_READ, *NEVER_READ_IN_SFT, *NEVER_READ_IN_GENERATION)
    return has_one_value or key.name in followed or not {key.name, key.field}.isdisjoint(explained)


@pytest.mark.parametrize("cls", [PPOConfig, SFTConfig, RMConfig, DPOConfig, GenerationConfig, EvaluationConfig])
def test_every_key_is_read_or_has_a_notice(cls: type, reads: set[tuple[str, str]]) -> None:
    tree = defaults(cls)
    followed = {str(get_in(tree, name, None)).removeprefix("${").removesuffix("}") for name in keys(cls)}
    unread = [key for key in keys(cls).values() if not is_read(key, reads)]
    silent = [key.name for key in unread if not is_explained(key, followed)]
    assert not silent, f"nothing reads {silent}: read them, delete them, or say why in without_effect.NEVER_READ"
    assert [key.name for key in keys(SFTDataConfig).values() if not is_read(key, reads)] == []


def test_tables_have_no_key_that_is_read(reads: set[tuple[str, str]]) -> None:
    for name in NEVER_READ:
        key = keys(PPOConfig)[name]
        assert key.field in OF_ONE_SECTION or not is_read(key, reads), f"{name} is read: remove it from NEVER_READ"
    for name in READ_ELSEWHERE:
        used = [key for key in keys(PPOConfig).values() if name in (key.name, key.field) and not is_read(key, reads)]
        assert used, f"{name} needs no entry in READ_ELSEWHERE"


def test_a_new_field_that_nothing_reads_is_found() -> None:
    source = """
@dataclass
class Section:
    used: int = 1
    inner: "Inner" = None
    unused: int = 2

@dataclass
class Inner:
    deep: int = 0
    by_getattr: int = 0
    forgotten: int = 0

class Worker:
    def __init__(self, config: Section | None) -> None:
        self.config = config

    def run(self, other: "OtherSection") -> int:
        inner, width = self.config.inner, getattr(self.config.inner, "by_getattr")
        other.unused, self.config.used = 1, 3
        return [inner.deep for _ in range(self.config.used)]
"""
    own = {"used", "inner", "unused", "deep", "by_getattr", "forgotten"}
    read = {name for cls, name in fields_read([source]) if cls in ("Section", "Inner")}
    assert own - read == {"unused", "forgotten"}


def test_built_in_losses_and_estimators_name_real_keys() -> None:
    from lockstep.algorithms.losses.policy import POLICY_LOSSES

    built_in = {name for name in POLICY_LOSSES if POLICY_LOSSES.get(name).__module__.startswith("lockstep.")}
    assert built_in == set(BUILT_IN_LOSSES)
    read = {f"actor_rollout_ref.actor.{key}" for needs in BUILT_IN_LOSSES.values() for key in needs.keys}
    read |= {f"algorithm.{key}" for estimator in AdvantageEstimator for key in estimator.keys}
    assert read <= set(keys(PPOConfig))


ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))


@pytest.mark.parametrize(
    ("overrides", "notice"),
    [
        (
            [f"{REF}.fsdp_config.param_offload=true"],
            f"{REF}.fsdp_config.param_offload=True has no effect: there is no KL term",
        ),
        (
            [f"{REF}.fsdp_config.optimizer_offload=true", f"{ACTOR}.use_kl_loss=true"],
            "the reference policy is not trained",
        ),
        (
            ["data.filter_overlong_prompts_workers=4"],
            "filter_overlong_prompts_workers=4 has no effect: the tokenizer's",
        ),
        (["critic.model.custom_chat_template=x"], "set actor_rollout_ref.model.custom_chat_template"),
        (
            ["reward_model.model.path=x", "reward_model.micro_batch_size_per_gpu=4"],
            "have no effect: reward_model.enable is",
        ),
        (["reward_model.judge.model=m"], "reward_model.judge.model=m has no effect: nothing is judged"),
        (["ray_init.num_cpus=4"], "ray_init.num_cpus=4 has no effect: the run does not use Ray"),
        (
            [f"{ROLLOUT}.disable_log_stats=false"],
            f"disable_log_stats=False has no effect: {ROLLOUT}.name is embedded",
        ),
        (
            [f"{ROLLOUT}.name=hf", f"{ROLLOUT}.enforce_eager=true"],
            f"enforce_eager=True has no effect: {ROLLOUT}.name is hf",
        ),
        ([f"{ROLLOUT}.checkpoint_engine.backend=naive"], "has no effect: actor and rollout share their workers"),
        (["algorithm.egpo_alpha=3"], "algorithm.egpo_alpha=3.0 has no effect: algorithm.adv_estimator is gae"),
        (
            ["algorithm.norm_adv_by_std_in_grpo=false"],
            "norm_adv_by_std_in_grpo=False has no effect: gae does not use it",
        ),
        (["algorithm.kl_penalty=abs"], "algorithm.kl_penalty=abs has no effect: algorithm.use_kl_in_reward is false"),
        (["algorithm.kl_ctrl.target_kl=0.5"], "target_kl=0.5 has no effect: algorithm.kl_ctrl.type is not adaptive"),
        ([f"{ACTOR}.tau_pos=2"], f"{ACTOR}.tau_pos=2.0 has no effect: {ACTOR}.policy_loss.loss_mode is vanilla"),
        (
            [f"{ACTOR}.policy_loss.loss_mode=gpg", f"{ACTOR}.clip_ratio=0.1"],
            "has no effect: actor_rollout_ref.actor.policy_",
        ),
        (
            [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"],
            f"{ACTOR}.use_dynamic_bsz is true",
        ),
        (["algorithm.rollout_correction.loss_type=reinforce"], "algorithm.rollout_correction.bypass_mode is false"),
        ([f"{ACTOR}.optim.min_lr_ratio=0.1"], f"{ACTOR}.optim.lr_scheduler_type is constant"),
        (
            ["algorithm=grpo", f"{ROLLOUT}.n=4", "critic.ppo_mini_batch_size=128"],
            "critic.ppo_mini_batch_size=128 has no",
        ),
        ([f"{ACTOR}.rollout_n=4"], f"{ACTOR}.rollout_n has no effect: it follows {ROLLOUT}.n"),
        (
            [f"{ROLLOUT}.agent.max_concurrent_requests=8"],
            f"{ROLLOUT}.agent.max_concurrent_requests has no effect: {ROLLOUT}.max_num_seqs limits",
        ),
    ],
)
def test_notices(minimal: list[str], overrides: list[str], notice: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_config(PPOConfig, [*minimal, *overrides])
    assert notice in caplog.text


def test_defaults_and_a_users_own_loss_give_no_notice(minimal: list[str], caplog: pytest.LogCaptureFixture) -> None:
    own = f"{ACTOR}.policy_loss.loss_mode=my.module:loss"
    with caplog.at_level(logging.WARNING):
        load_config(PPOConfig, minimal)
        load_config(PPOConfig, [*minimal, own, f"{ACTOR}.tau_pos=2", f"{ACTOR}.clip_ratio=0.1"])
        load_config(PPOConfig, [*minimal, f"{ROLLOUT}.name=hf", f"{ROLLOUT}.max_num_seqs=4"])
        budget = f"{ACTOR}.ppo_max_token_len_per_gpu=9999"  # the reference's budget follows it
        load_config(PPOConfig, [*minimal, f"{ACTOR}.use_kl_loss=true", f"{REF}.log_prob_use_dynamic_bsz=true", budget])
    assert "no effect" not in caplog.text
