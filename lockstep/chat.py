"""`lockstep chat RUN`: talk to a checkpoint or any other model, in the terminal or over a pipe.

> question ─► messages so far ─► chat template ─► rollout engine ─► answer, as it is generated
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.observability.console import LogHandler
from lockstep.policy import Policy
from lockstep.utils.model_path import local_model_folder
from lockstep.utils.untrusted import printable

if TYPE_CHECKING:
    from lockstep.data.images import Picture

HELP = """\
/reset         forget the conversation
/image PATH    show an image with the next question; several can be added
/system TEXT   set the system prompt and forget the conversation; without TEXT remove it
/quit          end (also Ctrl-D)
Ctrl-C         stop an answer
"""


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", handlers=[LogHandler()])
    try:
        if options.max_tokens < 1:
            raise ValueError(f"--max-tokens {options.max_tokens}: must be 1 or more")
        folder = local_model_folder(options.model, "RUN")
        sampling = {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
        conversation = Conversation(Policy(folder), options.system, options.max_tokens, options.seed, sampling)
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            sys.stderr.write(f"loading {folder}\n")
        conversation.load()
        return _loop(conversation, is_terminal)
    except ValueError as error:
        sys.stderr.write(f"lockstep chat: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


class Conversation:
    """The messages so far. max_tokens: of one answer. sampling: see `Policy.generate`."""

    def __init__(
        self, policy: Policy, system: str | None, max_tokens: int, seed: int, sampling: dict[str, float]
    ) -> None:
        self.policy, self.system, self.max_tokens, self.seed, self.sampling = policy, system, max_tokens, seed, sampling
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        self.images: list[Picture] = []

    def load(self) -> None:
        """Load the model; ValueError if it cannot chat or the settings are invalid."""
        if self.policy.num_tokens([*self.messages, {"role": "user", "content": "Hello"}]) == 0:
            raise ValueError(f"{self.policy.path}: the chat template gives no tokens")
        for _ in self.policy.stream("Hello", max_tokens=1, seed=0, **self.sampling):
            pass

    def answer(self, question: str) -> None:
        """Write the answer to stdout as it is generated, and add both to the conversation."""
        content: str | list[dict[str, Any]] = question
        if self.images:
            parts: list[dict[str, Any]] = [{"type": "image", "image": picture.rgb} for picture in self.images]
            content = [*parts, {"type": "text", "text": question}]
        messages = [*self.messages, {"role": "user", "content": content}]
        max_tokens = self.max_tokens
        if (positions := self.policy.max_positions) is not None:
            max_tokens = min(max_tokens, positions - self.policy.num_tokens(messages))
        if max_tokens < 1:
            sys.stderr.write(
                f"the conversation is longer than the model's {positions} positions; /reset begins a new one\n"
            )
            return
        self.images = []
        pieces: list[str] = []
        with suppress(KeyboardInterrupt):
            for part in self.policy.stream(messages, max_tokens=max_tokens, seed=self.seed, **self.sampling):
                pieces.append(part)
                sys.stdout.write(_printable(part))
                sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        self.seed += 1
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]

    def show(self, path: str) -> None:
        """Add an image to the next question; ValueError if it cannot be read or the model reads none."""
        from lockstep.data.images import read_image

        picture = read_image(Path(path))
        self.policy.num_tokens([{"role": "user", "content": [{"type": "image", "image": picture.rgb}]}])
        self.images.append(picture)


def _printable(text: str) -> str:
    """Model output may contain terminal escapes, and characters that the stream cannot encode."""
    encoding = sys.stdout.encoding or "utf-8"
    return printable(text).encode(encoding, "replace").decode(encoding)


def _loop(conversation: Conversation, is_terminal: bool) -> int:
    """Answer the lines of stdin until it ends or one is /quit."""
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 (input() edits lines with it)
        sys.stderr.write("/help lists the commands\n")
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            return 0
        command, _, text = line.partition(" ")
        if command == "/quit":
            return 0
        if command == "/reset":
            conversation.reset()
        elif command == "/system":
            conversation.system = text.strip() or None
            conversation.reset()
        elif command == "/image":
            try:
                conversation.show(text.strip())
            except ValueError as error:
                sys.stderr.write(f"{printable(text)}: {error}\n")
        elif command.startswith("/"):
            sys.stderr.write(HELP if command == "/help" else f"unknown command {command}\n{HELP}")
        elif line:
            conversation.answer(line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep chat", description="Talk to a checkpoint or any other model.", epilog=HELP
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "model",
        metavar="RUN",
        help="a run's folder (its newest checkpoint), a global_step_N folder, or what model.path takes",
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy; default: %(default)s")
    parser.add_argument("--top-p", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument("--top-k", type=int, default=-1, help="default: %(default)s, all tokens")
    parser.add_argument("--max-tokens", type=int, default=512, help="of one answer; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the first answer; default: %(default)s")
    return parser
