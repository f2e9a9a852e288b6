"""Nested state comes back from JSON and safetensors as it was; other types are refused when it is saved."""

import math
import random
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.protocol.columns import deep_equal
from lockstep.utils.state_file import encode, from_bytes, load_state, save_state, to_bytes

STATES: dict[str, Any] = {
    "plain": {"epoch": 1, "text": "ü\ud83d", "nested": [None, True, 1.5, [], {}], "large": 2**100},
    "not in JSON": {
        "tuple": (1, (2,)),
        "set": {1, 2},
        "keys": {1: "a", (2, 3): "b", "$x": "c"},
        "inf": [math.inf, -math.inf],
    },
    "tensors": {
        "half": torch.arange(3).bfloat16(),
        "view": torch.arange(6).view(2, 3)[:, :2],
        "none": torch.zeros(4, 0),
    },
    "shared memory": [(weight := torch.ones(2)), weight],
    "arrays": {
        "u8": np.arange(3, dtype=np.uint64),
        "0d": np.array(5),
        "none": np.zeros((0, 3)),
        "text": np.array(["ab", "c"]),
    },
    "objects": np.array([["x", None], [{"k": (1,)}, 2.5]], dtype=object),
    "python's generator": random.Random(0).getstate(),
    "numpy's generators": (np.random.RandomState(0).get_state(), np.random.default_rng(0).bit_generator.state),
    "torch's generator": torch.Generator().manual_seed(0).get_state(),
    "nothing": None,
}


@pytest.mark.parametrize("name", STATES)
def test_state_comes_back(name: str, tmp_path: Path) -> None:
    save_state(tmp_path / "state", STATES[name], owner="test")
    for back in (load_state(tmp_path / "state"), from_bytes(to_bytes(STATES[name], owner="test"))):
        assert deep_equal(back, STATES[name])
        assert type(back) is type(STATES[name])
    assert (tmp_path / "state.safetensors").exists() == bool(encode(STATES[name], "test")[1])


def test_types_shapes_and_memory_come_back() -> None:
    state = {
        "a": np.arange(6, dtype=np.int16).reshape(2, 3),
        "t": torch.zeros(2, dtype=torch.float16),
        "n": np.float32(0.5),
    }
    back = from_bytes(to_bytes(state | {"o": OrderedDict(x=1)}, owner="test"))
    assert back["a"].dtype == np.int16 and back["a"].shape == (2, 3) and back["t"].dtype == torch.float16
    assert type(back["n"]) is float and back["o"] == {"x": 1}
    back["a"][0, 0] = 7  # writable


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (deque([1]), "a collections.deque"),
        (Path("x"), "a pathlib"),
        (bytearray(b"x"), "a builtins.bytearray"),
        (len, "a builtins.builtin_function_or_method"),
        (torch.ones(2, 2).to_sparse(), "a torch.Tensor"),
        (np.zeros(2, dtype=[("a", "i4")]), "an array of"),
    ],
)
def test_other_types_are_refused_with_their_place_and_owner(value: Any, what: str) -> None:
    with pytest.raises(ValueError, match=rf"^MySampler: scores\[1\]\.x is {what}.*which cannot be saved; use dicts"):
        encode({"scores": [0, {"x": value}]}, owner="MySampler")


@pytest.mark.parametrize(
    "text", ["", "{", '{"$tensor": "0"}', '{"$array": "0"}', '{"$objects": 1, "shape": [1]}', "[" * 10**5]
)
def test_bad_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ValueError, match=r"state\.json is not a state file"):
        load_state(tmp_path / "state")
    (tmp_path / "state.safetensors").write_text(text)
    with pytest.raises(ValueError, match=r"state\.safetensors is not a state file"):
        load_state(tmp_path / "state")
