"""Tracker `wandb` (Weights & Biases); the only file that imports it. $WANDB_MODE and its other variables apply."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lockstep.observability.tracker import (
    Metrics,
    RunInfo,
    ServiceTracker,
    check_installed,
    has_netrc_login,
    import_service,
    plain,
)

LOGIN_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
WITHOUT_LOGIN = ("offline", "dryrun", "disabled")
"""Values of WANDB_MODE that send nothing."""
HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
"""W&B's own servers, before and after its change of name."""


class WandbTracker(ServiceTracker):
    def __init__(self, run: RunInfo) -> None:
        super().__init__(run, "wandb", dir=str(run.run_dir))

    @staticmethod
    def check() -> None:
        """ValueError if the package or the login is missing: W&B would ask for it once the models are loaded."""
        check_installed("wandb", "wandb")
        if any(os.environ.get(name) for name in LOGIN_VARIABLES) or os.environ.get("WANDB_MODE") in WITHOUT_LOGIN:
            return
        hosts = {urlsplit(os.environ.get("WANDB_BASE_URL", "")).netloc, *HOSTS}
        if has_netrc_login(Path(os.environ.get("NETRC", "~/.netrc")).expanduser(), *hosts):
            return
        wandb = import_service("wandb", "wandb")
        settings = wandb.setup().settings  # reads the files of `wandb login` and `wandb offline`
        wandb.teardown()
        if settings.api_key is None and settings.mode not in WITHOUT_LOGIN:
            raise ValueError(
                "trainer.logger includes wandb, but this user is not logged in: run `wandb login`, set WANDB_API_KEY, or "
                "set WANDB_MODE=offline to write only to the run's folder"
            )

    def log(self, data: Metrics, step: int) -> None:
        self._run.log({name: plain(value) for name, value in data.items()}, step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        table = self._module.Table(columns=list(columns), data=[plain(row) for row in rows])
        self._run.log({name: table}, step=step)
