"""Score the responses in a file: `python -m lockstep.trainer.main_eval key=value …`, or `lockstep eval key=value …`.

The config and the user's code are checked before torch is imported, so that errors are reported immediately.
"""

import logging
import os
import sys

from lockstep.config.commandline import config_from_command_line
from lockstep.config.evaluation import EvaluationConfig, as_validation
from lockstep.observability.console import LogHandler
from lockstep.rewards.errors import RewardError
from lockstep.trainer.errors import RunError
from lockstep.trainer.interrupt import stop_on_sigterm
from lockstep.trainer.preflight import check_reward_function
from lockstep.utils.dataset_files import local_data_files
from lockstep.utils.progress import ProgressLog, phase

logger = logging.getLogger(__name__)


def run_evaluation(config: EvaluationConfig) -> dict[str, float]:
    """Score and show the metrics; returns them. RunError if it fails."""
    try:
        check_reward_function(as_validation(config))
        local_data_files(config.data.path, "val", "data.path")
        with ProgressLog():
            with phase("load torch"):
                from lockstep.trainer.evaluation import evaluate
            return evaluate(config)
    except ValueError as error:
        if os.environ.get("LOCKSTEP_DEBUG"):
            raise
        raise RunError(str(error), exit_code=2) from error
    except RewardError as error:
        raise RunError(str(error)) from error
    except OSError as error:
        raise RunError(f"{error.strerror or error}: {error.filename}") from error


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", handlers=[LogHandler()])
    try:
        with stop_on_sigterm():
            config = config_from_command_line(
                argv,
                EvaluationConfig,
                prog="lockstep eval",
                description="Score the responses in a file, per data source.",
            )
            if config is not None:
                run_evaluation(config)
            return 0
    except RunError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("stopped by the user\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
