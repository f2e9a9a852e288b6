"""A dashboard that serves in a thread, and a real headless browser that opens it."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason='needs plotly: pip install "lockstep-rl[dashboard]"')
pytest.importorskip("uvicorn", reason='needs uvicorn: pip install "lockstep-rl[dashboard]"')

from lockstep.observability.dashboard.app import DashboardApp, DashboardServer
from lockstep.observability.dashboard.runs import Runs
from lockstep.utils.local_http import bind

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage")

Serve = Callable[..., str]
OpenPage = Callable[..., Any]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Indexes that a dashboard makes are not left in the user's folder."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@contextmanager
def served(app: DashboardApp) -> Iterator[str]:
    """The URL of a dashboard that is served in a thread."""
    listener = bind("127.0.0.1", 0)
    server = DashboardServer(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.stop()
        thread.join(10)
        listener.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve runs: `url = serve(folder, ...)`."""
    with ExitStack() as closing:
        yield lambda *paths, token=None: closing.enter_context(served(DashboardApp(Runs(paths), token)))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Tests that use it are marked slow."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: make setup")
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed (apt install chromium)")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """`page = open_page(url, width=1200, dark=False)`; the test fails if a page logged an error.

    refused: the browser may note answers that are errors, which the page shows.
    """
    errors: list[str] = []
    with ExitStack() as closing:

        def open_one(url: str, width: int = 1200, dark: bool = False, refused: bool = False) -> Any:
            def note(message: Any) -> None:
                if message.type == "error" and not (refused and message.text.startswith("Failed to load resource")):
                    errors.append(message.text)

            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
            closing.callback(page.close)
            page.on("console", note)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(url)
            return page

        yield open_one
    assert not errors
