"""Find the parameters that vLLM's model computes with, although it fuses, shards, pads, reorders and packs them.

name, shape ─► Place: module, parameter, and which part of the tensor this rank holds     by the modules' structure alone
received tensor ─► checksums of that part ─┐
module          ─► the same part, read back ┴─► the same bits; or the same contents, if vLLM's loader reorders them

A packed layer is read back by multiplying it with the identity: each output is one weight times 1, which rounds nothing.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.utils.fingerprint import fingerprint

IDENTITY_ROWS = 1024
CONTENT_WORDS = 1 << 22
ROUNDING = 0.2
"""Largest relative distance between a weight and its quantised form. fp8 rounds by about 0.03; an unrelated tensor is at 1.4."""
_EXPERTS = re.compile(
    r"(?P<owner>(?:.*\.)?experts)(?:\.\d+)?\.(?:(?P<down>down_proj|w2)|(?:gate|up|gate_up)_proj|w[13])(?:[._](?P<leaf>weight|bias))?"
)


@dataclass(frozen=True)
class Place:
    """Where this rank's model holds a tensor.

    path, leaf:   the module and the name of its parameter
    rows:         (start in the parameter, start in the tensor, number) of each piece; None is the whole tensor
    columns:      (start, number) of the tensor's columns that this rank holds; None is all
    is_ordered:   False if only the contents can be compared, in any order: also those of the parameter's other tensors
    is_quantized: the layer computes with rounded weights
    """

    path: str
    leaf: str
    rows: tuple[tuple[int, int, int], ...] | None = None
    columns: tuple[int, int] | None = None
    is_ordered: bool = True
    is_quantized: bool = False

    @property
    def parameter(self) -> str:
        return f"{self.path}.{self.leaf}"

    def taken(self, tensor: Tensor) -> Tensor:
        """The part of a whole tensor that this rank holds."""
        if self.columns is not None:
            tensor = tensor.narrow(1, *self.columns)
        return tensor if self.rows is None else _joined([tensor[start : start + n] for _, start, n in self.rows])

    def held(self, parameter: Tensor) -> Tensor:
        """The same part of the module's parameter."""
        return parameter if self.rows is None else _joined([parameter[start : start + n] for start, _, n in self.rows])


@dataclass(frozen=True)
class Received:
    """What is kept of a tensor that was received.

    whole:            its fingerprint
    bits, contents:   checksums of the part that this rank holds; contents is None if the order of its bits is known
    projection, norm: of a part that is quantised
    """

    whole: int
    dtype: torch.dtype
    bits: int = 0
    contents: int | None = None
    projection: Tensor | None = None
    norm: float = 0.0


Agreement = Literal["bits", "contents", "rounding", "none", "unknown"]
"""bits: equal; contents: equal in another order; rounding: as near as quantisation allows; none: another tensor; unknown: the
kernel stores experts in its own layout."""


def find_place(model: Any, name: str, shape: Sequence[int]) -> Place | str:
    """Where `model` holds the tensor; if that is unknown, the reason."""
    path, leaf, index = _locate(model, name)
    module = _module(model, path)
    if module is None or (leaf not in module._parameters and leaf not in module._buffers):
        return _expert_place(model, name)
    rounds = leaf == "weight" and is_quantized(module)
    rows, columns = _rows(module, shape, index), _columns(module, shape)
    if rows is not None and columns is not None:
        cut = columns if len(shape) == 2 and columns[1] < shape[1] else None
        return Place(path, leaf, rows if shape else None, cut, is_quantized=rounds)
    if getattr(module, "tp_size", 1) > 1 or rounds:
        return f"{type(module).__name__} has its own shard order"
    return Place(path, leaf, is_ordered=False)


def _locate(model: Any, name: str) -> tuple[str, str, int | None]:
    """The path of a module, its parameter, and which of the tensors that are fused into it has this name; None for the only one."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    rename = getattr(mapper, "map_name", None) or getattr(mapper, "_map_name", None)
    path, _, leaf = ((rename(name) if rename else None) or name).rpartition(".")
    stem, _, last = path.rpartition(".")
    own = name.rpartition(".")[0].rpartition(".")[2]
    for joint, parts in getattr(model, "packed_modules_mapping", {}).items():
        fused = f"{stem}.{joint}" if stem else joint
        if own != joint and own in parts and last in (own, joint) and _module(model, fused) is not None:
            return fused, leaf, list(parts).index(own)
    return path, leaf, None


def _module(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _rows(module: Any, shape: Sequence[int], index: int | None) -> tuple[tuple[int, int, int], ...] | None:
    """index: of the tensor among those that are fused; None if the checkpoint has the module as it is."""
    num_rows = shape[0] if shape else 1
    if (vocabulary := getattr(module, "shard_indices", None)) is not None:
        start = vocabulary.org_vocab_start_index
        return ((0, start, min(vocabulary.org_vocab_end_index, num_rows) - start),)
    sizes = getattr(module, "output_partition_sizes", None)
    if sizes is None:
        return ((0, 0, num_rows),)
    if index is None and sum(sizes) == num_rows:
        return ((0, 0, num_rows),)
    if index is not None and index < len(sizes):
        piece = _shard(module, num_rows, sizes[index])
        return None if piece is None else ((sum(sizes[:index]), *piece),)
    if len(sizes) == 1:
        piece = _shard(module, num_rows, sizes[0])
        return None if piece is None else ((0, *piece),)
    return _fused_rows(module, sizes, num_rows)


def _fused_rows(module: Any, sizes: Sequence[int], num_rows: int) -> tuple[tuple[int, int, int], ...] | None:
    """The rows of a tensor that the checkpoint has fused and whose parts are sharded one by one."""
    whole = list(getattr(module, "output_sizes", ()))
    if hasattr(module, "total_num_kv_heads"):  # output_sizes counts key heads that ranks have in common once per rank
        values = getattr(module, "v_head_size", module.head_size)
        whole = [module.total_num_heads * module.head_size, module.total_num_kv_heads * module.head_size]
        whole.append(module.total_num_kv_heads * values)
    if len(whole) != len(sizes) or sum(whole) != num_rows:
        return None
    pieces = []
    for number, (full, size) in enumerate(zip(whole, sizes)):
        piece = _shard(module, full, size)
        if piece is None:
            return None
        pieces.append((sum(sizes[:number]), sum(whole[:number]) + piece[0], piece[1]))
    return tuple(pieces)


def _shard(module: Any, full: int, size: int) -> tuple[int, int] | None:
    """(start, number) of this rank's rows; several ranks may hold the same ones."""
    rank, world = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)
    if full == size:
        return 0, size
    if size == 0 or full % size or world % (full // size):
        return None
    return rank // (world // (full // size)) * size, size


def _columns(module: Any, shape: Sequence[int]) -> tuple[int, int] | None:
    if len(shape) != 2:
        return 0, 0
    return _shard(module, shape[1], getattr(module, "input_size_per_partition", shape[1]))


def _expert_place(model: nn.Module, name: str) -> Place | str:
    """All experts of a layer are two parameters of vLLM, in an order that depends on the kernel."""
    match = _EXPERTS.fullmatch(name)
    owner = _module(model, match["owner"]) if match else None
    if match is None or owner is None:
        return "vLLM's model has no parameter of this name"
    leaf = ("w2_" if match["down"] else "w13_") + (match["leaf"] or "weight")
    for path, module in owner.named_modules(prefix=match["owner"]):
        if leaf in module._parameters:
            if max(getattr(module, size, 1) for size in ("tp_size", "ep_size")) > 1:
                return "experts are sharded over ranks"
            if is_quantized(module):
                return "experts are quantised"
            return Place(path, leaf, is_ordered=False)
    return f"{type(owner).__name__} has no {leaf}"


def describe(tensor: Tensor, place: Place | None, with_contents: bool) -> Received:
    """What to keep of a received tensor. with_contents: its bits may be in another order in the model."""
    whole = fingerprint(tensor)
    if place is None:
        return Received(whole, tensor.dtype)
    part = place.taken(tensor)
    if place.is_quantized:
        return Received(whole, tensor.dtype, projection=_projection(part), norm=float(part.float().norm()))
    return Received(whole, tensor.dtype, _bits(part), _contents(part) if with_contents else None)


def compare(model: nn.Module, places: Mapping[str, Place], received: Mapping[str, Received]) -> dict[str, Agreement]:
    """How each received tensor that has a place agrees with the model."""
    fused: dict[str, list[str]] = {}
    for name in received:
        if name in places:
            fused.setdefault(places[name].parameter, []).append(name)
    found: dict[str, Agreement] = {}
    for names in fused.values():
        parameter = read(model.get_submodule(places[names[0]].path), places[names[0]].leaf)
        if parameter.numel() == 0:
            found |= dict.fromkeys(names, "unknown")
            continue
        agreements = {name: _agreement(parameter, places[name], received[name]) for name in names}
        parts = [received[name].contents for name in names]
        if "none" in agreements.values() and None not in parts:
            total = _wrapped(sum(part or 0 for part in parts))
            if total == _contents(parameter.to(received[names[0]].dtype)):
                agreements = dict.fromkeys(names, "contents")
        found |= agreements
    return found


def _agreement(parameter: Tensor, place: Place, received: Received) -> Agreement:
    if not place.is_ordered:
        return "none"
    part = place.held(parameter)
    if received.projection is not None:
        distance = float((_projection(part) - received.projection).norm())
        return "rounding" if distance <= ROUNDING * received.norm else "none"
    return "bits" if _bits(part.to(received.dtype)) == received.bits else "none"


def read(module: Any, leaf: str) -> Tensor:
    """The parameter as the module computes with it."""
    parameter: Tensor = getattr(module, leaf).detach()
    is_head = "LMHead" in type(module).__name__  # packs a copy and keeps its weight
    is_packed = parameter.numel() == 0 or (is_head and hasattr(module, "cpu_linear"))
    if leaf != "weight" or not hasattr(module, "quant_method") or not (is_packed or is_quantized(module)):
        return parameter
    sizes = ("input_size_per_partition", "input_size", "embedding_dim")
    width = next(getattr(module, name) for name in sizes if hasattr(module, name))
    identity = torch.eye(width, dtype=getattr(module, "params_dtype", parameter.dtype), device=parameter.device)
    with torch.no_grad():
        columns = [module.quant_method.apply(module, rows, None) for rows in identity.split(IDENTITY_ROWS)]
    return torch.cat(columns).t()


def is_quantized(module: nn.Module) -> bool:
    method = getattr(module, "quant_method", None)
    return method is not None and not type(method).__name__.startswith("Unquantized")


def _bits(part: Tensor) -> int:
    """Fingerprint in which -0 is 0, as in a product."""
    return fingerprint(part + 0)


def _contents(part: Tensor) -> int:
    """A checksum of the values that is the same in any order; zeros, with which vLLM pads, do not count."""
    words = (part + 0).contiguous().flatten()
    words = words.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[words.element_size()])
    total = 0
    for some in words.split(CONTENT_WORDS):
        mixed = some.long() * 0x2545F4914F6CDD1D
        mixed = (mixed ^ (mixed >> 29)) * 0x369DEA0F31A53F85
        total += int((mixed ^ (mixed >> 32)).sum())
    return _wrapped(total)


def _wrapped(total: int) -> int:
    return (total + 2**63) % 2**64 - 2**63


def _projection(part: Tensor) -> Tensor:
    """The product with random numbers: distances of matrices are on average those of their projections."""
    random = torch.randn(part.shape[-1], generator=torch.Generator().manual_seed(0))
    return part.float() @ random.to(part.device)


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
