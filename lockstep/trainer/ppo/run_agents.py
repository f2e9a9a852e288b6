"""The agents of a run: built from its config, and checked against the rows before training."""

import functools
import logging
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from transformers import PreTrainedTokenizerBase

from lockstep.agents.agents import DEFAULT_KEY, Agents
from lockstep.agents.renderer import QUESTION
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.data import ImageDataConfig
from lockstep.config.ensemble import reward_parts
from lockstep.config.placement import controller_of
from lockstep.config.ppo import PPOConfig
from lockstep.data.files import FileRow
from lockstep.data.image_prompts import has_videos
from lockstep.data.rl_dataset import RLHFDataset, agent_kwargs
from lockstep.single_controller.message_process import ChildProcess, MessageProcess
from lockstep.trainer.ppo.agent_rollout import AGENT_COLUMNS
from lockstep.trainer.run.inputs import tokenizer_arguments
from lockstep.workers.agent_client import AgentClient
from lockstep.workers.agent_worker import KEY as WORKERS_KEY, NAME, AgentSetup, AgentWorker

logger = logging.getLogger(__name__)


def agents_for(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, *datasets: Any) -> Agents | None:
    """The loops that the rows ask for; None if all responses are single-turn.

    ValueError if a loop, a tool or an interaction that a row asks for is missing. Prompts are rendered with their tools from
    here on. Rows of datasets of other classes are not read: `multi_turn.enable=true` says that they need agents.
    """
    agents = agent_setup(config).make_agents(tokenizer)
    is_needed = False
    try:
        is_needed = _prepare(agents, config, datasets)
    finally:
        if not is_needed:
            agents.close()
    return agents if is_needed else None


def _prepare(agents: Agents, config: PPOConfig, datasets: tuple[Any, ...]) -> bool:
    """Check the rows and render prompts with tools; False if all responses are single-turn."""
    is_needed, uses_tools, others = not agents.is_single_turn({}), False, False
    for dataset in datasets:
        if isinstance(dataset, RLHFDataset):
            for _, row in dataset.rows:
                is_multi_turn = _is_multi_turn(agents, row)
                sees = dataset.images is not None
                if is_multi_turn and sees and has_videos(row.columns[dataset.config.prompt_key]):
                    raise ValueError(
                        f"{row.location} has videos, which agents do not read; remove its agent_name (or "
                        "actor_rollout_ref.rollout.agent.default_agent_loop), or the videos"
                    )
                is_needed |= is_multi_turn
                uses_tools |= agents.tools_of(row.columns) is not None
            if is_needed and agents.tools:
                dataset.use_tools(agents.tools_of)
        else:
            others |= dataset is not None
    enabled = agents.config.multi_turn.enable
    if not is_needed and not others:
        _report_unused(agents.config)
    if uses_tools and not _renders_tools(agents):
        logger.warning(
            "the model's chat template does not render tools: prompts do not mention %s, and a model that was not trained to call "
            "them will not; use a model whose template does, or describe them in the rows' system messages",
            ", ".join(agents.tools),
        )
    if not (is_needed or (others and enabled)):
        return False
    _check_columns([row for dataset in datasets if isinstance(dataset, RLHFDataset) for _, row in dataset.rows], config)
    if not config.data.return_raw_chat:
        raise ValueError("data.return_raw_chat=false: agents read the messages of the prompts; set true")
    if (agents.tools or agents.interactions) and not _reads_turn_rewards(config, datasets):
        logger.warning(
            "tool rewards and interaction scores are not part of the reward: the scorers of these data sources ignore them; add "
            "them in a reward function (extra_info has tool_rewards and turn_scores) or by reward_model.ensemble (docs/agents.md)"
        )
    return True


def _reads_turn_rewards(config: PPOConfig, datasets: Sequence[Any]) -> bool:
    """Whether the reward may contain what tools and interactions give: by the user's code, an ensemble's part, or the scorer."""
    reward, custom = config.reward_model, config.custom_reward_function
    sources = {part.source for part in reward_parts(reward.ensemble).values()}
    own_code = custom.path is not None or any(":" in name for name in (reward.reward_manager, *sources))
    if own_code or sources & {"turn_rewards", "rollout_reward_scores"} or "scorer" in custom.reward_kwargs:
        return True
    rows = [row.columns for dataset in datasets if isinstance(dataset, RLHFDataset) for _, row in dataset.rows]
    names = {str(row.get(config.data.reward_fn_key)).split("/")[0] for row in rows}
    return names <= {"environment", "verifiers"}


def _check_columns(rows: Sequence[FileRow], config: PPOConfig) -> None:
    """ValueError if the data has a column that agents add."""
    names = [name for name in AGENT_COLUMNS if name != config.data.prompt_key]
    for row in rows:
        if taken := [name for name in names if name in row.columns]:
            raise ValueError(
                f"{row.location}: the column {taken[0]!r} has the name of one that agents add to the rows; rename or remove it "
                f"(columns of agents: {', '.join(AGENT_COLUMNS)})"
            )


def _report_unused(rollout: RolloutConfig) -> None:
    """ValueError if `multi_turn.enable` asks for conversations that no row has; a warning about other settings of them."""
    key, config = "actor_rollout_ref.rollout.multi_turn", rollout.multi_turn
    reason = (
        "every row is served by single_turn_agent: add the column agent_name to the rows (tool_agent), or set "
        f"{DEFAULT_KEY}=tool_agent"
    )
    if config.enable:
        raise ValueError(f"{key}.enable=true, but {reason}")
    changed = [
        f"{key}.{f.name}={getattr(config, f.name)}" for f in fields(config) if getattr(config, f.name) != f.default
    ]
    changed += [f"{WORKERS_KEY}={rollout.agent.num_workers}"] if rollout.agent.num_workers else []
    if changed:
        listed = ", ".join(changed)
        logger.warning("%s %s no effect: %s", listed, "has" if len(changed) == 1 else "have", reason)


def agent_setup(config: PPOConfig) -> AgentSetup:
    return AgentSetup(
        rollout=config.actor_rollout_ref.rollout,
        tokenizer=tokenizer_arguments(config),
        model=config.actor_rollout_ref.model.path,
        template_kwargs=config.data.apply_chat_template_kwargs,
        sandbox=config.reward_model.sandbox,
        data_files=[*config.data.train_files, *config.data.val_files],
        images=ImageDataConfig(min_pixels=config.data.min_pixels, max_pixels=config.data.max_pixels),
    )


def start_agent_workers(config: PPOConfig) -> AgentClient:
    """`rollout.agent.num_workers` processes, on Ray spread over its machines; `wait_ready` waits for them."""
    setup, num_workers = agent_setup(config), config.actor_rollout_ref.rollout.agent.num_workers

    def start(number: int) -> MessageProcess:
        name = f"{NAME} {number} of {num_workers}"
        make_worker = functools.partial(AgentWorker, name, setup)
        if controller_of(config) == "local":
            return ChildProcess(name, make_worker)
        from lockstep.single_controller.ray_backend.message_process import RayProcess

        return RayProcess(name, number, make_worker)

    return AgentClient(setup.rollout, start)


def _renders_tools(agents: Agents) -> bool:
    """Whether prompts mention the tools. A template that refers to `tools` but renders nothing does so on purpose."""
    renderer = agents.renderer
    is_rendered = renderer.text([QUESTION], agents.schemas) != renderer.text([QUESTION])
    return is_rendered or "tools" in str(agents.tokenizer.chat_template)


def _is_multi_turn(agents: Agents, row: FileRow) -> bool:
    columns = row.columns | agent_kwargs(row.columns)
    try:
        agents.check_row(columns)
    except ValueError as error:
        raise ValueError(f"{row.location}: {error}") from error
    return not agents.is_single_turn(columns)
