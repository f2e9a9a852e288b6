"""Replayed experts and a load-balance loss: what the ranks run, and the same by a naive gate in plain transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn

from lockstep.engines.train.token_engine import TokenEngine
from lockstep.models.router_replay import FREE
from tests.engines.train import cases
from tests.engines.train.cases import CLIP_GRAD, NUM_REAL, OPTIM, Case, Reference, own_rows

LAYERS, TOP_K, EXPERTS = 2, 2, 8
AUX = 0.3
KEY = "actor_rollout_ref.actor.router_replay.mode"


def make_batch(step: int) -> TensorDict:
    """With random experts for most tokens; the first two rows have the same prompt, and the same experts for it."""
    batch = cases.make_batch(step)
    generator = torch.Generator().manual_seed(step)
    num_rows, length = batch["input_ids"].shape
    scores = torch.rand(num_rows, length, LAYERS, EXPERTS, generator=generator)
    routes = scores.argsort(-1)[..., :TOP_K].to(torch.int16)
    routes[torch.rand(num_rows, length, generator=generator) < 0.2] = FREE
    width = batch["responses"].shape[1]
    num_prompt = int(batch["attention_mask"][0, :-width].sum())
    routes[1, :num_prompt] = routes[0, :num_prompt]
    batch["routed_experts"] = routes
    return batch


def build_engine(folder: Path, case: Case) -> TokenEngine:
    return cases.build_engine(folder, case, router_key=KEY)


def loss_and_norm(engine: TokenEngine, case: Case, batch: TensorDict, **options: Any) -> tuple[float, float]:
    rows = own_rows(engine, batch)
    num_tokens, num_rows = engine.global_sum(
        float(rows["response_mask"].sum()), float(rows["response_mask"].any(-1).sum())
    )

    def loss_fn(outputs: dict[str, Tensor], part: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        share = cases.summed_loss(outputs, part) / num_tokens
        if "router_aux_loss" in outputs:
            share = share + AUX * outputs["router_aux_loss"].sum() / num_rows
        return share, {"loss": share}

    engine.onload(optimizer=True, ahead=True)
    metrics = engine.forward_backward(rows, loss_fn, case.micro, **cases.options(case), **options)
    norm = engine.optimizer_step()
    engine.schedule_step()
    engine.offload()
    return metrics["loss"], norm


def train(folder: Path, case: Case, aux: bool = True) -> dict[str, Any]:
    engine = build_engine(folder, case)
    rows = own_rows(engine, make_batch(0))
    options: dict[str, Any] = {"routes": "replay", "router_loss": aux}
    out = engine.forward(rows, case.micro, **cases.options(case), **options)
    outputs = {name: cases.all_rows(engine, values).numpy() for name, values in out.items()}
    steps = [loss_and_norm(engine, case, make_batch(number), **options) for number in range(2)]
    return {"outputs": outputs, "steps": steps, "weights": cases.weights_of(engine)}


def recorded(folder: Path, case: Case) -> np.ndarray:
    """The experts that a forward records, of all rows."""
    engine = build_engine(folder, case)
    out = engine.forward(own_rows(engine, make_batch(0)), case.micro, **cases.options(case), routes="record")
    width = make_batch(0)["input_ids"].shape[1]
    routes = out["routed_experts"]
    routes = F.pad(routes, (0, 0, 0, 0, 0, width - routes.shape[1]), value=FREE)
    return cases.all_rows(engine, routes).numpy()


class NaiveGate(nn.Module):
    """Qwen3-MoE's gate by the formula, token by token, with given experts."""

    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.weight = gate.weight
        self.routes: Tensor | None = None  # (T, K)
        self.chosen: list[list[int]] = []
        self.probs: list[Tensor] = []
        self.differs: list[bool] = []

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        self.chosen, self.probs, self.differs = [], [], []
        weights = []
        for t, row in enumerate(logits):
            probs = torch.exp(row) / torch.exp(row).sum()
            own = sorted(range(EXPERTS), key=lambda e: -float(probs[e].detach()))[:TOP_K]
            given = own if self.routes is None or self.routes[t][0] == FREE else self.routes[t].tolist()
            self.differs.append(set(own) != set(given))
            self.chosen.append(given)
            self.probs.append(probs)
            chosen = torch.stack([probs[e] for e in given])
            weights.append(chosen / chosen.sum())
        return logits, torch.stack(weights), torch.tensor(self.chosen)


class RouteReference(Reference):
    """Row by row, with `NaiveGate` and the load-balance loss as two sums."""

    def __init__(self, folder: Path, aux: bool = True) -> None:
        super().__init__(folder, "policy")
        self.aux = aux
        self.gates = []
        for layer in self.model.model.layers:  # type: ignore[union-attr]
            layer.mlp.gate = NaiveGate(layer.mlp.gate)  # type: ignore[union-attr]
            self.gates.append(layer.mlp.gate)  # type: ignore[union-attr]

    def _row(self, row: TensorDict) -> dict[str, Tensor]:
        num_tokens = int(row["attention_mask"].sum())
        for layer, gate in enumerate(self.gates):
            gate.routes = row["routed_experts"][:num_tokens, layer]
        found = super()._row(row)
        width = row["responses"].shape[0]
        columns = row["response_mask"].nonzero().flatten()
        places = (columns + num_tokens - int(row["attention_mask"][-width:].sum()) - 1).tolist()
        shares = torch.tensor([np.mean([gate.differs[p] for gate in self.gates]) for p in places])
        found["route_mismatch"] = torch.zeros(width).index_put((columns,), shares.float())
        if self.aux:
            found["router_aux_loss"] = torch.stack([balance(gate, places) for gate in self.gates]).mean()
        return found

    def step(self, number: int) -> tuple[float, float]:
        rows = make_batch(number)[:NUM_REAL]
        outputs = self.outputs(rows)
        loss = cases.summed_loss(outputs, rows) / rows["response_mask"].sum()
        if self.aux:
            loss = loss + AUX * outputs["router_aux_loss"].mean()
        for group in self.optimizer.param_groups:
            group["lr"] = OPTIM.lr * (1 - number / OPTIM.total_training_steps)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_GRAD)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach()), float(norm)

    def run(self, num_steps: int = 2) -> dict[str, Any]:
        with torch.no_grad():
            outputs = {name: values.numpy() for name, values in self.outputs(make_batch(0)[:NUM_REAL]).items()}
        steps = [self.step(number) for number in range(num_steps)]
        weights = {name: p.detach().numpy() for name, p in self.model.named_parameters()}
        return {"outputs": outputs, "steps": steps, "weights": weights}


def balance(gate: NaiveGate, places: list[int]) -> Tensor:
    total = torch.zeros(())
    for expert in range(EXPERTS):
        computed = sum(gate.chosen[p].count(expert) for p in places) / len(places)
        total = total + EXPERTS * computed * torch.stack([gate.probs[p][expert] for p in places]).mean()
    return total
