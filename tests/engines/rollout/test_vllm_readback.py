"""Weight updates inside vLLM's worker, on a stand-in for vLLM: every tensor that it does not hold is found at the same update."""

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from lockstep.engines.rollout.vllm_readback import Place, find_place
from lockstep.engines.rollout.vllm_worker import WeightUpdates
from lockstep.utils.fingerprint import fingerprint

HIDDEN, HEAD, VOCAB, INNER = 8, 4, 20, 12
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.layers.0.self_attn.q_proj.weight": (4 * HEAD, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (HEAD, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (HEAD, HIDDEN),
    "model.layers.0.self_attn.v_proj.bias": (HEAD,),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, 4 * HEAD),
    "model.layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
    "model.norm.weight": (HIDDEN,),
}
REST = {
    "model.layers.0.self_attn.q_proj.bias": (4 * HEAD,),
    "model.layers.0.self_attn.k_proj.bias": (HEAD,),
    "model.layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
    "lm_head.weight": (VOCAB, HIDDEN),
}


class UnquantizedLinearMethod:
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if hasattr(layer, "cpu_linear"):
            return layer.cpu_linear(x, layer.weight, bias)  # type: ignore[no-any-return]
        return nn.functional.linear(x, layer.weight, bias)


class RoundedLinearMethod(UnquantizedLinearMethod):
    """Keeps the weights with three bits of mantissa, as fp8 does."""


class Linear(nn.Module):
    """sizes: rows of each fused part on this rank."""

    def __init__(self, sizes: list[int], width: int, tp: tuple[int, int], bias: bool = False) -> None:
        super().__init__()
        self.output_partition_sizes, self.input_size_per_partition = sizes, width
        self.tp_rank, self.tp_size = tp
        self.quant_method = UnquantizedLinearMethod()
        self.weight = nn.Parameter(torch.zeros(sum(sizes), width), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.zeros(sum(sizes)), requires_grad=False)

    def pack(self) -> None:
        packed = self.weight.detach().clone()
        self.cpu_linear = lambda x, weight, bias: nn.functional.linear(x, packed, bias)
        self.weight = nn.Parameter(packed.new_empty(0), requires_grad=False)


class Embedding(nn.Module):
    """Padded to a multiple of 16 rows, as in vLLM."""

    def __init__(self, tp: tuple[int, int]) -> None:
        super().__init__()
        rank, size = tp
        share = 32 // size
        start, end = rank * share, min((rank + 1) * share, VOCAB)
        self.shard_indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)
        self.embedding_dim = HIDDEN
        self.weight = nn.Parameter(torch.zeros(share, HIDDEN), requires_grad=False)


class ParallelLMHead(Embedding):
    quant_method = UnquantizedLinearMethod()

    def pack(self) -> None:
        packed = self.weight.detach().clone()
        self.cpu_linear = lambda x, weight, bias: nn.functional.linear(x, packed, bias)


class Model(nn.Module):
    """What vLLM makes of a small Qwen2 on one rank. skipped: names that `load_weights` leaves out; stale: adds to these."""

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, tp: tuple[int, int], is_packed: bool) -> None:
        super().__init__()
        _, size = tp
        heads, keys = 4 * HEAD // size, HEAD  # one key head, which both ranks hold
        attention, mlp, layer, body = nn.Module(), nn.Module(), nn.Module(), nn.Module()
        attention.qkv_proj = Linear([heads, keys, keys], HIDDEN, tp, bias=True)
        attention.o_proj = Linear([HIDDEN], heads, tp)
        mlp.gate_up_proj = Linear([INNER // size] * 2, HIDDEN, tp)
        mlp.down_proj = Linear([HIDDEN], INNER // size, tp)
        layer.self_attn, layer.mlp = attention, mlp
        body.embed_tokens, body.layers, body.norm = (
            Embedding(tp),
            nn.ModuleList([layer]),
            nn.LayerNorm(HIDDEN, bias=False),
        )
        self.model, self.lm_head = body, ParallelLMHead(tp)
        self.config = SimpleNamespace(tie_word_embeddings=False)
        self.tp, self.is_packed = tp, is_packed
        self.skipped: set[str] = set()
        self.stale: dict[str, float] = {}
        self.weights: dict[str, Tensor] = {}

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name not in self.skipped:
                self.weights[name] = tensor + self.stale.get(name, 0.0)

    def finish(self) -> None:
        """Lay the tensors out by hand, and pack them."""
        (rank, size), w = self.tp, self.weights
        attention, mlp = self.model.layers[0].self_attn, self.model.layers[0].mlp
        a, m = "model.layers.0.self_attn.", "model.layers.0.mlp."
        for leaf in ("weight", "bias"):
            parts = [w[f"{a}q_proj.{leaf}"].chunk(size)[rank], w[f"{a}k_proj.{leaf}"], w[f"{a}v_proj.{leaf}"]]
            setattr(attention.qkv_proj, leaf, nn.Parameter(torch.cat(parts), requires_grad=False))
        up = [w[f"{m}{part}_proj.weight"].chunk(size)[rank] for part in ("gate", "up")]
        mlp.gate_up_proj.weight = nn.Parameter(torch.cat(up), requires_grad=False)
        for module, name in ((attention.o_proj, f"{a}o_proj.weight"), (mlp.down_proj, f"{m}down_proj.weight")):
            module.weight = nn.Parameter(w[name].chunk(size, 1)[rank].contiguous(), requires_grad=False)
        for module, name in ((self.model.embed_tokens, "model.embed_tokens.weight"), (self.lm_head, "lm_head.weight")):
            padded = torch.cat((w[name], w[name].new_zeros(32 - VOCAB, HIDDEN)))
            module.weight = nn.Parameter(padded.chunk(size)[rank], requires_grad=False)
        self.model.norm.weight = nn.Parameter(w["model.norm.weight"], requires_grad=False)
        if self.is_packed:
            for module in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj, self.lm_head):
                module.pack()


class Worker(WeightUpdates):
    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        reload, config = ModuleType("reload"), ModuleType("config")
        reload.initialize_layerwise_reload = lambda model: None  # type: ignore[attr-defined]
        reload.finalize_layerwise_reload = lambda model, config: model.finish()  # type: ignore[attr-defined]
        config.set_current_vllm_config = lambda config: nullcontext()  # type: ignore[attr-defined]
        for name in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.reload", reload)
        monkeypatch.setitem(sys.modules, "vllm.config", config)
        self.vllm_config = SimpleNamespace(model_config=None)
        self.model_runner = SimpleNamespace(get_model=lambda: model)

    def update(self, weights: dict[str, Tensor]) -> list[str]:
        """Send all weights; returns the names that do not agree."""
        self.lockstep_begin_update()
        for entry in weights.items():
            self.lockstep_load([entry])
        assert self.lockstep_finish_update() == ""
        found = self.lockstep_fingerprints(list(weights))
        return [name for name, tensor in weights.items() if found[name] != fingerprint(tensor)]


def random_weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.02 * torch.randn(shape, generator=generator).to(dtype) for name, shape in (SHAPES | REST).items()}


LAYOUTS = {
    "plain": ((0, 1), False),
    "packed": ((0, 1), True),
    "rank 0": ((0, 2), False),
    "packed rank 1": ((1, 2), True),
}


@pytest.fixture(params=LAYOUTS)
def worker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Worker:
    made = Worker(Model(*LAYOUTS[request.param]), monkeypatch)
    made.lockstep_model().weights = random_weights(99)  # as a dummy load leaves them
    return made


@pytest.mark.parametrize("skipped", [*SHAPES, *REST])
def test_a_tensor_skipped_at_the_first_update_is_found_there(worker: Worker, skipped: str) -> None:
    model = worker.lockstep_model()
    model.skipped = {skipped}
    for seed in (1, 2, 3):
        assert worker.update(random_weights(seed)) == [skipped]
    model.skipped = set()
    assert worker.update(random_weights(4)) == []
    assert worker.lockstep_unread() == {}, "every tensor is read back, whatever was loaded"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_that_are_slightly_stale_are_found(worker: Worker, dtype: torch.dtype) -> None:
    model = worker.lockstep_model()
    model.weights = random_weights(99, dtype)
    assert worker.update(random_weights(1, dtype)) == []
    stale = [name for name in SHAPES if name != "model.layers.0.self_attn.v_proj.bias"]
    assert len(stale) == 8
    for name in stale:
        model.stale = {name: 1e-4}
        assert worker.update(random_weights(2, dtype)) == [name]
    model.stale = {}
    assert worker.update(random_weights(3, dtype)) == []


def test_zeros_that_arrive_as_negative_zeros_agree(worker: Worker) -> None:
    weights = random_weights(1)
    weights["model.layers.0.mlp.down_proj.weight"][0] = -0.0
    assert worker.update(weights) == []


class Reordering(nn.Module):
    """A layer whose loader reorders rows, experts that a kernel lays out in its own way, and a tensor of another name."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Linear([4, 4, 4], HIDDEN, (0, 1))
        self.experts = nn.Module()
        self.experts.w13_weight = nn.Parameter(torch.zeros(2, 2 * INNER, HIDDEN), requires_grad=False)
        self.experts.w2_weight = nn.Parameter(torch.zeros(2, HIDDEN, INNER), requires_grad=False)
        self.mixer = nn.Module()
        self.mixer.A = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.layers = nn.ModuleList()
        self.config = SimpleNamespace(tie_word_embeddings=False)
        self.loaded: dict[str, Tensor] = {}

    def load_weights(self, weights: Any) -> None:
        self.loaded |= dict(weights)

    def finish(self) -> None:
        w = self.loaded
        self.attention.weight.data = w["attention.weight"].reshape(2, 3, 2, HIDDEN).transpose(0, 1).reshape(12, HIDDEN)
        up = [torch.cat((w[f"experts.{e}.up_proj.weight"], w[f"experts.{e}.gate_proj.weight"])) for e in range(2)]
        self.experts.w13_weight.data = torch.stack(up)
        self.experts.w2_weight.data = torch.stack([w[f"experts.{e}.down_proj.weight"] for e in range(2)])
        self.mixer.A.data = -w["mixer.A_log"].exp()


def reordered_weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"attention.weight": (12, HIDDEN), "mixer.A_log": (4,)}
    for expert in range(2):
        shapes |= {f"experts.{expert}.{part}_proj.weight": (INNER, HIDDEN) for part in ("gate", "up")}
        shapes[f"experts.{expert}.down_proj.weight"] = (HIDDEN, INNER)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_tensors_in_another_order_are_compared_by_their_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Reordering()
    worker = Worker(model, monkeypatch)
    model.load_weights(reordered_weights(99))
    assert worker.update(reordered_weights(1)) == []
    assert worker.lockstep_unread() == {"mixer.A_log": "vLLM's model has no parameter of this name"}
    for name in ("attention.weight", "experts.1.up_proj.weight", "experts.0.down_proj.weight"):
        load = model.load_weights
        model.load_weights = lambda weights, name=name, load=load: load(  # type: ignore[method-assign]
            (n, t + 1e-4 if n == name else t) for n, t in weights
        )
        wrong = worker.update(reordered_weights(2))
        assert name in wrong and all(other.split(".")[0] == name.split(".")[0] for other in wrong)
        model.load_weights = load  # type: ignore[method-assign]


def test_experts_in_a_form_of_the_kernel_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Reordering()
    worker, finish = Worker(model, monkeypatch), model.finish

    def finish_and_pack() -> None:
        finish()
        model.experts.w2_weight.data = torch.empty(0)

    monkeypatch.setattr(model, "finish", finish_and_pack)
    assert worker.update(reordered_weights(1)) == []
    packed = [name for name, reason in worker.lockstep_unread().items() if "its own layout" in reason]
    assert packed == ["experts.0.down_proj.weight", "experts.1.down_proj.weight"]


@pytest.mark.parametrize("name", ["experts.gate_up_proj", "experts.down_proj_bias", "experts.3.w3.weight"])
def test_names_of_experts(name: str) -> None:
    model = Reordering()
    model.experts.w2_bias = nn.Parameter(torch.zeros(2, HIDDEN), requires_grad=False)
    place = find_place(model, name, (1,))
    leaf = "w2_bias" if "bias" in name else "w13_weight"
    assert isinstance(place, Place) and place.leaf == leaf and not place.is_ordered
    assert find_place(model, "experts.gate_up_proj_scales", (1,)) == "vLLM's model has no parameter of this name"


def rounded(tensor: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(tensor)
    return torch.ldexp((mantissa * 16).round() / 16, exponent)


def test_quantised_layers_are_compared_within_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model((0, 1), is_packed=True)
    down = model.model.layers[0].mlp.down_proj
    down.quant_method = RoundedLinearMethod()
    worker, finish = Worker(model, monkeypatch), model.finish
    model.weights = random_weights(99)

    def finish_rounded() -> None:
        name = "model.layers.0.mlp.down_proj.weight"
        model.weights[name] = rounded(model.weights[name])
        finish()

    monkeypatch.setattr(model, "finish", finish_rounded)
    assert worker.update(random_weights(1)) == []
    assert worker.lockstep_unread() == {"model.layers.0.mlp.down_proj.weight": "quantised"}
    model.skipped = {"model.layers.0.mlp.down_proj.weight"}
    assert worker.update(random_weights(2)) == ["model.layers.0.mlp.down_proj.weight"]
