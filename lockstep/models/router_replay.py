"""The experts that tokens are routed to: recorded, replayed, and balanced.

    router: scores of all experts ─► top-k ─► weights of the chosen experts
                                      └ recorded, or replaced by recorded experts

Replay replaces the choice alone. The weights of the chosen experts are computed from the current scores, in the architecture's own
code, so gradients reach the router. A token without recorded experts (`FREE`) is routed by its scores.

Shapes: T tokens of a forward, L routers in the order of the layers, K experts per token, E experts, B rows.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

RouteUse = Literal["record", "replay", "compare"]
"""What a forward does with routes: return its own, compute with those of the batch, or only compare its own with those."""
FREE = -1
"""Entry of a token without a recorded expert."""

_TOP_K = (torch.topk, torch.Tensor.topk)


def route_dtype(num_experts: int) -> torch.dtype:
    """The smallest type that holds the numbers of the experts and `FREE`."""
    return torch.int8 if num_experts <= 128 else torch.int16


@dataclass
class RouterOutputs:
    """What the routers of one forward did; each list has an entry per router.

    chosen:    (T, K) the experts that computed.
    differs:   (T,) whether the router itself would have chosen another set than that of the batch; False for free tokens.
    logits:    (T, E) if they were asked for.
    """

    chosen: list[Tensor] = field(default_factory=list)
    differs: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def routes(self) -> Tensor:
        """(T, L, K) in int32."""
        return torch.stack(self.chosen, 1).int()

    def mismatch(self) -> Tensor:
        """(T,) share of the routers that differ."""
        return torch.stack(self.differs, 1).float().mean(1)


class Routing:
    """The routers of a model, whose choices can be read and replaced.

    Between `begin` and `end` the forward of the model is recorded. Routes that are replayed stay in place until the next `begin`,
    because gradient checkpointing repeats the forward in the backward pass.
    """

    def __init__(self, model: nn.Module, key: str) -> None:
        """key: the config key that asks for it, for messages. ValueError if the model has routers that are not recognised."""
        self.key = key
        self.routers = find_routers(model, key)
        self.num_layers = len(self.routers)
        self.top_k: int = self.routers[0].top_k  # type: ignore[assignment]
        self.num_experts: int = self.routers[0].num_experts  # type: ignore[assignment]
        self.dtype = route_dtype(self.num_experts)
        self._routes: Tensor | None = None
        self._replays = False
        self._keeps_logits = False
        self._outputs: RouterOutputs | None = None
        for index, router in enumerate(self.routers):
            router.forward = self._watched(router, index)

    def begin(self, routes: Tensor | None = None, *, replay: bool = False, logits: bool = False) -> None:
        """Watch the next forward. routes: (T, L, K) to compare with or, with `replay`, to compute with."""
        self._routes = routes
        self._replays = replay
        self._keeps_logits = logits
        self._outputs = RouterOutputs()

    def end(self) -> RouterOutputs:
        outputs, self._outputs = self._outputs, None
        assert outputs is not None, "begin was not called"
        return outputs

    def reset(self) -> None:
        """Nothing is recorded or replayed from here on."""
        self._routes = self._outputs = None

    def _watched(self, router: nn.Module, index: int) -> Callable[..., Any]:
        forward = router.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._outputs is None and self._routes is None:
                return forward(*args, **kwargs)
            choice = _Choice(self, index)
            with choice:
                out = forward(*args, **kwargs)
            if choice.num_made != 1:
                raise ValueError(
                    f"{self.key}: {type(router).__name__} does not choose its experts by one top-k over all of them, so its choice "
                    "cannot be read; disable it"
                )
            if self._outputs is not None and self._keeps_logits:
                self._outputs.logits.append(self._logits_of(out))
            return out

        return watched

    def _logits_of(self, out: Any) -> Tensor:
        """(T, E) the logits among the results of a router."""
        results = out if isinstance(out, tuple) else (out,)
        found = [
            x for x in results if isinstance(x, Tensor) and x.is_floating_point() and x.shape[-1] == self.num_experts
        ]
        if not found:
            raise ValueError(f"{self.key}: {type(self.routers[0]).__name__} does not return its logits; set 0")
        return found[0].flatten(0, -2)

    def choose(self, index: int, own: Tensor) -> Tensor:
        """(T, K) the experts of the tokens, of which router `index` would choose `own`."""
        chosen = own
        differs = None
        if self._routes is not None:
            routes = self._routes[:, index].to(own.dtype)
            free = (routes < 0).any(1, keepdim=True)
            wanted = torch.where(free, own, routes)
            differs = (own.sort(1).values != wanted.sort(1).values).any(1)
            chosen = wanted if self._replays else own
        if self._outputs is not None:
            self._outputs.chosen.append(chosen)
            if differs is not None:
                self._outputs.differs.append(differs)
        return chosen


class _Choice(TorchFunctionMode):
    """Replaces the result of the top-k over all experts in the forward of one router."""

    def __init__(self, routing: Routing, index: int) -> None:
        super().__init__()
        self.routing = routing
        self.index = index
        self.num_made = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _TOP_K:
            return out
        scores, indices = args[0], out.indices
        # others choose groups of experts first
        if scores.ndim != 2 or scores.shape[1] != self.routing.num_experts or indices.shape[1] != self.routing.top_k:
            return out
        self.num_made += 1
        chosen = self.routing.choose(self.index, indices)
        return out if chosen is indices else torch.return_types.topk((scores.gather(1, chosen), chosen))


def find_routers(model: nn.Module, key: str) -> list[nn.Module]:
    """The routers of the model, in the order of its layers; ValueError if it has none, or experts without a known router."""
    name = type(model).__name__
    found: list[nn.Module] = []
    for path, block in model.named_modules():
        if not any(child == "experts" for child, _ in block.named_children()):
            continue
        routers = [child for child in block.children() if is_router(child)]
        if len(routers) != 1:
            raise ValueError(f"{key}: the router of {name}'s {path} ({type(block).__name__}) is not recognised")
        found += routers
    if not found:
        raise ValueError(f"{key}: {name} has no experts; remove the key")
    if len({(router.top_k, router.num_experts) for router in found}) > 1:
        raise ValueError(f"{key}: the routers of {name} differ in the number of their experts, which is not supported")
    return found


def is_router(module: nn.Module) -> bool:
    """Whether the module is a top-k router as transformers writes them."""
    sizes = (getattr(module, "top_k", None), getattr(module, "num_experts", None))
    is_named = re.search(r"Router|Gate$", type(module).__name__) is not None
    return is_named and all(isinstance(size, int) for size in sizes)


def check_balance_loss(config: Any, key: str) -> None:
    """ValueError unless the architecture balances its experts by the loss of `balance_loss`."""
    text = config.get_text_config()
    if not hasattr(text, "router_aux_loss_coef"):
        raise ValueError(f"{key}: {text.model_type} has no load-balance loss in transformers; set 0")


def balance_loss(
    outputs: RouterOutputs, places: Tensor, row: Tensor, num_rows: int, whole: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Load-balance loss of each row (B,), and how often each expert computed its tokens (B, L, E).

    E Σ_e f_e P_e of each row, averaged over the routers: f_e is the share of the row's tokens that expert e computes, and P_e the
    mean of softmax(logits)_e (Fedus et al. 2021, arXiv 2101.03961). It is K if the load is even. A sum over rows does not depend on
    how rows are split into micro-batches, unlike a product of means over a micro-batch; DeepSeek-V3 (arXiv 2412.19437) balances
    sequences in this form too. A row without tokens has 0.

    places, row: (N,) the tokens that count, as indices into T, and their rows. whole: sums over the ranks that share the rows.
    """
    losses = []
    counts = []
    number = whole(torch.zeros(num_rows, device=row.device).index_add(0, row, torch.ones_like(row, dtype=torch.float)))
    divisor = number.clamp_min(1)[:, None]
    for logits, chosen in zip(outputs.logits, outputs.chosen, strict=True):
        probs = logits.index_select(0, places).float().softmax(-1)  # (N, E)
        hits = torch.zeros_like(probs).scatter(1, chosen.index_select(0, places), 1.0)
        zeros = probs.new_zeros(num_rows, probs.shape[1])
        share = whole(zeros.index_add(0, row, probs)) / divisor
        count = whole(zeros.index_add(0, row, hits.detach()))
        losses.append(probs.shape[1] * (count / divisor * share).sum(-1))
        counts.append(count)
    return torch.stack(losses).mean(0), torch.stack(counts, 1)
