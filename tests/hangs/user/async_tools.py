"""A tool that waits in its event loop."""

from tests.hangs.plants import hang_there, is_now


async def ask_around(x: int) -> int:
    """Ask for a number.

    Args:
        x: The number.
    """
    if is_now("async tool"):
        await hang_there()
    return 3 * x
