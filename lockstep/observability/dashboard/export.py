"""`lockstep dashboard RUN --export FILE`: the page with the answers of its APIs in one file that needs no server.

`recorded` of each module of api/ ─► requests ─► answers, up to `MOST_BYTES` ─► index.html with scripts, styles and answers inside
"""

import html
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from lockstep.observability.dashboard.page import APIS, STATIC, json_bytes, plotly_script
from lockstep.observability.dashboard.request import MOST_CHOSEN, ApiRequest, Recorded, Recorder
from lockstep.observability.dashboard.runs import RunFolder, Runs
from lockstep.utils.files import atomic_write_bytes

logger = logging.getLogger(__name__)

MOST_BYTES = 14_000_000
"""Of the answers; plotly's script adds 5 MB."""
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""The file asks for nothing outside itself, whatever the texts of the run are."""
SERVED_ONLY = '    <script src="static/panels/talk.js"></script>\n'
"""A panel that needs the server."""
SCRIPT = re.compile(r'<script src="([^"]+)"[^>]*></script>')
STYLE = re.compile(r'<link rel="stylesheet" href="([^"]+)" />')


def export_page(runs: Runs, path: Path) -> tuple[int, int]:
    """Write the file; returns its size and the number of answers that were left out."""
    found = runs.all()
    if not found:
        raise ValueError(
            f"no run in {', '.join(map(str, runs.paths))}: a run's folder has config.yaml or metrics.jsonl"
        )
    if len(found) > MOST_CHOSEN:
        raise ValueError(f"--export takes up to {MOST_CHOSEN} runs, and there are {len(found)}: name some of them")
    answers, num_left_out = recorded_answers(runs, found)
    page = page_of(answers, ", ".join(run.name for run in found))
    try:
        atomic_write_bytes(path.expanduser(), page)
    except OSError as error:
        raise ValueError(f"--export {path}: {error.strerror or error}") from None
    return len(page), num_left_out


def recorded_answers(runs: Runs, found: Sequence[RunFolder]) -> tuple[dict[str, bytes], int]:
    """URL -> JSON, of each panel in turn until there is no room, and the number of those for which there was none."""
    answers: dict[str, bytes] = {}
    left = MOST_BYTES
    num_left_out = 0
    for wanted in _in_turn(found):
        if wanted.url in answers:
            continue
        try:
            answer = APIS[wanted.path](ApiRequest(runs, wanted.params))
            data = script_json(wanted.narrowed(answer) if wanted.narrowed else answer)
        except (ValueError, OSError):  # the page says that it does not have it
            continue
        except Exception:
            logger.exception("%s is left out", wanted.url)
            continue
        if len(data) > left:
            num_left_out += 1
            continue
        answers[wanted.url] = data
        left -= len(data)
    return answers, num_left_out


def _in_turn(found: Sequence[RunFolder]) -> Iterator[Recorded]:
    modules = dict.fromkeys(sys.modules[api.__module__] for api in APIS.values())
    recorders: list[Recorder] = [module.recorded for module in modules if hasattr(module, "recorded")]
    columns = zip_longest(*(_requests(recorder, found) for recorder in recorders))
    return (wanted for wanted in chain.from_iterable(columns) if wanted is not None)


def _requests(recorder: Recorder, found: Sequence[RunFolder]) -> Iterator[Recorded]:
    """What a panel records, up to a failure."""
    try:
        yield from recorder(found)
    except Exception:
        logger.exception("%s records no more", recorder.__module__)


def script_json(data: Any) -> bytes:
    """JSON that cannot end the script that holds it: `<` is written as an escape."""
    return json_bytes(data).replace(b"<", b"\\u003c")


def page_of(answers: dict[str, bytes], title: str) -> bytes:
    data = b"{" + b",".join(script_json(url) + b":" + answer for url, answer in answers.items()) + b"}"
    recorded = data.decode()
    now = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    page = page.replace("<title>Lockstep</title>", f"<title>Lockstep: {html.escape(title)}</title>")
    page = page.replace("<head>", f'<head>\n    <meta http-equiv="content-security-policy" content="{POLICY}" />', 1)
    page = page.replace('aria-live="off"></span>', f'aria-live="off">recorded {html.escape(now)}</span>')
    page = page.replace(SERVED_ONLY, "")
    page = STYLE.sub(lambda match: f"<style>\n{_asset(match[1])}</style>", page)
    page = SCRIPT.sub(lambda match: f"<script>\n{_asset(match[1])}</script>", page)
    holder = f'<script id="recorded" type="application/json">{recorded}</script>\n    '
    setter = '<script>window.RECORDED = JSON.parse(document.getElementById("recorded").textContent);</script>\n    '
    return page.replace("<script>", f"{holder}{setter}<script>", 1).encode(
        errors="replace"
    )  # folders may have names that are no text


def _asset(name: str) -> str:
    text = plotly_script() if name == "plotly.js" else (STATIC.parent / name).read_text(encoding="utf-8")
    if re.search(r"</(?:script|style)|<!--", text, re.IGNORECASE):
        raise RuntimeError(f"{name} cannot stand inside a page: it has a tag that would end it")
    return text
