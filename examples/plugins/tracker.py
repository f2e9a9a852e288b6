"""A tracker: the mean score of each step in a CSV file.

trainer.logger=[console,examples/plugins/tracker.py:CsvTracker]
"""

from lockstep.observability.trackers import TRACKERS


@TRACKERS.register("csv")
class CsvTracker:
    def __init__(self, run):
        self.file = open(run.run_dir / "scores.csv", "a")  # noqa: SIM115

    def log(self, data, step):
        self.file.write(f"{step},{data.get('critic/score/mean', '')}\n")

    def log_table(self, name, columns, rows, step):
        """Validation samples, with trainer.log_val_generations."""

    def finish(self):
        self.file.close()
