"""What the critic and the reward model have in common: one model with its tokenizer, in a training engine."""

from typing import Any, ClassVar, Literal

import torch

from lockstep.config.critic import CriticConfig
from lockstep.config.reward import RewardModelConfig
from lockstep.config.train_engines import engine_settings, ranks_per_sequence
from lockstep.engines.train import EngineModel, create_train_engine
from lockstep.models.loading import model_folder
from lockstep.models.tokenizer import hf_tokenizer
from lockstep.single_controller import Dispatch, Worker, register
from lockstep.utils.distributed import join_process_group
from lockstep.utils.model_path import revision_of
from lockstep.workers.updates import limits_of


class ModelWorker(Worker):
    """key: the dotted key of the model, for messages. kind: what it computes (`EngineModel`). mesh: the name of its ranks."""

    key: ClassVar[str]
    kind: ClassVar[Literal["value", "reward"]]
    mesh: ClassVar[str]
    config: CriticConfig | RewardModelConfig

    def __init__(self, config: CriticConfig | RewardModelConfig, device: str = "cpu") -> None:
        super().__init__()
        self.config = config
        self.device = torch.device(device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fetch_model(self) -> tuple[str, str]:
        """Bring the model to this machine, before collectives with their timeouts; returns its path and revision."""
        return self.config.model.path, revision_of(model_folder(self.config.model, self.key))

    def _start(self, chat_template: str | None = None, **training: Any) -> None:
        """Load tokenizer and model. training: optimizer and gradient clipping of `EngineModel`."""
        config, model = self.config, self.config.model
        join_process_group(self.rank, self.world_size, self.device, config.nccl_timeout)
        self.tokenizer = hf_tokenizer(
            model.tokenizer_path or model.path, model.trust_remote_code, chat_template, f"{self.key}.tokenizer_path"
        )
        ranks = ranks_per_sequence(config)
        spec = EngineModel(
            model, self.key, self.kind, engine_settings(config), sequence_parallel_size=ranks, **training
        )
        self.engine = create_train_engine(config.strategy, spec, self.device)
        self._register_dispatch_collect_info(self.mesh, self.engine.dp_rank, self.engine.group_rank == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def limit_micro_batches(self, sizes: dict[str, int]) -> None:
        """Use at most these sizes from now on, by config key."""
        for limits in limits_of(self.engine):
            limits.set(sizes)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def lowered_micro_batches(self) -> list[tuple[str, int]]:
        """Config keys and sizes that out of memory has lowered since the last call, in order."""
        return [lowered for limits in limits_of(self.engine) for lowered in limits.take()]
