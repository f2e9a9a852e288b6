"""Score the responses in a file: `python -m lockstep.trainer.main_eval key=value …`, or `lockstep eval key=value …`.

The config and the user's code are checked before torch is imported, so that errors are reported immediately.
"""

import logging
import os
import sys

from lockstep.config.evaluation import EvaluationConfig, as_validation
from lockstep.rewards.errors import RewardError
from lockstep.trainer.run.command import run_program
from lockstep.trainer.run.errors import RunError
from lockstep.trainer.run.preflight import check_reward_function
from lockstep.utils.progress import ProgressLog, phase

logger = logging.getLogger(__name__)


def run_evaluation(config: EvaluationConfig) -> int:
    """Score and show the metrics; returns 0. RunError if it fails."""
    try:
        check_reward_function(as_validation(config))
        with ProgressLog():
            with phase("load torch"):
                from lockstep.trainer.evaluation.evaluate import evaluate
            evaluate(config)
            return 0
    except ValueError as error:
        if os.environ.get("LOCKSTEP_DEBUG"):
            raise
        raise RunError(str(error), exit_code=2) from error
    except RewardError as error:
        raise RunError(str(error)) from error
    except OSError as error:
        raise RunError(f"{error.strerror or error}: {error.filename}") from error


def main(argv: list[str] | None = None) -> int:
    return run_program(
        argv,
        EvaluationConfig,
        run_evaluation,
        prog="lockstep eval",
        description="Score the responses in a file, per data source.",
        if_stopped="",
    )


if __name__ == "__main__":
    sys.exit(main())
