"""verl.utils.rollout_trace: calls of agent loops and tools as traces of Weave or MLflow.

    RolloutTraceConfig.init("project", "experiment", backend="mlflow")
    with rollout_trace_attr(sample_index=3, step=1):
        await loop.run(...)                              decorated with @rollout_trace_op

Without a backend the decorated functions run as they are.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import asdict, is_dataclass
from typing import Any, ClassVar, Optional

_is_traced: ContextVar[bool] = ContextVar("is_traced", default=True)
_attributes: ContextVar[dict[str, Any] | None] = ContextVar("attributes", default=None)

BACKENDS = ("weave", "mlflow")


class RolloutTraceConfig:
    """The settings of this process; `init` sets them once, until `reset`."""

    _instance: ClassVar[Optional["RolloutTraceConfig"]] = None

    def __new__(cls) -> "RolloutTraceConfig":
        if cls._instance is None:
            cls._instance = super().__new__(cls)
            cls._instance._clear()
        return cls._instance

    def _clear(self) -> None:
        self.backend: str | None = None
        self.client: Any = None
        self.token2text = False
        self.project_name: str | None = None
        self.experiment_name: str | None = None
        self.max_samples_per_step_per_worker: int | None = None
        self._initialized = False

    @classmethod
    def get_instance(cls) -> "RolloutTraceConfig":
        return cls()

    @classmethod
    def init(
        cls,
        project_name: str,
        experiment_name: str,
        backend: str | None,
        token2text: bool = False,
        max_samples_per_step_per_worker: int | None = None,
    ) -> None:
        """backend: weave, mlflow or None. token2text: also record prompts and responses as text."""
        config = cls()
        if config._initialized:
            return
        if backend is not None and backend not in BACKENDS:
            raise ValueError(f"rollout.trace.backend={backend}: must be one of {', '.join(BACKENDS)}, or null")
        config.client = _client(backend, project_name)
        config.backend, config.token2text = backend, token2text
        config.project_name, config.experiment_name = project_name, experiment_name
        config.max_samples_per_step_per_worker = max_samples_per_step_per_worker
        config._initialized = True

    @classmethod
    def get_backend(cls) -> str | None:
        return cls().backend

    @classmethod
    def get_client(cls) -> Any:
        return cls().client

    @classmethod
    def enable_token2text(cls) -> bool:
        return cls().token2text

    @classmethod
    def reset(cls) -> None:
        cls._instance = None


def _client(backend: str | None, project: str) -> Any:
    if backend is None:
        return None
    try:
        client: Any = __import__(backend)
    except ModuleNotFoundError as error:
        raise ValueError(f"rollout.trace.backend={backend}: pip install {backend}") from error
    if backend == "weave":
        return client.init(project)
    client.set_experiment(project)
    return client


@contextlib.contextmanager
def rollout_trace_attr(
    sample_index: int | None = None,
    step: int | None = None,
    rollout_n: int | None = None,
    name: str = "rollout_trace",
    validate: bool = False,
    trace: bool = True,
) -> Iterator[None]:
    """Traces inside have these attributes; none are made with `trace=False`."""
    config = RolloutTraceConfig()
    if config.backend is None or not trace:
        token = _is_traced.set(trace)
        try:
            yield
        finally:
            _is_traced.reset(token)
        return
    given = {"sample_index": sample_index, "step": step, "rollout_n": rollout_n}
    attributes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    attributes |= {"validate": validate, "experiment_name": config.experiment_name}
    held = _attributes.set(attributes)
    try:
        if config.backend == "mlflow":
            with config.client.start_span(name=name) as span:
                for key, value in attributes.items():
                    config.client.set_trace_tag(span.trace_id, key, str(value))
                yield
        else:
            with __import__("weave").attributes(attributes):
                yield
    finally:
        _attributes.reset(held)


def rollout_trace_op(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a method, also of a coroutine: its arguments, result or exception are a call in the trace."""

    @functools.wraps(func)
    async def call_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _recorded(func, self, args, kwargs) as record:
            return record(await func(self, *args, **kwargs))

    @functools.wraps(func)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _recorded(func, self, args, kwargs) as record:
            return record(func(self, *args, **kwargs))

    return call_async if inspect.iscoroutinefunction(func) else call


@contextlib.contextmanager
def _recorded(
    func: Callable[..., Any], owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Callable[[Any], Any]]:
    """Yields what records the result and returns it."""
    config = RolloutTraceConfig()
    if config.backend is None or not _is_traced.get():
        yield lambda result: result
        return
    bound = inspect.signature(func).bind(owner, *args, **kwargs)
    bound.apply_defaults()
    inputs = {name: value for name, value in bound.arguments.items() if name != "self"}
    if config.backend == "mlflow":
        with config.client.start_span(name=func.__qualname__) as span:
            span.set_inputs(inputs)

            def record(result: Any) -> Any:
                span.set_outputs(_shown(owner, result))
                return result

            yield record
        return
    call = config.client.create_call(op=func.__qualname__, inputs=inputs, attributes=_attributes.get() or {})
    outputs: list[Any] = []

    def keep(result: Any) -> Any:
        outputs.append(_shown(owner, result))
        return result

    try:
        yield keep
    except Exception as error:
        config.client.finish_call(call, exception=error)
        raise
    config.client.finish_call(call, output=outputs[0] if outputs else None)


def _shown(owner: Any, result: Any) -> Any:
    """The result, with the texts of its tokens if the config asks for them."""
    tokenizer = getattr(owner, "tokenizer", None)
    if not RolloutTraceConfig.enable_token2text() or tokenizer is None or not hasattr(result, "prompt_ids"):
        return result
    shown = asdict(result) if is_dataclass(result) and not isinstance(result, type) else dict(vars(result))
    shown["prompt_text"] = tokenizer.decode(result.prompt_ids)
    shown["response_text"] = tokenizer.decode(result.response_ids)
    return shown
