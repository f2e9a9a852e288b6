"""Metrics over ranks."""

import pickle

from lockstep.protocol import DataProto
from lockstep.utils.metrics import MaxOverRanks, reduced_over_ranks


def test_the_producer_says_how_ranks_are_reduced() -> None:
    ranks = [{"peak": MaxOverRanks(value), "loss_max": value} for value in (1.0, 3.0)]
    sent = [pickle.loads(pickle.dumps(DataProto(meta_info={"metrics": metrics}))) for metrics in ranks]
    found = reduced_over_ranks(DataProto.concat(sent).meta_info["metrics"])
    assert found == {"peak": 3.0, "loss_max": 2.0} and all(type(value) is float for value in found.values())
    assert reduced_over_ranks(ranks[0]) == {"peak": 1.0, "loss_max": 1.0}
