"""Pools of workers: what named placements and explicit maps give, and every way in which they cannot work."""

import logging
from importlib import util
from typing import Any

import pytest

from lockstep.config.compose import load_config
from lockstep.config.errors import ConfigError
from lockstep.config.placement import TooFewWorkers, controller_of, num_workers, pools_of
from lockstep.config.ppo import PPOConfig

ACTOR = "actor_rollout_ref.actor"
ALL = ["ref", "critic", "rm"]


def config_of(*overrides: str) -> PPOConfig:
    return load_config(PPOConfig, list(overrides), run_checks=False)


def named(placement: str, nnodes: int, per_node: int, *more: str) -> PPOConfig:
    return config_of(
        f"trainer.placement={placement}", f"trainer.nnodes={nnodes}", f"trainer.n_gpus_per_node={per_node}", *more
    )


@pytest.mark.parametrize(
    ("placement", "nnodes", "per_node", "spec"),
    [
        ("colocate", 1, 1, {"global_pool": [1]}),
        ("colocate", 2, 8, {"global_pool": [8, 8]}),
        ("hybrid", 1, 2, {"actor_pool": [1], "critic_pool": [1]}),
        ("hybrid", 1, 3, {"actor_pool": [2], "critic_pool": [1]}),
        ("hybrid", 2, 4, {"actor_pool": [4], "critic_pool": [4]}),
        ("hybrid", 3, 4, {"actor_pool": [4, 4], "critic_pool": [4]}),
        ("split", 1, 8, {"actor_pool": [3], "critic_pool": [3], "rollout_pool": [2]}),
        ("split", 2, 8, {"actor_pool": [3, 3], "critic_pool": [3, 3], "rollout_pool": [2, 2]}),
        ("split", 4, 2, {"actor_pool": [2, 2], "critic_pool": [2], "rollout_pool": [2]}),
        ("standalone", 1, 5, {f"{role}_pool": [1] for role in ("actor", "rollout", "critic", "ref", "rm")}),
        (
            "standalone",
            1,
            7,
            {"actor_pool": [2], "rollout_pool": [2], "critic_pool": [1], "ref_pool": [1], "rm_pool": [1]},
        ),
    ],
)
def test_named_placements_share_out_all_workers(
    placement: str, nnodes: int, per_node: int, spec: dict[str, list[int]]
) -> None:
    config = named(placement, nnodes, per_node)
    pools = pools_of(config, ALL)
    assert pools.spec == spec
    assert sum(map(sum, pools.spec.values())) == num_workers(config) == nnodes * per_node


@pytest.mark.parametrize(
    ("placement", "role_pools"),
    [
        ("colocate", dict.fromkeys(["actor_rollout", *ALL], "global_pool")),
        ("hybrid", {"actor_rollout": "actor_pool", "ref": "actor_pool", "critic": "critic_pool", "rm": "critic_pool"}),
        (
            "split",
            {
                "actor": "actor_pool",
                "ref": "actor_pool",
                "rollout": "rollout_pool",
                "critic": "critic_pool",
                "rm": "critic_pool",
            },
        ),
        ("standalone", {role: f"{role}_pool" for role in ("actor", "rollout", *ALL)}),
    ],
)
def test_named_placements_put_every_role_somewhere(placement: str, role_pools: dict[str, str]) -> None:
    assert pools_of(named(placement, 1, 8), ALL).role_pools == role_pools


def test_pools_without_a_role_are_not_made() -> None:
    """GRPO: neither critic nor reward model."""
    assert pools_of(named("hybrid", 1, 4), ["ref"]).spec == {"actor_pool": [4]}
    assert pools_of(named("split", 1, 4), []).spec == {"actor_pool": [2], "rollout_pool": [2]}
    assert pools_of(named("standalone", 1, 4), []).role_pools == {"actor": "actor_pool", "rollout": "rollout_pool"}


def test_the_reward_model_in_its_own_pool() -> None:
    own = ("reward_model.enable_resource_pool=true", "reward_model.n_gpus_per_node=4", "reward_model.nnodes=2")
    config = named("hybrid", 1, 4, "reward_model.enable=true", *own)
    pools = pools_of(config, ALL)
    assert pools.spec == {"actor_pool": [2], "critic_pool": [2], "reward_pool": [4, 4]}
    assert pools.role_pools["rm"] == "reward_pool" and pools.world_size("rm") == 8
    assert num_workers(config) == 12
    assert pools_of(named("hybrid", 1, 4, *own), ["ref", "critic"]).spec.keys() == {"actor_pool", "critic_pool"}
    assert num_workers(named("hybrid", 1, 4, *own)) == 4


def test_explicit_pools() -> None:
    spec = "resource_pool_spec={global_pool: [8, 8], reward_pool: [4]}"
    pools = pools_of(config_of(spec), ALL)
    assert pools.spec == {"global_pool": [8, 8], "reward_pool": [4]}
    assert pools.role_pools == {
        "actor_rollout": "global_pool",
        "ref": "global_pool",
        "critic": "global_pool",
        "rm": "reward_pool",
    }
    assert num_workers(config_of(spec)) == 20
    without_rm = pools_of(config_of(spec), ["critic"])
    assert without_rm.spec == {"global_pool": [8, 8]}


@pytest.mark.parametrize(
    ("mapping", "role_pools"),
    [
        ("{critic: b}", {"actor_rollout": "a", "critic": "b"}),
        ("{actor_rollout: b}", {"actor_rollout": "b", "critic": "a"}),
        ("{rollout: b}", {"actor": "a", "rollout": "b", "critic": "a"}),
        ("{actor: b, critic: b}", {"actor": "b", "rollout": "a", "critic": "b"}),
        ("{actor: b, rollout: b}", {"actor_rollout": "b", "critic": "a"}),
        ("{actor_rollout: b, rollout: a}", {"actor": "b", "rollout": "a", "critic": "a"}),
    ],
)
def test_role_mapping(mapping: str, role_pools: dict[str, str]) -> None:
    config = config_of("resource_pool_spec={a: [2], b: [1]}", f"resource_pool_mapping={mapping}")
    assert pools_of(config, ["critic"]).role_pools == role_pools


def test_controller() -> None:
    assert controller_of(config_of()) == "local"
    assert controller_of(config_of("trainer.n_gpus_per_node=2")) == "ray"
    assert controller_of(config_of("trainer.nnodes=2")) == "ray"
    assert controller_of(config_of("trainer.controller=ray")) == "ray"
    assert controller_of(config_of("resource_pool_spec={global_pool: [1]}")) == "local"
    assert controller_of(config_of("resource_pool_spec={a: [1], b: [1]}")) == "ray"


def test_too_few_workers_for_a_placement() -> None:
    with pytest.raises(TooFewWorkers, match=r"trainer\.placement=split: has 3 pools"):
        pools_of(named("split", 1, 2), ALL)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.n_gpus_per_node=0"], "trainer.n_gpus_per_node=0: must be greater than 0"),
        (["trainer.nnodes=0"], "trainer.nnodes=0: must be greater than 0"),
        (["trainer.placement=splitt"], "must be one of colocate, hybrid, split, standalone; did you mean split?"),
        (
            ["trainer.placement=split", "trainer.n_gpus_per_node=2", "trainer.nnodes=2"],
            "trainer.placement=split: has 3 pools (actor_pool, critic_pool, rollout_pool), more than there are machines "
            "(trainer.nnodes=2) or workers per machine (trainer.n_gpus_per_node=2); set either to 3 or more",
        ),
        (
            ["trainer.controller=local", "trainer.n_gpus_per_node=2"],
            "trainer.controller=local: can run only 1 worker, not 2; set auto or ray",
        ),
        (
            [
                "trainer.controller=local",
                "trainer.placement=split",
                "trainer.n_gpus_per_node=3",
                "trainer.async_mode=fully_async",
            ],
            "can run only 2 workers with trainer.async_mode=fully_async, one for the actor and one for the rollout, not 3",
        ),
        (
            ["trainer.controller=local", "resource_pool_spec={a: [1], b: [1]}", "resource_pool_mapping={critic: b}"],
            "trainer.controller=local: can run only 1 worker, not 2",
        ),
        (
            ["resource_pool_spec={a: 8}"],
            "resource_pool_spec.a=8: must be a list of processes per machine, such as [8, 8]",
        ),
        (["resource_pool_spec={a: [0]}"], "resource_pool_spec.a=[0]: must be a list of processes per machine"),
        (["resource_pool_spec={a: []}"], "resource_pool_spec.a=[]: must be a list of processes per machine"),
        (
            ["resource_pool_spec={a: [2]}", "trainer.placement=hybrid"],
            "trainer.placement=hybrid: conflicts with resource_pool_spec; set only one of them",
        ),
        (
            ["resource_pool_spec={a: [2]}", "resource_pool_mapping={actr: a}"],
            "resource_pool_mapping.actr=a: unknown role; roles are actor_rollout, actor, rollout, ref, critic, rm",
        ),
        (
            ["resource_pool_spec={a: [2], b: [1]}", "resource_pool_mapping={critic: c}"],
            "resource_pool_mapping.critic=c: unknown pool; resource_pool_spec has a, b",
        ),
        (
            ["resource_pool_mapping={critic: c}"],
            "resource_pool_mapping.critic=c: unknown pool; resource_pool_spec has none",
        ),
        (
            ["trainer.n_gpus_per_node=3", f"{ACTOR}.ulysses_sequence_parallel_size=2", "critic.enable=true"],
            f"{ACTOR}.ulysses_sequence_parallel_size=2: does not divide the number of workers in global_pool (3)",
        ),
        (
            [f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"],
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2: does not divide the number of workers in global_pool (1)",
        ),
        (
            [
                "trainer.n_gpus_per_node=6",
                "trainer.placement=standalone",
                "algorithm.use_kl_in_reward=true",
                f"{ACTOR}.ulysses_sequence_parallel_size=2",
            ],
            "actor_rollout_ref.ref.ulysses_sequence_parallel_size=2: does not divide the number of workers in ref_pool (1)",
        ),
        (
            [
                "trainer.n_gpus_per_node=4",
                f"{ACTOR}.ulysses_sequence_parallel_size=2",
                f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=4",
            ],
            f"ulysses_sequence_parallel_size=4: differs from {ACTOR}.ulysses_sequence_parallel_size=2; set only that key",
        ),
        (
            [
                "trainer.n_gpus_per_node=2",
                f"{ACTOR}.ulysses_sequence_parallel_size=2",
                f"{ACTOR}.use_kl_loss=true",
                "actor_rollout_ref.model.use_remove_padding=false",
            ],
            "actor_rollout_ref.model.use_remove_padding=false: splitting sequences across ranks "
            f"({ACTOR}.ulysses_sequence_parallel_size=2) needs packed sequences; set true",
        ),
        (
            ["trainer.n_gpus_per_node=4", f"{ACTOR}.fsdp_config.fsdp_size=3"],
            f"{ACTOR}.fsdp_config.fsdp_size=3: does not divide the number of workers in global_pool (4); set a divisor",
        ),
        ([f"{ACTOR}.fsdp_config.fsdp_size=0"], "fsdp_size=0: must be 1 or more, or -1 for all"),
        (["trainer.max_restarts=-1"], "trainer.max_restarts=-1: must be 0 or more"),
        (["actor_rollout_ref.nccl_timeout=0"], "actor_rollout_ref.nccl_timeout=0: must be greater than 0"),
        (["ray_init.num_cpus=0"], "ray_init.num_cpus=0: must be greater than 0"),
        (["actor_rollout_ref.rollout.checkpoint_engine.backend=gloo"], "must be one of auto, naive, nccl"),
    ],
)
def test_each_mistake_is_one_problem(minimal: list[str], overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, [*minimal, *overrides])
    assert len(caught.value.problems) == 1, caught.value
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "reward_model.nnodes=0: must be 1 or more with reward_model.enable_resource_pool"),
        (
            ["resource_pool_spec={global_pool: [2]}"],
            "reward_model.enable_resource_pool=true: conflicts with resource_pool_spec; add a reward_pool to it",
        ),
    ],
)
def test_reward_pool_without_a_size(
    minimal: list[str], files: dict[str, str], overrides: list[str], message: str
) -> None:
    reward = ["reward_model.enable=true", f"reward_model.model.path={files['model']}"]
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, [*minimal, *reward, "reward_model.enable_resource_pool=true", *overrides])
    assert [str(problem)[: len(message)] for problem in caught.value.problems] == [message]


def test_batches_need_not_be_divisible_by_workers(minimal: list[str]) -> None:
    load_config(
        PPOConfig, [*minimal, "trainer.n_gpus_per_node=7", "data.train_batch_size=3", f"{ACTOR}.ppo_mini_batch_size=3"]
    )


def test_unused_roles_are_not_checked(minimal: list[str]) -> None:
    """GRPO has no critic, so its sequence parallel size does not matter."""
    grpo = ["algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=3", "critic.ulysses_sequence_parallel_size=2"]
    load_config(PPOConfig, [*minimal, *grpo])


def test_unused_pools_are_reported(minimal: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_config(PPOConfig, [*minimal, "resource_pool_spec={global_pool: [2], reward_pool: [1]}"])
    assert "resource_pool_spec.reward_pool: no role uses this pool" in caplog.messages


def test_several_workers_without_ray(minimal: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def find_all_but_ray(name: str, *args: Any) -> Any:
        return None if name == "ray" else util.find_spec(name, *args)

    monkeypatch.setattr("lockstep.config.checks.find_spec", find_all_but_ray)
    load_config(PPOConfig, minimal)
    with pytest.raises(ConfigError, match=r'need Ray: pip install "lockstep-rl\[ray\]"'):
        load_config(PPOConfig, [*minimal, "trainer.n_gpus_per_node=2"])


def test_a_rollout_with_its_own_gpus_keeps_its_cache() -> None:
    key = "actor_rollout_ref.rollout.free_cache_engine"
    assert named("hybrid", 1, 8).actor_rollout_ref.rollout.free_cache_engine
    assert not named("split", 1, 8).actor_rollout_ref.rollout.free_cache_engine
    assert named("standalone", 1, 8, f"{key}=true").actor_rollout_ref.rollout.free_cache_engine
