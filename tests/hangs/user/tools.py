"""A tool."""

from tests.hangs.plants import hang_here, is_now


def look_up(x: int) -> int:
    """Look a number up.

    Args:
        x: The number.
    """
    if is_now("tool"):
        hang_here()
    return 2 * x
