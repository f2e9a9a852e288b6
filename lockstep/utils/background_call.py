"""One call in a thread, whose end somebody waits for."""

import threading
from collections.abc import Callable


class BackgroundCall:
    """Runs `call` at once, in a thread that does not keep the process alive."""

    def __init__(self, call: Callable[[], None], name: str) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait for its end; raises its exception, once. TimeoutError if it takes longer than `timeout_s`."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"not complete after {timeout_s:g} s")
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001 - raised by `finish`
            self._error = error
