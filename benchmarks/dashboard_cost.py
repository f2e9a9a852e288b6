"""What an open dashboard costs a run: the same training on the demo's model with and without one, alternating.

    python benchmarks/dashboard_cost.py [--steps 40 --repeats 3 --pages 1 --panel time --json out.json]

With a dashboard, `lockstep dashboard` serves the run's folder, with the low priority that `trainer.dashboard=true` gives it; each
page listens for events and asks for a panel's data when a step has ended, as a browser does. Reported are medians of
`timing_s/step` over the steps after the first five, and the processor time of the dashboard per second of training.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from demo_run import make_files

WARM_UP_STEPS = 5
SETTINGS = [
    "actor_rollout_ref.rollout.n=8",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.logger=[]",
]
PANELS = {
    "time": ("/api/runs", "/api/timeline", "/api/time", "/api/memory"),
    "curves": ("/api/runs", "/api/metrics", "/api/curve?metric=critic/score/mean"),
}
"""Panel -> what its page asks for after a step."""


def train(overrides: list[str], run: Path, steps: int) -> list[float]:
    """Seconds of each step after the warm-up."""
    command = [sys.executable, "-m", "lockstep.cli", "grpo", *overrides, f"trainer.default_local_dir={run}"]
    done = subprocess.run(
        [*command, f"trainer.total_training_steps={steps}", "trainer.total_epochs=1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(done.stdout[-4000:])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["timing_s/step"] for row in rows if "timing_s/step" in row][WARM_UP_STEPS:]


class Page(threading.Thread):
    """A client that does what an open page does. num_answers: of the API, beside the events."""

    def __init__(self, url: str, run: str, panel: str) -> None:
        super().__init__(daemon=True)
        self.url, self.run_name, self.panel = url, run, panel
        self.num_answers = 0

    def run(self) -> None:
        try:
            with urllib.request.urlopen(f"{self.url}/api/events") as events:
                for line in events:
                    if line.startswith(b"data: "):
                        self._ask()
        except OSError:  # the dashboard has ended
            pass

    def _ask(self) -> None:
        for path in PANELS[self.panel]:
            joint = "&" if "?" in path else "?"
            with (
                suppress(urllib.error.HTTPError),  # a file is not written yet
                urllib.request.urlopen(f"{self.url}{path}{joint}run={quote(self.run_name)}") as answer,
            ):
                answer.read()
                self.num_answers += 1


@contextmanager
def dashboard(folder: Path, run: str, pages: int, panel: str) -> Iterator[tuple[int, list[Page]]]:
    """Its process id and its pages."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep.cli", "dashboard", str(folder), "--port", "0", "--parent", str(os.getpid())],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("dashboard at "))
        clients = [Page(line.split()[2].rstrip("/"), run, panel) for _ in range(pages)]
        for client in clients:
            client.start()
        yield process.pid, clients
    finally:
        process.kill()
        process.wait()


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pages", type=int, default=1)
    parser.add_argument("--panel", choices=sorted(PANELS), default="time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    busy = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        overrides = [*make_files(folder), *SETTINGS]
        for repeat in range(options.repeats):
            order = ("without", "with") if repeat % 2 == 0 else ("with", "without")
            for kind in order:
                runs = folder / f"{kind}_{repeat}"
                runs.mkdir()
                if kind == "without":
                    found = train(overrides, runs / "run", options.steps)
                else:
                    with dashboard(runs, "run", options.pages, options.panel) as (pid, clients):
                        begin = processor_seconds(pid)
                        found = train(overrides, runs / "run", options.steps)
                        busy.append((processor_seconds(pid) - begin) / sum(found))
                        if not any(client.num_answers for client in clients):
                            raise SystemExit("the pages got no answers")
                seconds[kind] += found
                print(f"{kind:8} median step {statistics.median(found):.4f} s", flush=True)
    medians = {kind: statistics.median(found) for kind, found in seconds.items()}
    cost = medians["with"] / medians["without"] - 1
    share = statistics.mean(busy)
    print(
        f"cores {os.cpu_count()}  load {os.getloadavg()[0]:.1f}  without {medians['without']:.4f} s  with {medians['with']:.4f} s  "
        f"cost {100 * cost:+.2f} %  dashboard {100 * share:.1f} % of a core"
    )
    if options.json is not None:
        figures = {"cores": os.cpu_count(), "seconds": medians, "cost": cost, "dashboard_core_share": share}
        options.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
