"""How each training engine distributes a model: memory of a rank and communication, by the section of its settings.

An engine of a user reads `fsdp_config`, and is planned as FSDP.
"""

from lockstep.config.deepspeed import DeepSpeedEngineConfig
from lockstep.config.megatron import McoreEngineConfig
from lockstep.config.model import FSDPEngineConfig, TrainEngineConfig
from lockstep.plan.layouts.deepspeed import DeepSpeedLayout
from lockstep.plan.layouts.fsdp import FsdpLayout
from lockstep.plan.layouts.megatron import MegatronLayout
from lockstep.plan.model import TrainLayout
from lockstep.plan.model_shape import ModelShape


def layout_of(engine: TrainEngineConfig, ranks: int, shape: ModelShape) -> TrainLayout:
    """ValueError if the parallel sizes do not fit the ranks or the model."""
    if isinstance(engine, McoreEngineConfig):
        return MegatronLayout(engine, ranks, shape)
    if isinstance(engine, DeepSpeedEngineConfig):
        return DeepSpeedLayout(engine, ranks)
    assert isinstance(engine, FSDPEngineConfig)
    return FsdpLayout(engine, ranks)
