"""The turns of one session: what the policy was given and what it sampled, token by token.

    messages ─ prompt_for ─► prompt ids ─ generate ─► sampled ids ─ add ─► Turn
                  ▲                                                         │
                  └── tokens of the turn that the messages continue ◄───────┘

A prompt that continues a recorded turn has its very tokens, followed by the template's bridge: sampled text is never tokenized
again. If the client rewrote the history, the prompt is rendered from the messages, and a new branch begins. Special tokens in
messages and tools are broken up, as in every conversation; only the text of a plain completion may have them.
"""

import hashlib
import json
import logging
from collections.abc import Collection, Sequence, Set as AbstractSet
from dataclasses import dataclass
from functools import reduce
from typing import Any

from lockstep.agents.renderer import Message, Renderer
from lockstep.agents.trajectory import Trajectory
from lockstep.protocol.generation import Completion
from lockstep.protocol.images import ImageInputs
from lockstep.utils.untrusted import valid_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Turn:
    """One prompt and its sampled answer.

    parent:     the turn that the prompt continues; None at the start of a branch.
    added_ids:  the prompt's tokens after those of the parent; the whole prompt without one.
    added_images: those whose placeholders are among them.
    messages:   the conversation with the answer.
    completion: what was sampled. Its stop_reason is "abort" if the client went away in the middle of a stream; the tokens are
                those that it was sent.
    trainable:  false if the client asked for another distribution than the rollout's.
    """

    parent: "Turn | None"
    added_ids: list[int]
    messages: list[Message]
    completion: Completion
    trainable: bool
    added_images: ImageInputs | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.completion.token_ids

    @property
    def path(self) -> "list[Turn]":
        """The turns from the start of the branch to this one."""
        turns = []
        turn = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent  # type: ignore[assignment]
        return turns[::-1]

    @property
    def all_ids(self) -> list[int]:
        """The prompt and the sampled tokens."""
        return [token for turn in self.path for part in (turn.added_ids, turn.token_ids) for token in part]

    @property
    def images(self) -> ImageInputs | None:
        """Those of the prompt."""
        return _joined([turn.added_images for turn in self.path])

    @property
    def prompt_ids(self) -> list[int]:
        ids = self.all_ids
        return ids[: len(ids) - len(self.token_ids)]


@dataclass(frozen=True)
class Prompt:
    """ids: what the policy is given. key: identifies the conversation so far, or the text of a plain completion.
    added_images: those that the parent does not have."""

    ids: list[int]
    parent: Turn | None
    key: "hashlib.blake2b | str | None"
    messages: Sequence[Message] = ()
    added_images: ImageInputs | None = None

    @property
    def images(self) -> ImageInputs | None:
        """All images whose placeholders are in `ids`."""
        return _joined([None if self.parent is None else self.parent.images, self.added_images])


class SessionRecorder:
    """Append-only. Several answers to one prompt and concurrent conversations are branches of a tree.

    trusted: contents of messages whose special tokens stay, such as those of the row.
    """

    def __init__(self, renderer: Renderer, trusted: Collection[str] = ()) -> None:
        self.renderer = renderer
        self.trusted = trusted
        self.turns: list[Turn] = []
        self._conversations: dict[bytes, Turn] = {}
        self._texts: dict[str, Turn] = {}

    def prompt_for(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), max_tokens: int | None = None
    ) -> Prompt:
        """The prompt of a conversation; it continues the recorded turn that covers most of the messages.

        max_tokens: TooLongError if the prompt has many more; it is not tokenized then.
        """
        plain = self.renderer.plain_messages(messages, max_tokens=max_tokens, trusted=self.trusted)
        plain_tools = self.renderer.as_plain(tools)
        keys = [hashlib.blake2b(_json(list(tools)), digest_size=16)]
        for message in messages:
            keys.append(_extended(keys[-1], message))
        for at in range(len(messages) - 1, -1, -1):
            turn = self._conversations.get(keys[at + 1].digest()) if messages[at]["role"] == "assistant" else None
            if turn is not None and turn.token_ids:
                before, new = plain[: at + 1], plain[at + 1 :]
                bridge = self.renderer.bridge(before, new, turn.token_ids[-1], plain_tools, max_tokens)
                if bridge is not None:
                    return Prompt(turn.all_ids + bridge.ids, turn, keys[-1], [*turn.messages, *new], bridge.images)
                logger.warning(
                    "the chat template does not show where an answer ends: the next turn begins a new branch"
                )
                break
        ids, images = self.renderer.ids_and_images(plain, plain_tools, max_tokens)
        return Prompt(ids, None, keys[-1], plain, images)

    def prompt_for_ids(self, ids: list[int], images: ImageInputs | None = None) -> Prompt:
        """A prompt of tokens; without images, it continues the longest recorded turn that it begins with."""
        if images is not None:
            return Prompt(ids, None, None, added_images=images)
        turns = [turn for turn in self.turns if (done := turn.all_ids) and ids[: len(done)] == done]
        return Prompt(ids, max(turns, key=lambda turn: len(turn.all_ids), default=None), None)

    def prompt_for_text(self, text: str, max_tokens: int | None = None) -> Prompt:
        """A plain text; if it begins with a recorded text, with the tokens of that. max_tokens: see `prompt_for`."""
        text = valid_text(text)
        done = max((known for known in list(self._texts) if text.startswith(known)), key=len, default=None)
        if done is None:
            ids = self.renderer.encode(text, max_tokens)
            return Prompt(ids, None, text, [{"role": "user", "content": text}])
        turn = self._texts[done]
        new = text[len(done) :]
        messages = [*turn.messages, {"role": "user", "content": new}]
        return Prompt(turn.all_ids + self.renderer.encode(new, max_tokens), turn, text, messages)

    def add(self, prompt: Prompt, answer: Message | str, completion: Completion, *, trainable: bool) -> Turn:
        """Record a turn. answer: as the client was sent it, a message or the text of a completion."""
        message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        start = 0 if prompt.parent is None else len(prompt.parent.all_ids)
        messages = [*prompt.messages, message]
        turn = Turn(prompt.parent, prompt.ids[start:], messages, completion, trainable, prompt.added_images)
        self.turns.append(turn)
        if isinstance(prompt.key, str):
            self._texts[f"{prompt.key}{answer}"] = turn
        elif prompt.key is not None and isinstance(answer, dict):
            self._conversations[_extended(prompt.key, answer).digest()] = turn
        return turn

    @property
    def num_untrainable(self) -> int:
        """Turns that were not sampled from the rollout's distribution."""
        return sum(not turn.trainable for turn in self.turns)

    def leaves(self) -> list[Turn]:
        """The last turn of each branch: those that no other turn continues."""
        continued = {turn.parent for turn in self.turns}
        return [turn for turn in self.turns if turn not in continued]

    def branches(self) -> list[Trajectory]:
        """The sequences for the loss. A token that several branches share is context in all but the first of them."""
        return trajectories_of(self.leaves())


def trajectories_of(leaves: Sequence[Turn], *, max_prompt: int | None = None) -> list[Trajectory]:
    """The branches that end with these turns; a token that several share is context in all but the first of them."""
    counted: set[Turn] = set()
    found = []
    for leaf in leaves:
        found.append(trajectory_of(leaf, counted, max_prompt=max_prompt))
        counted.update(leaf.path)
    return found


def trajectory_of(leaf: Turn, counted: AbstractSet[Turn] = frozenset(), *, max_prompt: int | None = None) -> Trajectory:
    """The branch that ends with a turn.

    counted:    turns that another trajectory has as sampled tokens.
    max_prompt: tokens of the prompt; the rest of a longer one is context of the response.
    """
    first, *others = leaf.path
    trajectory = Trajectory(first.added_ids[:max_prompt], images=first.added_images)
    trajectory.add_context(first.added_ids[len(trajectory.prompt_ids) :])
    for turn in (first, *others):
        if turn is not first:
            trajectory.add_context(turn.added_ids, turn.added_images)
        if turn.trainable and turn not in counted:
            trajectory.add_sampled(turn.completion)
        else:
            trajectory.add_context(turn.token_ids)
    return trajectory


def _joined(parts: Sequence[ImageInputs | None]) -> ImageInputs | None:
    found = [images for images in parts if images is not None]
    return reduce(ImageInputs.then, found) if found else None


def _extended(key: "hashlib.blake2b", message: Message) -> "hashlib.blake2b":
    """The key of the conversation with one more message. Clients often trim answers, and drop or rename ids of calls."""
    content = message.get("content") or ""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    if message["role"] == "assistant" and isinstance(content, str):
        content = content.strip()
    longer = key.copy()
    longer.update(_json([message["role"], content, calls]))
    return longer


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
