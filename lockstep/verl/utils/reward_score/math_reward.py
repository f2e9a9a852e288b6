r"""verl.utils.reward_score.math_reward: the last `\boxed{}` against the ground truth, as text in normal form."""

from lockstep.rewards.scorers.latex import normal_form as strip_string
from lockstep.rewards.scorers.math_reward import compute_score, is_equivalent, last_boxed

__all__ = ["compute_score", "is_equiv", "last_boxed_only_string", "remove_boxed", "strip_string"]

BOX, OPEN_BOX = r"\boxed{", r"\boxed "


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Whether two answers are equal in normal form; two missing ones are."""
    return str1 is str2 if str1 is None or str2 is None else is_equivalent(str1, str2)


def last_boxed_only_string(string: str) -> str | None:
    r"""The last `\boxed{...}` of the text, with its braces; None without one."""
    content = last_boxed(string)
    if content is None:
        return None
    return f"{OPEN_BOX}{content}" if OPEN_BOX in string else f"{BOX}{content}}}"


def remove_boxed(s: str) -> str:
    r"""The content of `\boxed{...}` or `\boxed x`; AssertionError for any other text."""
    if s.startswith(OPEN_BOX):
        return s[len(OPEN_BOX) :]
    assert s.startswith(BOX) and s.endswith("}"), f"not a box: {s}"
    return s[len(BOX) : -1]
