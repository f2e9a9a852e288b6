"""Every panel against a run while it trains, and a name for each of its controls."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.observability.dashboard.conftest import OpenPage, Serve

PANELS = {
    "Health": "#health .small-chart .main-svg",
    "Curves": "#curves .js-plotly-plot",
    "Rollouts": "#rollouts .opener",
    "Time and memory": "#time .timeline .span",
    "Compare": "#compare select",
    "Talk": "#talk",
}
"""The title of a tab, and what its panel has once it is drawn."""

UNNAMED = """() => [...document.querySelectorAll("button, select, input, textarea, a[href]")]
    .filter((control) => control.checkVisibility())
    .filter((control) => !(control.getAttribute("aria-label") || control.title || control.textContent.trim()
        || [...(control.labels || [])].some((label) => label.textContent.trim())))
    .map((control) => control.outerHTML)"""
"""Controls without a name for screen readers; the options of a select are not its name."""


def look_at_every_panel(page: Any) -> None:
    for title, drawn in PANELS.items():
        page.get_by_role("navigation").get_by_role("link", name=title).click()
        page.wait_for_selector(drawn, timeout=60_000)
        assert page.evaluate(UNNAMED) == [], title
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), title
    page.get_by_role("link", name="Rollouts").click()
    page.locator("#rollouts .opener").first.click()
    page.get_by_role("link", name="Open conversation").first.click()
    page.wait_for_selector("#conversation .token", timeout=60_000)
    assert page.evaluate(UNNAMED) == []
    page.go_back()
    page.wait_for_selector("#rollouts article", timeout=60_000)


@pytest.mark.slow
def test_every_panel_while_a_run_trains(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    demo = tmp_path / "demo"
    command = [
        sys.executable,
        "-m",
        "lockstep.cli",
        "demo",
        "--out",
        str(demo),
        "--steps",
        "500",
        "--warmup-steps",
        "5",
    ]
    training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not (demo / "rollouts" / "2.jsonl").exists():
            assert training.poll() is None
            time.sleep(0.1)
        url = serve(tmp_path)
        for width, dark in ((1300, False), (380, True)):
            look_at_every_panel(open_page(url, width, dark))
        assert training.poll() is None
    finally:
        training.kill()
        training.wait()
