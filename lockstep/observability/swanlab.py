"""Tracker `swanlab`; the only file that imports it. $SWANLAB_MODE (online, local, offline, disabled), $SWANLAB_API_KEY and
its other variables apply; logs go to $SWANLAB_LOG_DIR or `swanlog/` in the run's folder."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.observability.tracker import Metrics, RunInfo, ServiceTracker, check_installed, plain

WITHOUT_LOGIN = ("local", "offline", "disabled")
"""Values of SWANLAB_MODE that send nothing."""


class SwanlabTracker(ServiceTracker):
    def __init__(self, run: RunInfo) -> None:
        log_dir = os.environ.get("SWANLAB_LOG_DIR") or str(run.run_dir / "swanlog")
        super().__init__(run, "swanlab", log_dir=log_dir)

    @staticmethod
    def check() -> None:
        """ValueError if the package or the login is missing; SwanLab saves logins and settings in its folder."""
        check_installed("swanlab", "swanlab")
        if os.environ.get("SWANLAB_API_KEY") or os.environ.get("SWANLAB_MODE") in WITHOUT_LOGIN:
            return
        folders = (os.environ.get("SWANLAB_SAVE_DIR", "~/.swanlab"), ".swanlab")
        if not any(path.is_file() for folder in folders for path in Path(folder).expanduser().glob("*")):
            raise ValueError(
                "trainer.logger includes swanlab, but this user is not logged in: run `swanlab login`, set SWANLAB_API_KEY, "
                "or set SWANLAB_MODE=local to write only to the run's folder"
            )

    def log(self, data: Metrics, step: int) -> None:
        numbers = {name: plain(value) for name, value in data.items()}
        self._run.log({name: value for name, value in numbers.items() if isinstance(value, (int, float))}, step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        table = self._module.echarts.Table()
        table.add(list(columns), [[str(plain(value)) for value in row] for row in rows])
        self._run.log({name: table}, step=step)
