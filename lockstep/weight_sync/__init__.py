"""Weight updates of a rollout that holds a copy of the policy.

controller.py   one update: send, compare fingerprints, run the canary
worker.py       both ends, as methods of the policy's worker
buckets.py      flat buckets of named tensors; broadcast.py the process group that sends them
proof.py        fingerprints and canary

An engine that decodes with the trainer's own tensors (`RolloutEngineInfo.shares_weights`) needs none of it.
"""

from lockstep.weight_sync.controller import Transport, WeightSync
from lockstep.weight_sync.proof import CANARY_METRIC, canary_bound
from lockstep.weight_sync.worker import WeightSyncWorker

__all__ = ["CANARY_METRIC", "Transport", "WeightSync", "WeightSyncWorker", "canary_bound"]
