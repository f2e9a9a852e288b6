"""Training from Python: `lockstep.train` is the command `lockstep ppo` with objects where the command takes names.

model, tokenizer, rows ──► files in RUN/inputs ─┐
functions and classes  ──► python://name        ├──► load_config ──► run_ppo ──► TrainResult(history, policy, run_dir)
keywords, overrides    ──► settings             ─┘
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lockstep.agents.tools.calls import by_name
from lockstep.agents.tools.function import ToolList, tools_of
from lockstep.agents.tools.load import FUNCTION_KEY
from lockstep.config.batch_sizes import BATCH, ONE_UPDATE
from lockstep.config.compose import PRESETS, load_config
from lockstep.config.data import DataConfig
from lockstep.config.errors import ConfigError, with_short_names
from lockstep.config.estimators import KEY as ESTIMATOR_KEY, required_inputs, signature_inputs
from lockstep.config.ppo import PPOConfig
from lockstep.config.short_names import RL
from lockstep.data.rows import is_file_reference, write_rows
from lockstep.observability.jsonl import METRICS_FILE, read_metrics
from lockstep.observability.step_line import format_number
from lockstep.policy import Policy
from lockstep.registry import ObjectReferences
from lockstep.rewards.custom import ARGUMENTS
from lockstep.rewards.functions import RewardFunctions, accepts, parameters_of
from lockstep.trainer.main_ppo import run_ppo
from lockstep.trainer.run.checkpoint import CheckpointStore, RunLock
from lockstep.trainer.run.errors import RunError
from lockstep.utils.files import sha256_all
from lockstep.utils.model_path import local_model_folder

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)

Callback = Callable[[int, dict[str, Any]], Any]
"""Called with a step and its metrics; True, or an exception, stops the run after the step and saves a checkpoint."""

Settings = dict[str, Any]
"""Dotted key -> value."""


class History(list[dict[str, Any]]):
    """One dict of metrics per step, with `step` and `time`; step 0 is the validation before training."""

    def to_pandas(self) -> "pd.DataFrame":
        """A table with a row per step and a column per metric."""
        import pandas as pd

        return pd.DataFrame(list(self)).set_index("step") if self else pd.DataFrame()


@dataclass(frozen=True, repr=False)
class TrainResult:
    """
    run_dir:  the run's folder: checkpoints, metrics.jsonl, config.yaml.
    history:  the metrics of every step of the run, also of the steps before it was resumed.
    finished: False if Ctrl-C or a callback stopped it; the same call with the same `run_dir` resumes it.
    """

    run_dir: Path
    history: History
    finished: bool

    def __repr__(self) -> str:
        """Two lines: where the run is, and its first and last reward."""
        scores = [(row["step"], row["critic/score/mean"]) for row in self.history if "critic/score/mean" in row]
        shown = [f"{format_number(score)} at step {step}" for step, score in dict.fromkeys((*scores[:1], *scores[-1:]))]
        state = "finished" if self.finished else "stopped"
        where = f"TrainResult: {state} after step {self._last_step}, run_dir={str(self.run_dir)!r}"
        return f"{where}\n  reward {', '.join(shown) or 'unknown'}; see .history.to_pandas() and .policy"

    @property
    def _last_step(self) -> int:
        return int(self.history[-1]["step"]) if self.history else 0

    @property
    def policy(self) -> Policy:
        """The policy of the last step."""
        folder = self.run_dir / f"global_step_{self._last_step}"
        if not folder.is_dir():
            raise ValueError(
                f"{folder} does not exist: the run has not saved its last step; set trainer.save_freq other than 0"
            )
        return Policy(local_model_folder(folder, "policy"))


def train(
    model: Any,
    data: Any,
    reward: Any = None,
    algorithm: Any = "grpo",
    *,
    val_data: Any = None,
    tokenizer: Any = None,
    tools: Any = None,
    callbacks: Callback | Sequence[Callback] = (),
    config: Mapping[str, Any] | str | Path | None = None,
    **overrides: Any,
) -> TrainResult:
    """Train a language model by reinforcement learning.

    model:     what `actor_rollout_ref.model.path` takes, or a loaded `PreTrainedModel`, which is not changed.
    data:      what `data.train_files` takes, or rows: a list of dicts, a `datasets.Dataset`, a `pandas.DataFrame`. A row is
               `{"prompt": text or messages, "answer": ..., further columns}` or has the columns of a training file.
    reward:    a function, a list of functions or of (function, weight), the name of a scorer, `file.py:function`, or a
               reward manager class; None scores by the rows' `data_source`. See docs/python_api.md for the signatures.
    algorithm: a preset (`grpo`, `ppo`), or an advantage estimator by name, as `file.py:function` or as a function. The other
               settings are then those of `grpo`, or of `ppo` if the estimator needs a critic, unless `config` is a file.
    val_data:  validation prompts, given like `data`.
    tokenizer: a loaded tokenizer or a folder; None is the model's.
    tools:     functions that the policy can call, classes whose public methods are tools, or a list of them (docs/tools.md).
    callbacks: functions that are called after each step with (step, metrics); see `Callback`.
    config:    settings by key, nested or dotted, or a YAML file.
    overrides: `run_dir` (a new folder in `runs/` by default), `steps`, `batch_size` (64), `n`, `lr`, `max_prompt_length`,
               `max_response_length`, `loss`, `loss_kwargs`, `adv_kwargs`, and any key of docs/config.md:
               `**{"trainer.save_freq": 10}`. A function or a class may stand for a name.

    Raises ConfigError for wrong settings and RunError if the run fails. Ctrl-C stops after the step, as in the command.
    """
    inputs = _Inputs(model, tokenizer, {"train": data, "val": val_data})
    steps = _Callbacks([callbacks] if callable(callbacks) else callbacks)
    settings = {name: value for name, value in overrides.items() if value is not None or name not in RL}
    file = None if config is None or isinstance(config, Mapping) else str(config)
    given = dict(config) if isinstance(config, Mapping) else {}
    defaults: Settings = {} if file else {RUN_DIR: _new_run_dir()}
    sizes: Settings = {} if file else FIRST_RUN
    presets, estimator = _algorithm_settings(algorithm, has_file=file is not None)
    settings = estimator | settings
    tool_list = _tool_list(tools)
    rewards, functions = _reward_settings(reward, tool_list)
    if tool_list is not None:
        defaults["actor_rollout_ref.rollout.agent.default_agent_loop"] = "tool_agent"
    with _own_names(), ObjectReferences() as objects:
        called = {} if tool_list is None else {FUNCTION_KEY: objects.add(tool_list)}
        layers = [_plain(layer, objects) for layer in (defaults, given, rewards, called, settings)]
        unchecked = load_config(PPOConfig, presets, config_name=file, layers=layers, defaults=sizes, run_checks=False)
        run_dir = Path(unchecked.trainer.default_local_dir).expanduser().absolute()
        layers += [_plain({RUN_DIR: run_dir} | inputs.settings(run_dir / "inputs"), objects)]
        columns = inputs.write(run_dir, unchecked)
        if functions is not None and columns is not None:
            functions.check(columns)
        ppo_config = load_config(PPOConfig, presets, config_name=file, layers=layers, defaults=sizes)
        code = run_ppo(ppo_config, on_step=steps if steps.functions else None)
    if steps.error is not None:
        raise steps.error
    return TrainResult(run_dir, History(read_metrics(run_dir / METRICS_FILE)), finished=code == 0)


RUN_DIR = RL["run_dir"]
FIRST_RUN: Settings = {BATCH: 64, **ONE_UPDATE}
"""Batch sizes without a YAML file; a step is one update."""


@contextmanager
def _own_names() -> Iterator[None]:
    """Errors about settings have the names of this module's keywords in place of the keys that they set."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.problems, RL) from error
    except RunError as error:
        raise RunError(with_short_names(str(error), RL), error.exit_code) from error


def _algorithm_settings(algorithm: Any, has_file: bool) -> tuple[list[str], Settings]:
    """The preset and the estimator that `algorithm` means.

    An estimator replaces that of the preset grpo, as in `lockstep grpo algorithm.adv_estimator=NAME`, or of ppo if it needs a
    critic. has_file: the other settings are those of the user's file.
    """
    if isinstance(algorithm, str) and (PRESETS / "algorithm" / f"{algorithm}.yaml").is_file():
        return [f"algorithm={algorithm}"], {}
    estimator = {ESTIMATOR_KEY: algorithm}
    if has_file:
        return [], estimator
    try:
        inputs = signature_inputs(algorithm) if callable(algorithm) else required_inputs(str(algorithm))
    except ConfigError:  # registered later, or unknown, which is reported then
        inputs = frozenset()
    preset = "ppo" if "values" in inputs else "grpo"
    name = getattr(algorithm, "__name__", algorithm)
    kl = ", with a KL term in the loss (actor_rollout_ref.actor.use_kl_loss)" if preset == "grpo" else ""
    logger.info("algorithm=%s: the other settings are those of the preset %s%s", name, preset, kl)
    return [f"algorithm={preset}"], estimator


class _Inputs:
    """The model, the tokenizer and the rows; those that are objects become files of the run."""

    def __init__(self, model: Any, tokenizer: Any, data: dict[str, Any]) -> None:
        if hasattr(model, "save_pretrained") and tokenizer is None:
            tokenizer = getattr(model, "name_or_path", None) or None
            if tokenizer is None:
                raise ValueError("tokenizer: the loaded model does not know its folder; pass its tokenizer too")
        self.saved = {"model": model, "tokenizer": tokenizer}
        self.data = {name: rows for name, rows in data.items() if rows is not None}

    def settings(self, folder: Path) -> Settings:
        """The keys that name them."""
        keys = {"model": "actor_rollout_ref.model.path", "tokenizer": "actor_rollout_ref.model.tokenizer_path"}
        paths = {
            keys[name]: folder / name if hasattr(item, "save_pretrained") else item
            for name, item in self.saved.items()
            if item is not None
        }
        for name, rows in self.data.items():
            paths[f"data.{name}_files"] = rows if is_file_reference(rows) else [folder / f"{name}.jsonl"]
        return paths

    def write(self, run_dir: Path, config: PPOConfig) -> list[str] | None:
        """Write the files; the columns of all rows, or None if some are in the user's files.

        ValueError if a live run uses the folder, or if a run that would be resumed was started with others.
        """
        is_object = [hasattr(item, "save_pretrained") for item in self.saved.values()]
        is_object += [not is_file_reference(rows) for rows in self.data.values()]
        if not any(is_object):
            return None
        with RunLock(run_dir), TemporaryDirectory(prefix=".inputs_", dir=run_dir) as temporary:
            columns = self._write_files(Path(temporary), config.data)
            changed = [
                item for item in Path(temporary).iterdir() if _digests(item) != _digests(run_dir / "inputs" / item.name)
            ]
            is_resumed = config.trainer.resume_mode == "auto" and CheckpointStore(run_dir).newest() is not None
            before = [item.name for item in changed if item.stem != "val" and (run_dir / "inputs" / item.name).exists()]
            if is_resumed and before:
                raise ValueError(
                    f"run_dir={run_dir} has checkpoints of a run with other inputs ({', '.join(sorted(before))}); pass the same "
                    "objects to resume it, or set another run_dir, or trainer.resume_mode=disable to start from scratch"
                )
            (run_dir / "inputs").mkdir(exist_ok=True)
            for item in changed:
                target = run_dir / "inputs" / item.name
                if target.is_dir():
                    shutil.rmtree(target)
                item.replace(target)
        return None if any(map(is_file_reference, self.data.values())) else columns

    def _write_files(self, folder: Path, config: DataConfig) -> list[str]:
        columns: dict[str, None] = {}
        for name, rows in self.data.items():
            if not is_file_reference(rows):
                path = folder / f"{name}.jsonl"
                columns |= dict.fromkeys(write_rows(rows, path, config.prompt_key, config.reward_fn_key))
        for name, item in self.saved.items():
            if hasattr(item, "save_pretrained"):
                item.save_pretrained(folder / name)
        return list(columns)


def _digests(item: Path) -> dict[str, str]:
    """Relative path -> digest of a file, or of the files of a folder without *config.json, which has library versions."""
    files = [item] if item.is_file() else [path for path in item.rglob("*") if path.is_file()]
    kept = [path for path in files if not path.name.endswith("config.json")]
    return {str(path.relative_to(item)): digest for path, digest in sha256_all(kept).items()}


class _Callbacks:
    """The user's callbacks as one `on_step`; an exception stops the run and is kept."""

    def __init__(self, functions: Iterable[Callback]) -> None:
        self.functions = list(functions)
        self.error: BaseException | None = None

    def __call__(self, step: int, metrics: dict[str, Any]) -> bool:
        if self.error is not None:
            return True
        try:
            wishes = [function(step, dict(metrics)) for function in self.functions]
            return any(type(wish).__name__ == "bool" and wish for wish in wishes)  # Python's or numpy's
        except Exception as error:  # noqa: BLE001 (boundary to user code; raised by `train`)
            self.error = error
            return True


def _new_run_dir() -> Path:
    name, number = time.strftime("%Y%m%d-%H%M%S"), 1
    while (folder := Path("runs") / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return folder


def _tool_list(tools: Any) -> ToolList | None:
    """`tools` as one object; ValueError if one of them cannot be a tool."""
    if tools is None:
        return None
    items = tuple(tools) if isinstance(tools, list | tuple) else (tools,)
    try:
        by_name(tools_of(found := ToolList(items)))
    except ValueError as error:
        raise ValueError(f"tools: {error}") from error
    return found


def _reward_settings(reward: Any, tools: ToolList | None = None) -> tuple[Settings, RewardFunctions | None]:
    """The keys of `reward`, and the adapter if it is a function (or several) of another signature than `compute_score`."""
    if reward is None and tools is not None and any(hasattr(item, "get_reward") for item in tools.items):
        reward = "environment_reward"
    if reward is None:
        return {}, None
    if isinstance(reward, str | Path):
        return {"reward": reward}, None
    if isinstance(reward, type):
        return {"reward_model.reward_manager": reward}, None
    items = reward if isinstance(reward, list | tuple) else [reward]
    weighted = [item if isinstance(item, tuple) else (item, 1.0) for item in items]
    if not weighted or not all(len(item) == 2 and callable(item[0]) for item in weighted):
        raise ValueError(
            f"reward must be a function, a list of functions or of (function, weight), or a name, not {reward!r}"
        )
    if callable(reward) and accepts(reward, ARGUMENTS):
        return {"custom_reward_function.path": reward}, None
    if callable(reward) and "solution_strs" in parameters_of(reward):
        return {"custom_reward_function.path": reward, "reward_model.reward_manager": "batch"}, None
    functions = RewardFunctions(weighted)
    return {"custom_reward_function.path": functions, "reward_model.reward_manager": "functions"}, functions


def _plain(value: Any, objects: ObjectReferences) -> Any:
    """A setting as the config takes it: paths as text, functions and classes as references."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _plain(item, objects) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, objects) for item in value]
    return objects.add(value) if callable(value) else value
