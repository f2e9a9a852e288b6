"""Batch operations against recorded results of verl."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.protocol import DataProto, fold_batch_dim, pad_dataproto_to_divisor, unfold_batch_dim, unpad_dataproto

FOLDER = Path(__file__).parents[1] / "golden" / "golden_public"
CASES = json.loads((FOLDER / "dataproto.json").read_text())
ARRAYS = dict(np.load(FOLDER / "dataproto.npz"))


def arrays_of(case_id: str, side: str) -> dict[str, np.ndarray]:
    prefix = f"{case_id}|{side}|"
    return {k.removeprefix(prefix): v for k, v in ARRAYS.items() if k.startswith(prefix)}


def build(spec: dict[str, Any], arrays: dict[str, np.ndarray]) -> DataProto:
    return DataProto.from_dict(
        tensors={k: torch.from_numpy(arrays[v].copy()) for k, v in spec.get("tensors", {}).items()},
        non_tensors={k: np.array(v, dtype=object) for k, v in spec.get("non_tensors", {}).items()},
        meta_info=copy.deepcopy(spec.get("meta_info", {})),
    )


def getitem_argument(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    return slice(*item["slice"]) if "slice" in item else np.array(item["mask"])


def results(params: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Run the case's operation: name of result → batch, row or number."""
    data = [build(spec, arrays) for spec in params["data"]]
    first, op, kwargs = data[0], params["op"], params.get("kwargs", {})
    match op:
        case "chunk" | "split":
            return {f"r{i}": part for i, part in enumerate(getattr(first, op)(**kwargs))}
        case "iterator":
            return {f"r{i}": part for i, part in enumerate(first.make_iterator(**kwargs))}
        case "concat":
            return {"r": DataProto.concat(data)}
        case "union":
            return {"r": first.union(data[1])}
        case "reorder":
            first.reorder(torch.tensor(kwargs["indices"]))
            return {"self": first}
        case "padding":
            first.padding(**kwargs)
            return {"self": first}
        case "pad_to_divisor":
            padded, pad_size = pad_dataproto_to_divisor(first, kwargs["size_divisor"])
            return {"pad_size": pad_size, "padded": padded, "unpadded": unpad_dataproto(padded, pad_size)}
        case "getitem":
            item = first[getitem_argument(kwargs["item"])]
            return {"r" if isinstance(item, DataProto) else "item": item}
        case "pickle":
            return {"r": pickle.loads(pickle.dumps(first))}
        case "fold":
            return {"r": unfold_batch_dim(fold_batch_dim(first, kwargs["new_batch_size"]))}
        case _:
            return {"r": getattr(first, op)(**kwargs), "self": first}


def flatten(named: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    arrays: dict[str, np.ndarray] = {}
    values: dict[str, Any] = {}
    for name, result in named.items():
        if isinstance(result, int):
            values[name] = result
            continue
        if result.batch is not None:
            arrays.update({f"{name}.t.{k}": result.batch[k].numpy() for k in result.batch.keys()})  # noqa: SIM118
        if isinstance(result, DataProto):
            values[f"{name}.len"] = len(result)
            values[f"{name}.non_tensors"] = {k: v.tolist() for k, v in result.non_tensor_batch.items()}
            values[f"{name}.meta"] = result.meta_info
        else:
            values[name] = result.non_tensor_batch
    return arrays, values


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_golden(case: dict[str, Any]) -> None:
    inputs, expected = arrays_of(case["id"], "in"), arrays_of(case["id"], "out")
    if "raises" in case:
        with pytest.raises((ValueError, KeyError)):
            results(case["params"], inputs)
        return
    arrays, values = flatten(results(case["params"], inputs))
    assert values == case["out_json"]
    assert arrays.keys() == expected.keys()
    for key, want in expected.items():
        np.testing.assert_array_equal(arrays[key], want, err_msg=key)
