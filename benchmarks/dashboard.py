"""Seconds that the dashboard takes for a large run: 10,000 steps with 5 million samples, made without training.

    python benchmarks/dashboard.py [--steps 10000 --prompts 50 --samples 10 --folder /tmp/large_run --json out.json]

    start            from the command to the address
    page, cold       from opening the page to its first chart, in a headless browser; nothing was read before
    page, again      the same once more
    list of runs ..  answers of the server, first the ones that a panel needs
    prompt, indexed  the history of a prompt when the index of all steps is complete
    export           `--export` of the run, from the command to the end

Without playwright and a browser, `page` is the sum of the answers that the page waits for.
"""

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml
from rich.console import Console
from rich.table import Table

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DATA_ROWS = 4000
"""Prompts of the data set, each used again and again."""
NUM_METRICS = 120
NEEDLE = "a needle in the haystack"


def make_run(folder: Path, steps: int, prompts: int, samples: int) -> None:
    """config.yaml, metrics.jsonl, timeline.jsonl, and a dump per step: prepared texts with numbers in between."""
    noise = random.Random(0)
    (folder / "rollouts").mkdir(parents=True)
    trainer = {
        "default_local_dir": str(folder),
        "rollout_data_dir": str(folder / "rollouts"),
        "total_training_steps": steps,
    }
    config = {
        "trainer": trainer,
        "data": {"train_batch_size": prompts},
        "actor_rollout_ref": {"rollout": {"n": samples}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    names = [
        "critic/score/mean",
        "actor/entropy",
        "actor/grad_norm",
        "response_length/mean",
        "perf/total_num_tokens",
        "timing_s/step",
    ]
    names += [f"extra/metric_{number}/mean" for number in range(NUM_METRICS - len(names))]
    with open(folder / "metrics.jsonl", "w") as metrics, open(folder / "timeline.jsonl", "w") as timeline:
        for step in range(1, steps + 1):
            values = {name: math.sqrt(step) + noise.random() for name in names} | {"perf/total_num_tokens": 100_000}
            metrics.write(json.dumps({"step": step, "time": 1.7e9 + 10 * step} | values) + "\n")
            spans = [["step", "controller", 0, 0, 10_000_000], ["gen", "controller", 0, 0, 4_000_000]]
            timeline.write(
                json.dumps({"step": step, "begin_us": (1_700_000_000 + 10 * step) * 10**6, "spans": spans}) + "\n"
            )
    words = ("add", "the", "two", "numbers", "and", "carry", "one", "then", "check", "that", "sum", "is", "right")
    answers = [" ".join(noise.choices(words, k=80)) for _ in range(200)]
    texts = [
        json.dumps(
            {
                "input": f"Problem {number}: {' '.join(noise.choices(words, k=20))}",
                "output": noise.choice(answers),
                "gts": str(number),
            }
        )[:-1]
        for number in range(DATA_ROWS)
    ]
    for step in range(1, steps + 1):
        lines = []
        for place in range(prompts):
            index = (step * prompts + place) % DATA_ROWS
            head = f'{texts[index]}, "step": {step}, "uid": "0:{step}-{place}", "index": {index}, '
            head += '"finish_reason": "stop", "length": 90, '
            for _ in range(samples):
                score = float(noise.random() < 0.3 + 0.5 * step / steps)
                lines.append(f'{head}"score": {score}, "advantage": {score - 0.5}, "acc": {score}}}\n')
        if step == 1:
            lines[0] = lines[0].replace('"output": "', f'"output": "{NEEDLE} ')
        (folder / f"rollouts/{step}.jsonl").write_text("".join(lines))


def ask(address: str, path: str, **params: Any) -> tuple[float, Any]:
    """Seconds and the answer."""
    started = time.perf_counter()
    url = f"{address}{path}?{urlencode(params)}" if params else f"{address}{path}"
    with urllib.request.urlopen(url) as response:
        answer = json.loads(response.read())
    return time.perf_counter() - started, answer


def open_pages(address: str, run: str) -> dict[str, float] | None:
    """Seconds until the first chart is drawn, twice; None if there is no browser."""
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    with suppress(ImportError):
        from playwright.sync_api import sync_playwright

        if program is None:
            return None
        spent = {}
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
            for label in ("page, cold", "page, again"):
                page = browser.new_page()
                started = time.perf_counter()
                page.goto(f"{address}/#/curves?{urlencode({'run': run})}")
                page.wait_for_selector("#curves .js-plotly-plot .scatterlayer path", timeout=300_000)
                spent[label] = time.perf_counter() - started
                page.close()
            browser.close()
        return spent
    return None


def measure(folder: Path, steps: int, index_timeout_s: float) -> dict[str, float]:
    command = [sys.executable, "-m", "lockstep.cli", "dashboard", str(folder)]
    run = folder.name
    spent: dict[str, float] = {}
    started = time.perf_counter()
    with subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split(" at ")[1].split("/ ")[0].strip()
            spent["start"] = time.perf_counter() - started
            pages = open_pages(address, run)
            answers = {
                "list of runs": ask(address, "/api/runs")[0],
                "metrics": ask(address, "/api/metrics", run=run)[0],
                "curve": ask(address, "/api/curve", run=run, metric="critic/score/mean")[0],
            }
            spent |= pages if pages is not None else {"page, cold": sum(answers.values())}
            spent |= answers
            spent["steps with rollouts"] = ask(address, "/api/dumps", run=run)[0]
            where = {"run": run, "kind": "train"}
            spent["rollouts of a step"], listed = ask(address, "/api/rollouts", **where, step=steps // 2)
            spent["group"] = ask(address, "/api/group", **where, step=steps // 2, group=1)[0]
            key = listed["items"][0]["key"]
            spent["prompt, first"] = ask(address, "/api/prompt", **where, key=key)[0]
            spent["search, first answer"] = ask(address, "/api/search", **where, text=NEEDLE)[0]
            spent |= wait_for_index(address, where, key, index_timeout_s)
        finally:
            server.terminate()
    started = time.perf_counter()
    subprocess.run([*command, "--export", str(folder / "report.html")], check=True, stdout=subprocess.DEVNULL)
    spent["export"] = time.perf_counter() - started
    return spent


def wait_for_index(address: str, where: dict[str, str], key: str, timeout_s: float) -> dict[str, float]:
    """Seconds until all steps are in the index, and of an answer then."""
    started = time.perf_counter()
    while time.perf_counter() - started < timeout_s:
        seconds, answer = ask(address, "/api/prompt", **where, key=key)
        if answer["num_indexed"] >= answer["num_steps"]:
            return {"index complete": time.perf_counter() - started, "prompt, indexed": seconds}
        time.sleep(1)
    return {}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--prompts", type=int, default=50, help="per step; default: %(default)s")
    parser.add_argument("--samples", type=int, default=10, help="per prompt; default: %(default)s")
    parser.add_argument(
        "--folder", type=Path, help="keep the run here, or use the one that is here; default: a temporary one"
    )
    parser.add_argument(
        "--index-timeout-s", type=float, default=600.0, help="how long to wait for the index of prompts"
    )
    parser.add_argument("--json", type=Path, help="write the seconds here too")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "large_run"
        if not folder.exists():
            make_run(folder, options.steps, options.prompts, options.samples)
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        spent = measure(folder, options.steps, options.index_timeout_s)
    table = Table(
        "",
        "seconds",
        title=f"{options.steps:,} steps, {options.steps * options.prompts * options.samples:,} samples, {num_bytes / 1e9:.1f} GB",
    )
    for name, seconds in spent.items():
        table.add_row(name, f"{seconds:.3f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(spent, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
