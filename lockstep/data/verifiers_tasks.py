"""Tasks of a verifiers environment as rows, which `verifiers_agent` answers.

verifiers:TASKSET?option=value ──► vf.EnvConfig ──► one row per task: its prompt, and in extra_info how to find it again
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import version
from itertools import islice
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.data import DataConfig
from lockstep.data.files import FileRow
from lockstep.utils.generated_data import GeneratedData

if TYPE_CHECKING:
    import verifiers.v1 as vf

SIZE = "size"
"""Option of ours: most tasks that are read; a taskset may be endless."""
DEFAULTS = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
"""The package's own are a shell and a remote sandbox."""


def config_of(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The environment's config: options are keys of the taskset, or dotted keys such as `agent.max_turns`."""
    config: dict[str, Any] = {"taskset": {"id": name}}
    for key, value in options.items():
        if key == SIZE:
            continue
        if key == "id":
            raise ValueError(f"verifiers:{name}: id is no option; the taskset is named before the `?`")
        *path, last = key.split(".") if "." in key else ("taskset", key)
        section = config
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return config


def make_env(config: Mapping[str, Any]) -> "vf.Env[Any]":
    """A new environment; ValueError if there is none of that name or its config is wrong."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields

    raw = loads(dumps(config))
    name = raw["taskset"]["id"]
    try:
        agent = raw.setdefault("agent", {})
        agent.setdefault("runtime", DEFAULTS["agent"]["runtime"])
        if vf.default_harness_id(name) != name:  # the taskset brings none
            agent.setdefault("harness", DEFAULTS["agent"]["harness"])
        resolved = vf.resolve_env_config(raw)
        if len(agents := agent_config_fields(resolved)) > 1:
            raise ValueError(f"it has {len(agents)} agents ({', '.join(agents)}); only one is supported")
        return vf.load_environment(resolved)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"verifiers:{name}: {' '.join(str(error).split())}") from error


@lru_cache(maxsize=8)
def _tasks(config: str) -> list[Any]:
    """The tasks that were read so far."""
    return []


def task_of(config: Mapping[str, Any], index: int) -> Any:
    """Task `index` of an environment; all up to it are kept, because tasksets can only be read in order."""
    tasks = _tasks(dumps(config, sort_keys=True))
    if index >= len(tasks):
        tasks[:] = islice(iter(make_env(config).taskset), max(index + 1, 2 * len(tasks)))
    return tasks[index]


def verifiers_rows(data: GeneratedData, config: DataConfig) -> Iterator[FileRow]:
    """One row per task."""
    env = make_env(config_of(data.name, data.options))
    size = data.options.get(SIZE)
    if size is None and not env.taskset.bounded:
        raise ValueError(f"{data.entry}: the taskset is endless; set {SIZE}, the number of tasks")
    for index, task in enumerate(islice(iter(env.taskset), size)):
        columns = {
            config.reward_fn_key: f"verifiers/{data.name}",
            config.prompt_key: _messages(task.data),
            "agent_name": "verifiers_agent",
            "reward_model": {"style": "environment"},
            "extra_info": {"index": index, "verifiers": {"entry": data.entry, "index": index}},
        }
        yield FileRow(data.entry, index, columns)


def _messages(data: Any) -> list[dict[str, Any]]:
    """The task's prompt; the environment sends its own messages, so this is for lengths and logs."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [*system, {"role": "user", "content": data.prompt_text or data.name or "(the environment begins)"}]


def fingerprint(data: GeneratedData) -> str:
    """Changes with the options, the version and the taskset's file."""
    from verifiers.v1.utils.loaders import import_taskset

    from lockstep.utils.files import sha256_all

    file = import_taskset(data.name).__file__
    digest = next(iter(sha256_all([Path(file)]).values())) if file else ""
    return f"verifiers {version('verifiers')} {sorted(data.options.items())} {digest}"
