"""What ranks audit: updates that are healthy, and defects of which some are on the last rank alone."""

from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from lockstep.config.audit import AuditConfig
from lockstep.engines.train.audit import ReferenceAudit, UpdateAudit
from lockstep.engines.train.train_engine import MicroBatching
from lockstep.models.model_check import check_batch
from tests.engines.train.cases import CPU, Case, build_engine, make_batch, options, own_rows, summed_loss

WARN = dict.fromkeys(AuditConfig.__dataclass_fields__, "warn")


def audited(folder: Path, case: Case) -> list[dict[str, str]]:
    """The findings of: three healthy updates; a gradient of the last rank that is not finite; a mean over the micro-batch;
    tensors of the last rank that change; a stale rollout; a reference that changes there."""
    engine = build_engine(folder, case)
    audit = UpdateAudit(engine, case.compute, CPU, clip_grad=1.0)
    module = engine.rollout_module()
    is_last = dist.get_rank() == dist.get_world_size() - 1

    def update(number: int, *, mean: bool = False, nan: bool = False) -> dict[str, str]:
        rows = own_rows(engine, make_batch(number, num_real=8))

        def loss_fn(outputs: dict[str, Tensor], part: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
            count = part["response_mask"].sum() if mean else 40
            share = summed_loss(outputs, part) / count
            if nan and is_last:  # only the gradient
                share = share + 0.0 * (share - share.detach()).sqrt()
            return share, {"loss": share}

        micro = MicroBatching(num_rows=4)
        engine.onload(optimizer=True, ahead=True)
        audit.begin(WARN, 1)
        audit.check_split(rows, loss_fn, micro, **options(case))
        audit.check_loss(engine.forward_backward(rows, loss_fn, micro, **options(case)), "loss")
        audit.optimizer_step(expects_gradient=True)
        engine.schedule_step()
        if number == 4 and is_last:
            for tensor in engine.frozen_tensors().values():
                with torch.no_grad():
                    tensor.mul_(1.01)
        found = audit.end()
        engine.offload()
        return found

    healthy: dict[str, str] = {}
    for number in range(3):
        healthy |= update(number)
        with engine.lend_weights(module):
            audit.check_lent(module, number)
    found = [healthy | audit.audits.take_findings(), update(3, nan=True)]
    audit._splits.num_checked = 0
    found += [update(3, mean=True), update(4)]
    with engine.lend_weights(module), torch.no_grad():
        for name, parameter in list(module.named_parameters()):
            path, _, leaf = name.rpartition(".")
            copy = torch.nn.Parameter(parameter * 1.01 if is_last else parameter.clone(), requires_grad=False)
            module.get_submodule(path)._parameters[leaf] = copy
        audit.check_lent(module, 4)
    found.append(audit.audits.take_findings())
    return [*found, reference_findings(folder, case, is_last)]


def reference_findings(folder: Path, case: Case, is_last: bool) -> dict[str, str]:
    reference = build_engine(folder, case, trained=False)
    audit = ReferenceAudit(reference, case.compute, has_own_weights=True)
    rows = check_batch(259)
    assert audit.check(WARN, rows) == {}
    if is_last:
        for tensor in reference.frozen_tensors().values():
            tensor.mul_(1.01)
    return audit.check(WARN, rows)


def check(results: list[list[dict[str, str]]], *, has_frozen: bool = True) -> None:
    """All ranks report the same, and nothing but what was planted. has_frozen: the engine has tensors that are not trained."""
    assert all(result == results[0] for result in results)
    names = [sorted(found) for found in results[0]]
    frozen = ["frozen_parameters"] if has_frozen else []
    assert "the weights are unchanged, the update is skipped" in results[0][1]["finite"]
    assert names == [[], ["finite"], ["micro_batch_split"], frozen, ["weights"], ["reference_policy"]], names
