"""Checks of Megatron's layouts: how a pool of workers divides a model, and that roles in one pool divide theirs alike."""

from collections.abc import Iterator
from math import prod

from lockstep.config.compat import NOT_SUPPORTED
from lockstep.config.errors import Problem
from lockstep.config.megatron import McoreEngineConfig

SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
"""Keys whose product is the ranks of one copy of the model."""
EXPERT_SIZES = ("expert_tensor_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size")
"""The same for experts."""


def layout_of(settings: McoreEngineConfig) -> dict[str, int]:
    """Key -> size, with the values that null stands for."""
    return {
        "tensor_model_parallel_size": settings.tensor_model_parallel_size,
        "pipeline_model_parallel_size": settings.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": settings.virtual_pipeline_model_parallel_size or 1,
        "context_parallel_size": settings.context_parallel_size,
        "expert_model_parallel_size": settings.expert_model_parallel_size,
        "expert_tensor_parallel_size": settings.expert_tensor_parallel_size or settings.tensor_model_parallel_size,
    }


def layout_problems(
    settings: McoreEngineConfig, section: str, workers: int, where: str, key_of_workers: str
) -> Iterator[Problem]:
    """What prevents `workers` ranks from sharing the model. where: of the workers, for messages."""
    sizes = layout_of(settings)
    if min(sizes.values()) < 1:
        return  # reported by `out_of_bounds`
    for names in (SIZES, EXPERT_SIZES):
        ranks = prod(sizes[name] for name in names)
        if workers % ranks:
            product = " × ".join(f"{section}.{name}={sizes[name]}" for name in names)
            largest = max(names, key=lambda name: sizes[name])
            message = (
                f"{product} is {ranks} ranks, which does not divide {where} ({workers}); set sizes whose product is a divisor, "
                f"or {key_of_workers} to a multiple of {ranks}"
            )
            yield Problem(f"{section}.{largest}", sizes[largest], message, also=(key_of_workers,))
            return
    if settings.context_parallel_size > 1:
        message = (
            "it needs the attention of TransformerEngine, which is not used here; set 1, and for long sequences "
            f"{section}.tensor_model_parallel_size, or strategy=fsdp with ulysses_sequence_parallel_size"
        )
        key = f"{section}.context_parallel_size"
        yield Problem(key, settings.context_parallel_size, f"{NOT_SUPPORTED}: {message}")
    if sizes["virtual_pipeline_model_parallel_size"] > 1:
        key = f"{section}.virtual_pipeline_model_parallel_size"
        message = f"{NOT_SUPPORTED}: a stage is computed in one piece; set null"
        yield Problem(key, settings.virtual_pipeline_model_parallel_size, message)
    has_parallel_experts = sizes["expert_model_parallel_size"] > 1 and settings.tensor_model_parallel_size > 1
    if has_parallel_experts and not settings.sequence_parallel:
        message = f"experts on several ranks need it with {section}.tensor_model_parallel_size above 1; set true"
        yield Problem(f"{section}.sequence_parallel", False, message)


def difference(
    settings: McoreEngineConfig, section: str, other: McoreEngineConfig, other_section: str
) -> Problem | None:
    """How the layout of a role differs from that of another in its pool: Megatron has one set of groups per process.

    A role with expert_model_parallel_size=1 may be a model without experts, which uses no groups of experts.
    """
    sizes, others = layout_of(settings), layout_of(other)
    has_experts = min(layout["expert_model_parallel_size"] for layout in (sizes, others)) > 1
    for name, size in sizes.items():
        if size != others[name] and (has_experts or not name.startswith("expert_")):
            message = (
                f"differs from {other_section}.{name}={others[name]}, but roles in one pool share a layout; set {others[name]}, "
                "or another pool for the role (trainer.placement, resource_pool_spec)"
            )
            return Problem(f"{section}.{name}", size, message, also=(f"{other_section}.{name}",))
    return None
