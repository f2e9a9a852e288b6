"""The server: routes, access, and runs that come and go."""

import json
import re
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from lockstep.observability.dashboard.app import STATIC
from tests.observability.dashboard.conftest import OpenPage, Serve
from tests.observability.dashboard.made_runs import make_run


def get(url: str, **headers: str) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as response:
        return json.loads(response.read())


def status_of(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_runs_and_their_curves(serve: Serve, tmp_path: Path) -> None:
    make_run(tmp_path / "first", steps=5)
    make_run(tmp_path / "group" / "second", steps=3)
    url = serve(tmp_path)
    runs = get(f"{url}/api/runs")
    assert [run["name"] for run in runs] == ["group/second", "first"]  # newest first
    assert {run["state"] for run in runs} == {"unknown"} and runs[1]["reward"] == pytest.approx(0.9, abs=0.1)
    curve = get(f"{url}/api/curve?run=first&metric=critic/score/max")
    assert curve["step"] == [1, 2, 3, 4, 5] and curve["value"] == [1.0] * 5


def test_a_run_that_is_deleted_is_an_answer(serve: Serve, tmp_path: Path) -> None:
    run = make_run(tmp_path / "first", steps=2)
    url = serve(run)
    assert get(f"{url}/api/runs")
    shutil.rmtree(run)
    assert status_of(f"{url}/api/metrics?run=first") in (200, 404)


def test_access(serve: Serve, tmp_path: Path) -> None:
    make_run(tmp_path / "first", steps=2)
    url = serve(tmp_path)
    assert status_of(f"{url}/api/runs", Host="evil.example") == 403
    assert status_of(f"{url}/api/runs", Origin="http://evil.example") == 403
    assert status_of(f"{url}/static/../app.py") == 404
    guarded = serve(tmp_path, token="secret")
    assert status_of(f"{guarded}/api/runs") == 403
    assert status_of(f"{guarded}/api/runs?token=secret") == 200


@pytest.mark.parametrize("file", sorted(STATIC.rglob("*.css")), ids=lambda file: file.name)
def test_every_block_of_a_style_is_closed(file: Path) -> None:
    text = re.sub(r"/\*.*?\*/", "", file.read_text(), flags=re.S)
    depth = 0
    for brace in re.findall(r"[{}]", text):
        depth += 1 if brace == "{" else -1
        assert depth >= 0
    assert depth == 0
    assert f'href="{file.relative_to(STATIC.parent)}"' in (STATIC / "index.html").read_text()


@pytest.mark.slow
def test_the_page_opens(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    make_run(tmp_path / "first", steps=5)
    page = open_page(serve(tmp_path))
    page.wait_for_selector(".panel .js-plotly-plot")
    assert page.title() == "Health: first – Lockstep"


@pytest.mark.slow
def test_a_run_that_does_not_exist_is_said(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    make_run(tmp_path / "first", steps=2)
    page = open_page(f"{serve(tmp_path)}/#/curves?run=other")
    page.get_by_text("There is no run “other”").wait_for()
    page.get_by_label("Run").select_option("first")
    page.wait_for_selector("#curves .js-plotly-plot")


@pytest.mark.slow
def test_a_new_run_leaves_the_panel_as_it_is(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    make_run(tmp_path / "first", steps=2)
    page = open_page(f"{serve(tmp_path)}/#/curves?run=first")
    page.wait_for_selector("#curves .js-plotly-plot")
    page.evaluate("document.querySelector('#curves').dataset.kept = 'yes'")
    make_run(tmp_path / "second", steps=2)
    page.wait_for_selector("#run option[value=second]", state="attached")
    assert page.evaluate("document.querySelector('#curves').dataset.kept") == "yes"


@pytest.mark.slow
def test_the_skip_link_stays_on_the_panel(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    make_run(tmp_path / "first", steps=2)
    page = open_page(f"{serve(tmp_path)}/#/curves?run=first")
    page.wait_for_selector("#curves .js-plotly-plot")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.url.endswith("#/curves?run=first") and page.evaluate("document.activeElement.id") == "main"
