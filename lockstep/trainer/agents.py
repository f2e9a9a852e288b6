"""The agents of a run: built from its config, and checked against the rows before training."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from lockstep.agents.agents import DEFAULT_KEY, Agents
from lockstep.config.ppo import PPOConfig
from lockstep.data.files import FileRow
from lockstep.data.rl_dataset import RLHFDataset, agent_kwargs
from lockstep.models.tokenizer import eos_token_ids
from lockstep.rewards import sandbox
from lockstep.utils.model_path import base_folder, local_model_folder


def agents_for(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, *datasets: Any) -> Agents | None:
    """The loops that the rows ask for; None if all responses are single-turn.

    ValueError if a loop, a tool or an interaction that a row asks for is missing. Prompts are rendered with their tools from
    here on. Rows of datasets of other classes are not read: `multi_turn.enable=true` says that they need agents.
    """
    agents = _make(config, tokenizer)
    is_needed, others = not agents.is_single_turn({}), False
    for dataset in datasets:
        if isinstance(dataset, RLHFDataset):
            for _, row in dataset.rows:
                is_needed |= _is_multi_turn(agents, row)
            if is_needed and agents.tools:
                dataset.use_tools(agents.tools_of)
        else:
            others |= dataset is not None
    enabled = agents.config.multi_turn.enable
    if enabled and not is_needed and not others:
        raise ValueError(
            "actor_rollout_ref.rollout.multi_turn.enable=true, but every row is served by single_turn_agent: add the column "
            f"agent_name to the rows (tool_agent), or set {DEFAULT_KEY}=tool_agent"
        )
    if not (is_needed or (others and enabled)):
        return None
    if not config.data.return_raw_chat:
        raise ValueError("data.return_raw_chat=false: agents read the messages of the prompts; set true")
    return agents


def _make(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> Agents:
    key, path = "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path
    folder = base_folder(local_model_folder(path, key, weights=False), key, weights=False)
    sandbox.configure(config.reward_model.sandbox)  # for tools that run code
    return Agents(
        config.actor_rollout_ref.rollout,
        tokenizer,
        eos_token_ids(tokenizer, folder),
        config.data.apply_chat_template_kwargs,
    )


def _is_multi_turn(agents: Agents, row: FileRow) -> bool:
    columns = row.columns | agent_kwargs(row.columns)
    try:
        agents.check_row(columns)
    except ValueError as error:
        raise ValueError(f"{row.location}: {error}") from error
    return not agents.is_single_turn(columns)
