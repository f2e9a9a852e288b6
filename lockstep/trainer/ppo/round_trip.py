"""The audit `token_round_trip`: the tokens that are trained on are those that the conversation's messages stand for.

    prompt          = the row's messages, rendered
    sampled tokens  ─► decoded, hold the text of the assistant's message
    context         = what the chat template puts between two turns (`Renderer.bridge`)
    history         is rendered alike, whatever follows it

A few conversations per step are checked, so the cost does not grow with the batch.
"""

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from lockstep.agents.agents import Agents
from lockstep.agents.loops import ProgramAgent, ReactAgent
from lockstep.agents.renderer import Message, Renderer
from lockstep.config.ppo import PPOConfig
from lockstep.data.rl_dataset import RLHFDataset
from lockstep.protocol import DataProto
from lockstep.protocol.images import IMAGES
from lockstep.protocol.tokens import read, token_rows
from lockstep.utils.audit import Audits

logger = logging.getLogger(__name__)

NUM_ROWS = 4
"""Conversations per step."""
MAX_TOKENS = 32_768
"""Longer ones are not checked."""
FOLLOWED = "actor_rollout_ref.rollout.multi_turn.use_inference_chat_template"
Row = Mapping[str, Any]
"""The columns of one conversation."""


class RoundTrip:
    """agents: None if all responses are single-turn."""

    def __init__(self, config: PPOConfig, tokenizer: Any, agents: Agents | None, dataset: Any) -> None:
        self.agents = agents
        self.follows_template = config.actor_rollout_ref.rollout.multi_turn.use_inference_chat_template
        self.max_prompt = config.data.max_prompt_length
        # datasets of other classes may render prompts in their own way
        self.renders_prompts = type(dataset) is RLHFDataset
        self._tokenizer = tokenizer
        self._template_kwargs = config.data.apply_chat_template_kwargs
        self._renderer: Renderer | None = None

    @property
    def renderer(self) -> Renderer:
        if self.agents is not None:
            return self.agents.renderer
        if self._renderer is None:
            self._renderer = Renderer(self._tokenizer, (), self._template_kwargs)
        return self._renderer

    def check(self, audits: Audits, batch: DataProto, step: int) -> None:
        """The scored samples of a step, one row per conversation."""
        numbers = sorted(random.Random(step).sample(range(len(batch)), min(NUM_ROWS, len(batch))))
        names = ["prompts", "responses", "attention_mask", "response_mask"]
        rows = batch.select(names).select_idxs(numbers)
        prompts, responses = (token_rows(rows.tensors, name) for name in ("prompts", "responses"))
        masks = read(rows.tensors, "response_mask").bool()
        for number, row in enumerate(numbers):
            columns = {name: values[number] for name, values in rows.non_tensor_batch.items()}
            prompt, response = prompts[number].tolist(), responses[number].tolist()
            if len(prompt) + len(response) > MAX_TOKENS:
                continue
            try:
                problem = self._of_prompt(columns, prompt) or self._of_turns(
                    columns, response, masks[number, : len(response)].tolist()
                )
            except Exception as error:  # noqa: BLE001 - a template may fail on messages of a program, tool or user
                logger.debug("row %d could not be checked: %s: %s", row, type(error).__name__, error)
                continue
            if problem is not None:
                audits.found("token_round_trip", f"row {row} of the batch: {problem}")
                return

    def _of_prompt(self, columns: Row, prompt: list[int]) -> str | None:
        expected = columns.get("raw_prompt_ids")
        if expected is None:
            return None
        if list(expected) != prompt:
            # environments and programs may replace the prompt of their row
            return (
                None
                if "messages" in columns
                else _differing("the prompt has other tokens than its row", expected, prompt)
            )
        messages = columns.get("raw_prompt")
        if columns.get(IMAGES) is not None:  # the processor expands their tokens
            return None
        is_cut = len(prompt) >= self.max_prompt
        if not self.renders_prompts or not messages or is_cut or any(m.get("tool_calls") for m in messages):
            return None
        rendered = self.renderer.ids(messages, self._tools_of(columns))
        if rendered == prompt:
            return None
        return _differing("the prompt's messages render to other tokens than those of the prompt", rendered, prompt)

    def _of_turns(self, columns: Row, response: list[int], mask: list[bool]) -> str | None:
        """Of the last trajectory of a conversation whose history was never rewritten."""
        new = columns.get("messages")
        if not new or columns.get("trajectory_breaks") or not any(mask) or self.agents is None:
            return None
        history: list[Message] = [*(columns.get("raw_prompt") or ())]
        turns = list(_turns(response, mask))
        places = [place for place, message in enumerate(new) if message["role"] == "assistant"]
        if len(places) != len(turns) or places[0] != 0:  # a turn in two parts, or a prompt that was replaced
            return None
        # recorded conversations may have been rendered with other tools, which the batch does not have
        is_own = not isinstance(self.agents.loop_of(columns), ProgramAgent | ReactAgent)
        tools = self._tools_of(columns)
        for number, ((sampled, context), place) in enumerate(zip(turns, places), start=1):
            end = places[number] if number < len(places) else len(new)
            message, following = new[place], list(new[place + 1 : end])
            history = [*history, message]
            if (problem := self._of_text(sampled, message)) is not None:
                return f"turn {number}: {problem}"
            if is_own and following and context:
                bridge = self.renderer.bridge(history, following, sampled[-1], tools)
                if bridge is not None and bridge.ids != context:
                    what = f"the tokens after turn {number} are not those that the chat template gives for its messages"
                    return _differing(what, bridge.ids, context)
                if not self.follows_template and self.renderer.is_rewritten(history, following, tools):
                    return (
                        f"the chat template renders turn {number} or what is before it differently once a "
                        f"{following[0]['role']} message follows: the policy is trained on a history that it does not get from "
                        f"the template; set {FOLLOWED}=true to train on that one"
                    )
            history = [*history, *following]
        return None

    def _of_text(self, sampled: list[int], message: Message) -> str | None:
        content = message.get("content")
        if not isinstance(content, str) or not content.strip():
            return None
        decoded = [self.renderer.tokenizer.decode(sampled, skip_special_tokens=skip) for skip in (False, True)]
        if any(_plain(content) in _plain(text) for text in decoded):
            return None
        return f"its message is {_short(content)}, but its tokens decode to {_short(decoded[1])}"

    def _tools_of(self, columns: Row) -> Sequence[Mapping[str, Any]] | None:
        return None if self.agents is None else self.agents.tools_of(columns)


def _turns(response: list[int], mask: list[bool]) -> Iterator[tuple[list[int], list[int]]]:
    """(sampled tokens, context after them) of each turn."""
    parts = [(kind, [token for _, token in group]) for kind, group in groupby(zip(mask, response), key=lambda e: e[0])]
    for number, (is_sampled, tokens) in enumerate(parts):
        if is_sampled:
            yield tokens, parts[number + 1][1] if number + 1 < len(parts) else []


def _differing(what: str, expected: Sequence[int], found: Sequence[int]) -> str:
    place = next((i for i, (a, b) in enumerate(zip(expected, found)) if a != b), min(len(expected), len(found)))
    return (
        f"{what}: {len(found)} tokens instead of {len(expected)}, the first difference at {place} "
        f"({list(found[place : place + 4])} instead of {list(expected[place : place + 4])})"
    )


def _plain(text: str) -> str:
    return " ".join(text.split())


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
