"""Resource pools and the mapping of roles to pools."""

import pytest

from lockstep.single_controller import (
    LOCAL,
    ClassWithInitArgs,
    LocalWorkerGroup,
    ResourcePool,
    ResourcePoolManager,
    Role,
    Worker,
)


def test_pool_counts() -> None:
    pool = ResourcePool([2, 3])
    assert pool.world_size == 5 and pool.store == [2, 3]
    assert pool.local_rank_list() == [0, 1, 0, 1, 2] and pool.local_world_size_list() == [2, 2, 3, 3, 3]
    pool.add_node(1)
    assert pool.world_size == 6
    with pytest.raises(ValueError, match="resource pool 'p': a machine with 0 processes"):
        ResourcePool([0], name_prefix="p")
    with pytest.raises(ValueError, match="resource pool 'p' has no processes"):
        LocalWorkerGroup(ResourcePool(name_prefix="p"), ClassWithInitArgs(Worker))


def test_roles_have_verl_names() -> None:
    names = ["actor", "rollout", "actor_rollout", "critic", "ref", "rm", "actor_rollout_ref", "env"]
    assert [str(role) for role in Role] == names


def test_manager_maps_roles_to_pools() -> None:
    manager = ResourcePoolManager(
        {"global_pool": [4, 4], "rm_pool": [2]},
        {Role.ActorRollout: "global_pool", Role.Critic: "global_pool", Role.RewardModel: "rm_pool"},
        pool_class=LOCAL.pool_class,
    )
    assert manager.get_n_gpus() == 10
    with pytest.raises(ValueError, match="'global_pool' is not built"):
        manager.get_resource_pool(Role.Critic)
    manager.create_resource_pool()
    assert manager.get_resource_pool(Role.Critic) is manager.get_resource_pool(Role.ActorRollout)
    assert manager.get_resource_pool(Role.RewardModel).world_size == 2
    with pytest.raises(ValueError, match=r"role ref has no resource pool. Known: actor_rollout, critic, rm"):
        manager.get_resource_pool(Role.RefPolicy)


def test_manager_rejects_a_wrong_spec() -> None:
    with pytest.raises(
        ValueError, match=r"role critic is mapped to an unknown pool 'globl_pool'. Did you mean 'global_pool'"
    ):
        ResourcePoolManager({"global_pool": [1]}, {Role.Critic: "globl_pool"})
    with pytest.raises(ValueError, match="resource pool 'global_pool' has no machines"):
        ResourcePoolManager({"global_pool": []}, {})
