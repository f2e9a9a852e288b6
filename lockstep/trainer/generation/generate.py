"""Generation: the first half of a validation, over the rows of a file, batch by batch.

data ─► prompts ─► [ workers: generate (rollout.*) ─► texts ─► part file ]* ─► output with the responses
"""

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from transformers import PreTrainedTokenizerBase

from lockstep.agents.agents import Agents
from lockstep.config.generation import GenerationConfig, with_own_keys
from lockstep.config.ppo import PPOConfig
from lockstep.data.rl_dataset import PromptDataset
from lockstep.models.processor import hf_processor
from lockstep.models.tokenizer import hf_tokenizer
from lockstep.observability.batch_progress import BatchProgress
from lockstep.protocol import DataProto
from lockstep.rewards.managers.naive import ROLLOUT_COLUMNS
from lockstep.single_controller import ResourcePoolManager, Role, Worker
from lockstep.trainer.generation.generated_rows import GeneratedRows, read_table
from lockstep.trainer.ppo.run_agents import agents_for
from lockstep.trainer.ppo.sampling import generate_for_rows
from lockstep.trainer.ppo.task_runner import device_and_backend
from lockstep.trainer.ppo.validation import prompt_batches, response_texts
from lockstep.trainer.ppo.worker_groups import WorkerGroups
from lockstep.trainer.run.checkpoint import RunLock
from lockstep.trainer.run.errors import RunError, raise_as_run_error
from lockstep.trainer.run.failures import cause_of
from lockstep.trainer.run.inputs import tokenizer_of
from lockstep.trainer.run.interrupt import Interrupt, OnStep
from lockstep.utils.dataset_files import local_data_files
from lockstep.utils.progress import ProgressLog, phase
from lockstep.utils.untrusted import valid_text
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker

logger = logging.getLogger(__name__)

POOL = "global_pool"


class GenerationRunner:
    """Runs a generation, in this process or in the controller process of a Ray job (see `ray_runner.Runner`)."""

    def __init__(self, config: GenerationConfig, output: GeneratedRows) -> None:
        self.config = config
        self.output = output
        self.started: dict[str, Any] = {}
        """Worker processes that were started early, by pool."""
        self.on_end: Callable[[int], None] = lambda exit_code: None
        self.on_step: OnStep | None = None

    def run(self, config: PPOConfig, interrupt: Interrupt | None = None) -> int:
        """Generate and write the output; returns 0. A failure with a known cause is a RunError.

        config: generation's own as that of a validation. interrupt: not used; Ctrl-C stops at once and keeps finished batches.
        """
        with ProgressLog(), ExitStack() as closing:
            try:
                return self._run(config, closing)
            except ValueError as error:
                raise_as_run_error(error, with_own_keys(str(error)))
            except Exception as error:  # unexpected ones are raised again by `cause_of`
                cause = with_own_keys(cause_of(error, config)).rstrip(".")
                raise RunError(f"{cause}; run the same command to go on after the last finished batch") from error

    def _run(self, config: PPOConfig, closing: ExitStack) -> int:
        output = self.output
        with phase("read the data"):
            files = local_data_files(config.data.val_files, "val", "data.path")
            tokenizer = self._tokenizer(config)
            model = self.config.model
            processor = hf_processor(model.path, tokenizer, config.data, model.trust_remote_code, "model.path")
            dataset = PromptDataset(files, tokenizer, config.data, processor, config.data.val_max_samples)
            agents = agents_for(config, tokenizer, dataset)
            if agents is not None:
                closing.callback(agents.close)
            table = read_table(files, [position for position, _ in dataset.rows])
            closing.enter_context(RunLock(output.folder, "data.output_path"))
            output.open()
            finished = output.finished()
        missing = [row for row in range(len(dataset)) if row not in finished]
        if missing:
            if finished:
                logger.info("%d of %d prompts are finished already", len(finished), len(dataset))
            self._generate(config, dataset, missing, tokenizer, agents, closing)
        output.finish(table)
        logger.info("wrote %s: %d prompts, %d responses each", output.output, len(dataset), self.config.data.n_samples)
        self.on_end(0)
        return 0

    def _generate(
        self,
        config: PPOConfig,
        dataset: PromptDataset,
        missing: list[int],
        tokenizer: PreTrainedTokenizerBase,
        agents: Agents | None,
        closing: ExitStack,
    ) -> None:
        logger.info("loading %s", self.config.model.path)
        workers = self._workers(config, agents)
        closing.callback(workers.close)
        with phase("load the model"):
            workers.start(config, num_steps=0)
            workers.wait_ready()
        n, seed = self.config.data.n_samples, self.config.rollout.seed
        responder = workers.responder(tokenizer.pad_token_id, self.config.data.batch_size * n)
        with BatchProgress(len(dataset), done=len(dataset) - len(missing)) as progress:
            for rows, prompts in prompt_batches(dataset, missing, self.config.data.batch_size):
                columns = _columns(generate_for_rows(responder, prompts, rows, n=n, seed=seed), tokenizer)
                per_row = {name: [v[i : i + n] for i in range(0, len(v), n)] for name, v in columns.items()}
                self.output.add(rows, per_row)
                progress.advance(len(rows), sum(columns["response_lengths"]))

    def _workers(self, config: PPOConfig, agents: Agents | None) -> WorkerGroups:
        device, backend = device_and_backend(config, started=self.started)
        spec = {POOL: [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
        pools = ResourcePoolManager(spec, {Role.Rollout: POOL}, backend.pool_class)
        roles: dict[Role, type[Worker]] = {Role.Rollout: ActorRolloutRefWorker}
        return WorkerGroups(roles, pools, device, agents, backend.group_class, backend.class_with_init)

    def _tokenizer(self, config: PPOConfig) -> PreTrainedTokenizerBase:
        model = config.actor_rollout_ref.model
        key, path = tokenizer_of(config)
        return hf_tokenizer(
            path,
            trust_remote_code=model.trust_remote_code,
            custom_chat_template=model.custom_chat_template,
            key=key.removeprefix("actor_rollout_ref."),
        )


def _columns(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Any]]:
    texts, lengths = response_texts(batch, tokenizer)
    columns: dict[str, list[Any]] = {
        "responses": list(map(valid_text, texts)),  # parquet has no lone surrogates
        "response_lengths": lengths,
        "finish_reasons": list(batch.non_tensor_batch["finish_reason"]),
    }
    given = {
        name: batch.non_tensor_batch[key] for key, name in ROLLOUT_COLUMNS.items() if key in batch.non_tensor_batch
    }
    if given:
        samples = (dict(zip(given, values)) for values in zip(*given.values()))
        columns["rollout_infos"] = [json.dumps(sample, default=lambda value: value.tolist()) for sample in samples]
    return columns
