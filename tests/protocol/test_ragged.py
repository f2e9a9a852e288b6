"""Batches without padding do what padded ones do."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tensordict import TensorDict
from torch import Tensor

from lockstep.protocol import DataProto, Ragged, RaggedBatch, require
from lockstep.protocol.tokens import entries, lengths_of, pack, prompt_owners, row_chunks, token_rows
from lockstep.single_controller.ray_backend import serialize

P, R, PAD = 4, 5, 99
LENGTHS = ([2, 3], [4, 0], [1, 5], [2, 1])
"""Tokens of prompt and response; the first and the last row have the same prompt."""


def ragged(lengths: Any = LENGTHS, seed: int = 0) -> DataProto:
    """A batch of rollouts, with scores."""
    rng = np.random.default_rng(seed)
    prompts = [list(range(10, 10 + p)) for p, _ in lengths]
    responses = [rng.integers(0, 50, r).tolist() for _, r in lengths]
    log_probs = [rng.normal(size=max(1, r)).astype(np.float32).tolist() for _, r in lengths]
    batch = DataProto.from_dict(
        tensors={
            "prompts": Ragged.of_rows(prompts, P, PAD, torch.int64, torch.int32, left=True),
            "responses": Ragged.of_rows(responses, R, PAD, torch.int64, torch.int32),
            "response_mask": Ragged.of_rows([[1] * r or [0] for _, r in lengths], R, 0, torch.int64, torch.bool),
            "policy_version": torch.arange(len(lengths)),
            "rollout_log_probs": Ragged.of_rows(log_probs, R, 0.0, torch.float32, torch.float32),
        },
        non_tensors={"uid": [str(i) for i in range(len(lengths))]},
    )
    scores = torch.zeros(len(lengths), R)
    for row, (_, r) in enumerate(lengths):
        scores[row, max(0, r - 1)] = row + 1.0
    batch.tensors["token_level_scores"] = scores
    return pack(batch)


def padded(batch: DataProto) -> DataProto:
    assert isinstance(batch.batch, RaggedBatch)
    return DataProto(batch.batch.to_tensordict(), dict(batch.non_tensor_batch), dict(batch.meta_info))


def assert_same(batch: DataProto, expected: DataProto) -> None:
    assert isinstance(batch.batch, RaggedBatch) and isinstance(expected.batch, TensorDict)
    assert set(batch.batch.keys()) == set(expected.batch.keys())
    for name in expected.batch.keys():  # noqa: SIM118
        got, column = batch.batch.read(str(name)), expected.batch[name]
        assert got.dtype == column.dtype and torch.equal(got, column), name
    assert {k: v.tolist() for k, v in batch.non_tensor_batch.items()} == {
        k: v.tolist() for k, v in expected.non_tensor_batch.items()
    }


def test_padded_form() -> None:
    tensors = ragged().tensors
    assert tensors["prompts"].tolist()[0] == [PAD, PAD, 10, 11]
    assert tensors["attention_mask"].tolist() == [
        [0, 0, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, 1, 1, 1, 1],
        [0, 0, 1, 1, 1, 0, 0, 0, 0],
    ]
    assert tensors["position_ids"].tolist()[0] == [0, 0, 0, 1, 2, 3, 4, 4, 4]
    assert torch.equal(tensors["input_ids"], torch.cat([tensors["prompts"], tensors["responses"]], 1))
    assert tensors["token_level_scores"].sum(-1).tolist() == [1.0, 2.0, 3.0, 4.0]  # that of an empty response too
    require(ragged(), "prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask")


def test_stores_real_tokens_only() -> None:
    batch = ragged().batch
    assert isinstance(batch, RaggedBatch)
    assert sorted(batch.columns) == [
        "policy_version", "prompts", "response_mask", "responses", "rollout_log_probs", "token_level_scores"
    ]  # fmt: skip
    sizes = {name: column.values.numel() for name, column in batch.columns.items() if isinstance(column, Ragged)}
    assert sizes == {
        "prompts": 9, "responses": 9, "response_mask": 10, "rollout_log_probs": 10, "token_level_scores": 10
    }  # fmt: skip
    assert batch.columns["response_mask"].values.dtype == torch.bool  # type: ignore[union-attr]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, P), st.integers(0, R)), min_size=1, max_size=6),
    st.data(),
)
def test_operations_are_those_of_a_padded_batch(lengths: list[tuple[int, int]], data: st.DataObject) -> None:
    batch, expected = ragged(lengths), padded(ragged(lengths))
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=8))
    assert_same(batch.select_idxs(rows), expected.select_idxs(rows))
    assert_same(batch[1:3], expected[1:3])
    assert_same(batch[::2], expected[::2])
    mask = [i % 2 == 0 for i in range(len(lengths))]
    assert_same(batch[mask], expected[mask])
    assert_same(batch.repeat(2), expected.repeat(2))
    assert_same(DataProto.concat([batch, ragged(lengths, 1)]), DataProto.concat([expected, padded(ragged(lengths, 1))]))
    assert_same(DataProto.concat(batch.split(2)), expected)
    names = ["attention_mask", "response_mask"]
    assert_same(batch.select(names), expected.select(names))
    rest, rest_expected = batch.select(), expected.select()
    assert_same(rest.pop(["responses", "input_ids"], ["uid"]), rest_expected.pop(["responses", "input_ids"], ["uid"]))
    assert_same(rest, rest_expected)
    assert_same(batch.select().rename("rollout_log_probs", "x"), expected.select().rename("rollout_log_probs", "x"))
    assert lengths_of(batch.tensors)[1].tolist() == lengths_of(expected.tensors)[1].tolist()
    assert prompt_owners(batch.tensors) == prompt_owners(expected.tensors)
    for name in ("prompts", "responses"):
        assert [row.tolist() for row in token_rows(batch.tensors, name)] == [
            row.tolist() for row in token_rows(expected.tensors, name)
        ]
    one, one_expected = batch[0], expected[0]
    assert one.batch is not None and one_expected.batch is not None
    assert all(torch.equal(one.batch[name], one_expected.batch[name]) for name in one_expected.batch.keys())  # noqa: SIM118


def test_is_sent_without_padding() -> None:
    batch = ragged()
    first_row = batch[:1]
    for copy in (
        pickle.loads(pickle.dumps(first_row)),
        serialize.unpack(serialize.pack(first_row)),
        DataProto.from_state(first_row.to_state()),
    ):
        assert_same(copy, padded(batch)[:1])
        assert copy.batch.columns["responses"].values.numel() == 3
    one, many = (len(pickle.dumps(ragged([(2, r)] * 64).select(None, []))) for r in (1, R))
    assert many - one == pytest.approx(64 * (R - 1) * (4 + 1 + 4 + 4), abs=32)  # ids, mask, log-probs, scores


def test_one_entry_of_any_stride_is_sent() -> None:
    empty = ragged([(1, 0)])
    responses = empty.tensors.responses
    empty.tensors["responses"] = replace(responses, values=torch.tensor([5], dtype=torch.int32).expand(3)[:0])
    assert_same(serialize.unpack(serialize.pack(empty)), padded(ragged([(1, 0)])))


def test_a_change_in_place_is_kept() -> None:
    batch = ragged()
    batch.tensors["token_level_scores"][2, 1] = 7.0
    batch.tensors["responses"][0, 0] = 42
    sent = pickle.loads(pickle.dumps(batch))
    assert isinstance(sent.batch.columns["token_level_scores"], Ragged)
    assert sent.tensors["token_level_scores"][2, 1] == 7.0
    assert sent.tensors["responses"][0, 0] == 42
    assert torch.equal(sent.tensors["input_ids"], ragged().tensors["input_ids"])  # another column, as in a TensorDict


def test_values_at_padding_are_dropped() -> None:
    batch = ragged()
    batch.tensors["advantages"] = torch.ones(4, R)
    assert pack(batch).tensors["advantages"].tolist()[1] == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_tensors_elsewhere_stay_as_they_are() -> None:
    batch = ragged()
    with_gradient = torch.ones(4, R, requires_grad=True)
    batch.tensors["advantages"] = with_gradient
    batch.tensors["returns"] = torch.empty(4, R, device="meta")
    assert pack(batch).tensors["advantages"] is with_gradient
    assert batch.tensors["returns"].is_meta


def test_scores_at_padding_are_kept() -> None:
    """A reward manager may put each score at the last place of the row."""
    batch = ragged()
    scores = torch.zeros(4, R)
    scores[:, -1] = torch.arange(4.0)
    batch.tensors["token_level_scores"] = scores
    assert torch.equal(pickle.loads(pickle.dumps(batch)).tensors["token_level_scores"], scores)


@pytest.mark.parametrize("name", ["response_mask", "attention_mask", "responses", "input_ids"])
def test_tokens_at_padding_are_kept(name: str) -> None:
    """A program may put tokens where the rollout had none."""
    batch = ragged()
    changed = batch.tensors[name].clone()
    changed[0, -1] = 1
    expected = padded(batch)
    expected.tensors[name] = changed
    batch.tensors[name] = changed
    assert_same(pickle.loads(pickle.dumps(batch)), expected)


def test_union_of_results() -> None:
    batch, expected = ragged(), padded(ragged())
    log_probs = torch.randn(4, R).masked_fill(batch.tensors["attention_mask"][:, P:] == 0, 0)
    results = batch.outputs({"old_log_probs": log_probs})
    assert isinstance(results.batch, RaggedBatch) and results.tensors.stored("old_log_probs").values.numel() == 10  # type: ignore[union-attr]
    assert_same(batch.union(results), expected.union(DataProto.from_dict({"old_log_probs": log_probs})))
    with pytest.raises(ValueError, match="batch key 'old_log_probs' has different values"):
        batch.union(ragged().outputs({"old_log_probs": log_probs + 1}))
    # prompts first, as in a loop that takes them out of the batch
    loop = DataProto.from_dict({"index_in_file": torch.arange(4)})
    assert set(loop.union(ragged()).tensors.keys()) == {"index_in_file", *ragged().tensors.keys()}


def test_entries_are_aligned() -> None:
    batch = ragged()
    mask, scores = entries(batch.tensors, "response_mask", "token_level_scores")
    assert mask.sum() == 9 and scores[mask.bool()].tolist() == padded(batch).tensors["token_level_scores"][
        padded(batch).tensors["response_mask"].bool()
    ].tolist()  # fmt: skip


def test_cleared_rows_have_one_token() -> None:
    rows = ragged().tensors.take_or_clear([3, 0, 0], [False, True, True])
    assert rows["attention_mask"].sum(-1).tolist() == [3, 1, 1]
    assert rows["response_mask"].sum(-1).tolist() == [1, 0, 0]
    assert rows["input_ids"][1, P - 1] == 10


def test_large_batches_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.protocol.tokens.MAX_PADDED", 2 * R)
    parts = list(row_chunks(ragged().tensors))
    assert [len(part) for part in parts] == [2, 2]
    assert_same(DataProto(RaggedBatch.concat(parts)), padded(ragged().select(None, [])))


def test_rows_of_any_size_and_shape() -> None:
    """Such as the patches of images: what differs in size from row to row."""
    patches = torch.arange(12.0).view(6, 2)
    column = Ragged(patches, torch.tensor([1, 3, 0, 2]), 3, 0.0, torch.float32)
    batch = ragged()
    batch.tensors["pixel_values"] = column
    sent = pickle.loads(pickle.dumps(batch.select_idxs([3, 1])))
    assert sent.tensors["pixel_values"].shape == (2, 3, 2)
    assert torch.equal(sent.tensors.stored("pixel_values").values, torch.cat([patches[4:], patches[1:4]]))


def with_routes(routes: Tensor | None = None) -> DataProto:
    batch = ragged()
    lengths = torch.tensor([sum(row) for row in LENGTHS])
    values = torch.zeros(int(lengths.sum()), 0, 0, dtype=torch.int16) if routes is None else routes
    batch.tensors["routed_experts"] = Ragged(values, lengths, P + R, -1, torch.int16)
    return batch


def test_experts_of_tokens_are_kept_by_position() -> None:
    routes = torch.arange(18 * 3 * 2, dtype=torch.int8).view(18, 3, 2)
    batch = with_routes(routes)
    require(batch, "routed_experts", "input_ids")
    column = batch.tensors.read("routed_experts")
    assert column.shape == (4, P + R, 3, 2) and column.dtype == torch.int16
    assert torch.equal(column[1, :4], routes[5:9].short()) and (column[1, 4:] == -1).all()
    cleared = batch.tensors.take_or_clear([3, 0], [False, True]).read("routed_experts")
    assert torch.equal(cleared[1, 0], routes[0].short()) and (cleared[1, 1:] == -1).all()
    sent = pickle.loads(pickle.dumps(batch))
    assert torch.equal(sent.tensors.stored("routed_experts").values, routes)


def test_a_part_without_known_experts_takes_the_size_of_the_others() -> None:
    """Such as a group of conversations that failed before their first turn."""
    routes = torch.ones(18, 3, 2, dtype=torch.int8)
    for parts in ([with_routes(), with_routes(routes)], [with_routes(routes), with_routes()]):
        both = DataProto.concat(parts).tensors.stored("routed_experts")
        assert isinstance(both, Ragged) and both.values.shape == (36, 3, 2) and both.values.dtype == torch.int8
        assert (both.values == -1).sum() == 18 * 6
    none = DataProto.concat([with_routes(), with_routes()]).tensors.stored("routed_experts")
    assert isinstance(none, Ragged) and none.values.shape == (36, 0, 0)


def test_methods_of_a_tensordict() -> None:
    tensors = ragged().tensors
    assert tensors.to_dict().keys() == set(tensors.keys())
    assert tensors.exclude("prompts").keys() == [name for name in tensors.keys() if name != "prompts"]  # noqa: SIM118
    assert tensors.pop("none", None) is None
    for missing in (tensors.__getitem__, tensors.read, tensors.shape_of, tensors.dtype_of):
        with pytest.raises(KeyError, match="no key 'none' in the batch"):
            missing("none")
    with pytest.raises(IndexError, match="row 4 is out of range for a batch of 4 rows"):
        tensors[[4]]
    with pytest.raises(ValueError, match="mask has shape"):
        tensors[torch.tensor([True])]
    with pytest.raises(ValueError, match="batch key 'x' has 3 rows in a batch of 4"):
        tensors["x"] = torch.zeros(3)
    with pytest.raises(AttributeError, match="use `to_tensordict"):
        tensors.zero_()
    with pytest.raises(AttributeError, match="use `to_tensordict"):
        tensors.setdefault("x", torch.zeros(4))
    with pytest.raises(ValueError, match="a row has 6 tokens, more than the 5 of a padded row"):
        Ragged.of_rows([[1] * 6], R, 0, torch.int64, torch.int32)
    with pytest.raises(ValueError, match=r"batch key 'responses' has shape \(4, 5\) in part 0 and \(4, 6\) in part 1"):
        other = ragged()
        other.tensors["responses"] = replace(other.tensors.responses, width=6)
        DataProto.concat([ragged(), other])


def test_a_batch_without_tensors_has_its_rows() -> None:
    batch = ragged().select([], ["uid"])
    for same in (batch, pickle.loads(pickle.dumps(batch)), DataProto.concat([batch[:2], batch[2:]])):
        assert len(same) == 4 and len(same[1:3]) == 2
    parts = [ragged().select(["input_ids"]), ragged().select(["input_ids"])]
    assert_same(DataProto.concat(parts), DataProto.concat([padded(part) for part in parts]))


def test_a_changed_mask_counts() -> None:
    batch = ragged()
    batch.tensors["attention_mask"][0, -1] = 1
    assert lengths_of(batch.tensors)[1].tolist() == [4, 0, 5, 1]


def test_clone_shares_nothing() -> None:
    tensors: Any = ragged().tensors
    values: Tensor = tensors.clone().stored("responses").values
    values.zero_()
    assert tensors.stored("responses").values.any()
