r"""Conversations written as one text, as in HH-RLHF: "\n\nHuman: …\n\nAssistant: …"."""

import re

_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def parse_dialogue(text: str) -> list[dict[str, str]] | None:
    """The turns as chat messages, or None if the text is not such a dialogue.

    The last turn is the assistant's; it is empty if it is still to be written.
    """
    before, *turns = _TURN.split(f"\n\n{text.strip()}")
    if before or "Human" not in turns[::2] or turns[-2] != "Assistant":
        return None
    return [{"role": _ROLES[who], "content": said.strip()} for who, said in zip(turns[::2], turns[1::2])]
