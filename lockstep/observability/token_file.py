"""`{step}.tokens.parquet`, beside `{step}.jsonl`: the tokens of a step's responses with their numbers.

batch ─► trainer/ppo/token_dump.py ─► write ─► file ─► read ─► `lockstep rollouts --tokens`, the dashboard

A row per response; columns are named like the batch keys (`protocol/keys.py`), and `*_pieces` are the bytes of each token, so that
readers need neither the tokenizer nor torch. Numbers that a run did not compute have no column.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.utils.files import atomic_writer

if TYPE_CHECKING:
    import pyarrow as pa

NUMBERS = {
    "rollout_log_probs": "log-prob at sampling time",
    "old_log_probs": "log-prob by the trainer, before the update",
    "ref_log_prob": "log-prob by the reference policy",
    "entropys": "entropy of the trainer's policy",
    "advantages": "advantage",
    "values": "value by the critic",
    "token_level_rewards": "reward",
    "rollout_is_weights": "importance weight against the rollout",
}
"""Columns with a float32 per response token, and their meaning."""
GAP = "gap"
"""What `RowTokens.gap` is called: old_log_probs - rollout_log_probs."""
NOT_SAMPLED = -1
"""Policy version of a token that the policy did not write."""
SUFFIX = ".tokens.parquet"
ABOUT = b"lockstep.tokens"
"""Key of what the file is about, as JSON, in its metadata."""
MOST_TOKENS = 1_000_000
"""Of prompts and responses in a file: fewer responses are written if they are long."""
TOKENS_TOGETHER = 2**16
"""About how many response tokens are read when those of one row are asked for."""
HOW = "set trainer.rollout_token_data=true when you start or resume a run to write them"


class NoTokens(ValueError):
    """The run did not write the tokens that were asked for."""


@dataclass(frozen=True)
class RowTokens:
    """The tokens of one response.

    uid:             of its prompt, as in the dump.
    prompt, pieces:  bytes of each token of prompt and response.
    mask:            whether each response token was trained on.
    policy_versions: updates of the policy that sampled each one; NOT_SAMPLED for tool results, user turns and the like.
    numbers:         name in NUMBERS -> one float per response token.
    about:           `old_log_probs`: where the step's old log-probs come from: pass, update or rollout; None in validation.
    """

    uid: str
    prompt_ids: list[int]
    prompt: list[bytes]
    ids: list[int]
    pieces: list[bytes]
    mask: np.ndarray
    policy_versions: np.ndarray
    numbers: dict[str, np.ndarray]
    about: dict[str, Any]

    @property
    def is_sampled(self) -> np.ndarray:
        sampled: np.ndarray = self.policy_versions != NOT_SAMPLED
        return sampled

    def shown(self) -> dict[str, np.ndarray]:
        """`numbers` and the gap, NaN at tokens that have none: the rollout has no log-prob of what the policy did not write."""
        found = dict(self.numbers)
        if "rollout_log_probs" in found:
            found["rollout_log_probs"] = np.where(self.is_sampled, found["rollout_log_probs"], np.nan)
            if "old_log_probs" in found:
                found[GAP] = found["old_log_probs"] - found["rollout_log_probs"]
        return found

    def turns(self) -> list[tuple[int, int, bool]]:
        """(begin, end, written by the policy) of each run of response tokens."""
        sampled = self.is_sampled
        edges = [0, *(np.flatnonzero(sampled[1:] != sampled[:-1]) + 1).tolist(), len(sampled)]
        return [(begin, end, bool(sampled[begin])) for begin, end in pairwise(edges) if end > begin]

    def missing(self) -> dict[str, str]:
        """Numbers that this file lacks and that a setting would have added, with the setting."""
        reasons = {}
        source = self.about.get("old_log_probs")
        if "old_log_probs" not in self.numbers and source is not None:
            reason = {
                "update": "the step is a single update, whose log-probs are not kept; "
                "actor_rollout_ref.actor.old_log_prob_pass=always computes them before it",
                "rollout": "the run uses the rollout's log-probs (algorithm.rollout_correction.bypass_mode)",
            }.get(str(source), "the run did not compute them")
            reasons = dict.fromkeys(("old_log_probs", "entropys", GAP), reason)
        if "rollout_log_probs" not in self.numbers:
            reasons["rollout_log_probs"] = "actor_rollout_ref.rollout.calculate_log_probs=true keeps them"
            reasons.setdefault(GAP, reasons["rollout_log_probs"])
        return reasons


def token_path(dump: Path) -> Path:
    """The file that belongs to a dump (`{step}.jsonl`)."""
    return dump.with_name(dump.stem + SUFFIX)


def write(path: Path, columns: Mapping[str, Sequence[Any]], about: Mapping[str, Any]) -> None:
    """Replace the file. columns: `row` (the line of the dump, from 0), `uid`, and arrays or lists of bytes, one per row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = _types()
    arrays = {name: _column(values, types[name]) for name, values in columns.items()}
    table = pa.table(arrays).replace_schema_metadata({ABOUT: json.dumps(dict(about)).encode()})
    floats = [f"{name}.list.element" for name in arrays if name in NUMBERS and name not in _REPEATED]
    repeated = [f"{name}.list.element" for name in arrays if name not in NUMBERS or name in _REPEATED]
    with atomic_writer(path) as file:
        pq.write_table(
            table,
            file,
            row_group_size=_rows_together(columns["responses"]),
            compression="zstd",
            use_dictionary=repeated,
            column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
            write_statistics=["row"],
        )


def _rows_together(rows: Sequence[Any]) -> int:
    return max(1, TOKENS_TOGETHER * len(rows) // max(1, sum(map(len, rows))))


_REPEATED = ("advantages", "token_level_rewards")
"""Numbers with few different values, mostly: a dictionary is smaller."""


def _types() -> "dict[str, pa.DataType]":
    import pyarrow as pa

    lists = {
        "prompts": pa.int32(),
        "responses": pa.int32(),
        "prompt_pieces": pa.binary(),
        "response_pieces": pa.binary(),
    }
    lists |= {"response_mask": pa.bool_(), "policy_versions": pa.int32()} | dict.fromkeys(NUMBERS, pa.float32())
    return {"row": pa.int32(), "uid": pa.string()} | {name: pa.list_(kind) for name, kind in lists.items()}


def _column(rows: Sequence[Any], kind: "pa.DataType") -> "pa.Array":
    import pyarrow as pa

    if not pa.types.is_list(kind):
        return pa.array(rows, kind)
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    if pa.types.is_binary(kind.value_type):
        values = pa.array([piece for row in rows for piece in row], kind.value_type)
    else:
        values = pa.array(np.concatenate(rows) if rows else [], kind.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def read(path: Path, row: int) -> RowTokens:
    """The tokens of a row of the dump. NoTokens if they were not written; ValueError if the file is damaged or of another kind."""
    import pyarrow as pa

    with _opened(path) as file:
        try:
            rows = file.read(columns=["row"])["row"].to_pylist()
            if row not in rows:
                raise NoTokens(
                    f"{path.name} has the tokens of {len(rows)} responses, and not of this one; trainer.rollout_token_rows is how "
                    f"many are kept per step, with at most {MOST_TOKENS:,} tokens in all"
                )
            place = rows.index(row)
            for group in range(file.num_row_groups):
                num_rows = file.metadata.row_group(group).num_rows
                if place < num_rows:
                    break
                place -= num_rows
            table = file.read_row_group(group).slice(place, 1)
            about = json.loads((table.schema.metadata or {}).get(ABOUT, b"{}"))
            return _row_tokens(table, about)
        except (pa.ArrowException, OSError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise _damaged(path, error) from error


def _opened(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except FileNotFoundError:
        raise NoTokens(f"there is no {path.name}: the tokens of this step were not written; {HOW}") from None
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error
    wanted = _types()
    found = {field.name: field.type for field in file.schema_arrow}
    required = ("row", "uid", "prompts", "prompt_pieces", "responses", "response_pieces", "response_mask")
    if any(name not in found for name in required) or any(found[n] != wanted[n] for n in found if n in wanted):
        file.close()
        raise ValueError(
            f"{path.name} is not a file of tokens that this version writes: its columns are {_list(found)}"
        )
    return file


def _list(names: Mapping[str, Any]) -> str:
    text = ", ".join(names)
    return text if len(text) < 200 else f"{text[:200]} ..."


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{path.name} cannot be read: {str(error).splitlines()[0][:200] if str(error) else type(error).__name__}"
    )


def _row_tokens(table: "pa.Table", about: Any) -> RowTokens:
    def array(name: str) -> np.ndarray:
        values: np.ndarray = table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        if len(values) != num_tokens:
            raise TypeError(f"{len(values)} values of {name} for {num_tokens} tokens")
        return values

    ids = table["responses"][0].as_py()
    num_tokens = len(ids)
    mask = array("response_mask").astype(bool)
    versions = array("policy_versions") if "policy_versions" in table.column_names else np.where(mask, 0, NOT_SAMPLED)
    prompt, pieces = (table[name][0].as_py() for name in ("prompt_pieces", "response_pieces"))
    prompt_ids = table["prompts"][0].as_py()
    if len(pieces) != num_tokens or len(prompt) != len(prompt_ids):
        raise TypeError("tokens and pieces differ in number")
    numbers = {name: array(name) for name in NUMBERS if name in table.column_names}
    return RowTokens(
        str(table["uid"][0].as_py()),
        prompt_ids,
        prompt,
        ids,
        pieces,
        mask,
        versions,
        numbers,
        about if isinstance(about, dict) else {},
    )
