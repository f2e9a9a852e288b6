"""SFT, reward models and DPO as work for devices: one model, whose optimizer step is the only phase.

A row is a sequence, or a pair of them. The reference log-probs of DPO are computed once, by the same model before its first step,
and need less memory than that.
"""

from lockstep.config.preference import DPOConfig, RMConfig
from lockstep.config.sft import SupervisedConfig
from lockstep.config.train_engines import engine_settings, ranks_per_row, ranks_per_sequence
from lockstep.plan.batch_units import Lengths, batch_units, micro_limits
from lockstep.plan.hardware import Device
from lockstep.plan.job import NO_ROLLOUT, Job, ShapeOf, model_of

ROLE = "model"


def supervised_job(
    config: SupervisedConfig, device: Device, lengths: Lengths, shape_of: ShapeOf, machines: list[int]
) -> Job:
    """machines: processes on each."""
    data, model = config.data, config.model
    per_row, ranks = 2 if isinstance(config, RMConfig | DPOConfig) else 1, sum(machines)
    micro_rows = data.micro_batch_size_per_gpu and data.micro_batch_size_per_gpu * per_row
    update = batch_units(
        data.train_batch_size * per_row,
        samples=1,
        lengths=lengths,
        ranks=ranks,
        row_ranks=ranks_per_row(model),
        sequence_parallel=ranks_per_sequence(model),
        packed=model.use_remove_padding,
        group=per_row,
        **micro_limits(micro_rows, data.use_dynamic_bsz, data.max_token_len_per_gpu),
    )
    trained = model_of(
        ROLE,
        "processes",
        ranks,
        len(machines),
        shape_of(model.path, "model"),
        model,
        engine_settings(model),
        device,
        update=update,
        updates=1,
        is_scalar=isinstance(config, RMConfig),
    )
    return Job(device, lengths, data.train_batch_size, per_row, [trained], NO_ROLLOUT)
