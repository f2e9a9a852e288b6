"""The critic: the value of the state before each response token, and its update."""

from lockstep.config.critic import CriticConfig
from lockstep.config.train_engines import engine_settings
from lockstep.engines.train.audit import UpdateAudit
from lockstep.models.loading import resolve_dtype
from lockstep.protocol import DataProto
from lockstep.protocol.require import require
from lockstep.protocol.tokens import with_images
from lockstep.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from lockstep.utils.checkpoint_folder import checkpoint_folder
from lockstep.workers.losses import critic_loss_fn
from lockstep.workers.model_worker import ModelWorker
from lockstep.workers.updates import MetricMeans, micro_batching, mini_batches, num_mini_batches


class CriticWorker(ModelWorker):
    key = "critic.model"
    kind = "value"
    mesh = "critic"
    config: CriticConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self._start(optim=self.config.optim, clip_grad=self.config.grad_clip)
        dtype = resolve_dtype(engine_settings(self.config).dtype, self.device)
        self._audit = UpdateAudit(self.engine, dtype, self.device, self.config.grad_clip)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("critic"), blocking=False)
    def compute_values(self, data: DataProto) -> DataProto:
        require(data, "input_ids", "attention_mask", "position_ids", "responses", "response_mask")
        config = self.config
        micro = micro_batching(
            "values",
            config.forward_micro_batch_size_per_gpu,
            config.use_dynamic_bsz,
            config.forward_max_token_len_per_gpu,
        )
        self.engine.onload()
        values = self.engine.forward(with_images(data), micro)["values"]
        self.engine.offload()
        return data.outputs({"values": values})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("critic"), blocking=False)
    def update_critic(self, data: DataProto) -> DataProto:
        """Train on a batch laid out by `trainer.ppo.mini_batches.lay_out`."""
        require(data, "input_ids", "responses", "response_mask", "values", "returns", "mini_batch")
        config, engine = self.config, self.engine
        micro = micro_batching(
            "update critic",
            config.ppo_micro_batch_size_per_gpu,
            config.use_dynamic_bsz,
            config.ppo_max_token_len_per_gpu,
        )
        means = MetricMeans()
        audit = self._audit
        engine.onload(optimizer=True, ahead=True)
        audit.begin(data.meta_info.get("audit", {}), num_mini_batches(data))
        for rows, info in mini_batches(data):
            loss_fn = critic_loss_fn(config, info)
            audit.check_split(rows, loss_fn, micro)
            metrics = engine.forward_backward(rows, loss_fn, micro)
            audit.check_loss(metrics, "critic/vf_loss")
            # later the loss can be clipped everywhere
            has_gradient = not len(means) and metrics["critic/vf_loss"] != 0
            metrics["critic/grad_norm"] = audit.optimizer_step(expects_gradient=has_gradient)
            means.add(metrics)
        metrics = means.result() | {"critic/lr": engine.learning_rate}
        engine.schedule_step()
        findings = audit.end()
        engine.offload()
        return DataProto(meta_info={"metrics": metrics, "findings": findings})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str, global_step: int = 0) -> None:
        folder = checkpoint_folder(local_path)
        self.engine.onload(optimizer=True)
        self.engine.save(folder, self.config.checkpoint.save_contents)
        if "hf_model" in self.config.checkpoint.save_contents:
            self.engine.export(folder, self.tokenizer)
        self.engine.offload()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> None:
        self.engine.onload(optimizer=True)
        self.engine.load(checkpoint_folder(local_path), self.config.checkpoint.load_contents)
        self._audit.forget()
        self.engine.offload()
