"""A training engine of your own: torch's AdamW on the model in one process, one row at a time.

    lockstep ppo actor_rollout_ref.actor.strategy=examples/plugins/training_engine.py:PlainEngine ...

`info` says what the engine can do, for the checks of a config (`lockstep/config/engines.py`).
`lockstep/engines/train/train_engine.py` says what each method must do, and `tests/engines/train/test_contract.py` checks it.
"""

from collections.abc import Collection, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Self

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.config.engines import TrainEngineInfo
from lockstep.engines.train.lr_schedule import build_schedule
from lockstep.engines.train.token_module import open_token_model
from lockstep.engines.train.train_engine import PARTS, EngineModel, LossFn, MicroBatching, TrainEngine
from lockstep.models.export import save_policy, save_scalar_model
from lockstep.models.packing import forward_rows
from lockstep.models.shared_weights import rollout_module, share_weights
from lockstep.models.token_models import ScalarModel
from lockstep.protocol.columns import Batch


class PlainEngine(TrainEngine):
    info = TrainEngineInfo(takes_adapters=False, is_distributed=False)
    dp_rank = 0
    dp_size = 1
    group_rank = 0

    @classmethod
    def open(cls, model: EngineModel, device: torch.device) -> Self:
        return cls(model, device)

    def __init__(self, spec: EngineModel, device: torch.device) -> None:
        self.model, source = open_token_model(spec, device)
        source.fill(self.model.transformer, device)
        self.device = device
        self.clip_grad = spec.clip_grad
        self.is_trained = spec.optim is not None
        self.model.requires_grad_(self.is_trained).eval()
        if spec.optim is not None:
            self.optimizer = torch.optim.AdamW(
                self.model.parameters(), spec.optim.lr, betas=spec.optim.betas, weight_decay=spec.optim.weight_decay
            )
            self.schedule = build_schedule(self.optimizer, spec.optim)

    def _outputs(self, batch: TensorDict, **options: object) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = self.model(forward_rows(batch, self.device, "packed"), **options)
        return outputs

    def forward(self, batch: Batch, micro: MicroBatching, **options: object) -> dict[str, Tensor]:
        with torch.no_grad():
            rows = [self._outputs(batch[i : i + 1].to_tensordict(), **options) for i in range(len(batch))]
        return {name: torch.cat([row[name] for row in rows]).cpu() for name in rows[0]}

    def forward_backward(
        self, batch: Batch, loss_fn: LossFn, micro: MicroBatching, **options: object
    ) -> dict[str, float]:
        totals: dict[str, float] = {}
        for i in range(0, len(batch), micro.group_size):
            rows = batch[i : i + micro.group_size].to_tensordict()  # padded
            loss, metrics = loss_fn(self._outputs(rows, **options), rows.to(self.device))
            loss.backward()
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + float(value.detach())
        return totals

    def optimizer_step(self) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad))
        if norm != norm or norm == float("inf"):
            self.optimizer.zero_grad()
            raise FloatingPointError(f"gradient norm is {norm}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def schedule_step(self) -> None:
        self.schedule.step()

    @property
    def learning_rate(self) -> float:
        return float(self.schedule.get_last_lr()[0])

    def global_sum(self, *values: float) -> tuple[float, ...]:
        return values

    def rollout_module(self) -> PreTrainedModel:
        return rollout_module(self.model.transformer)

    @contextmanager
    def lend_weights(self, module: PreTrainedModel) -> Iterator[None]:
        share_weights(module, self.model.transformer)
        yield

    def adapters_off(self) -> AbstractContextManager[None]:
        raise ValueError("PlainEngine has no adapters")

    def weights(self, *, trained: bool = False) -> Generator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad or not trained:
                yield self.model.hf_name(name), parameter.detach()

    def merged_weights(self) -> Generator[tuple[str, Tensor]]:
        yield from self.weights()

    def weight_shapes(self, *, merged: bool) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(weight.shape)) for name, weight in self.weights(trained=not merged)]

    def save(self, folder: Path, contents: Collection[str] = PARTS) -> None:
        torch.save({"model": self.model.state_dict()}, folder / "model.pt")
        if self.is_trained:
            state = {"optimizer": self.optimizer.state_dict(), "extra": self.schedule.state_dict()}
            torch.save(state, folder / "optimizer.pt")

    def load(self, folder: Path, contents: Collection[str] = PARTS) -> None:
        self.model.load_state_dict(torch.load(folder / "model.pt", weights_only=True)["model"])
        if self.is_trained and "optimizer" in contents:
            state = torch.load(folder / "optimizer.pt", weights_only=True)
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedule.load_state_dict(state["extra"])

    def export(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        save = save_scalar_model if isinstance(self.model, ScalarModel) else save_policy
        save(self.model.transformer, self.weights(), tokenizer, folder / "huggingface")
