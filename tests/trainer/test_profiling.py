"""`trainer.profile_steps`: the right steps, roles and ranks are recorded, with our spans as ranges; the timeline is complete."""

import gzip
import json
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import cli
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.config.profiler import ToolsConfig, TorchMemoryToolConfig, TorchToolConfig
from lockstep.observability.profiler import ProfileRequest
from lockstep.observability.timeline import read_steps
from lockstep.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    LocalWorkerGroup,
    Worker,
    create_colocated_worker_cls,
    register,
)
from lockstep.single_controller.worker_group import ResourcePool
from lockstep.trainer.run.ray_runner import _timeline_file
from lockstep.trainer.run.step_profiler import nsys_environment
from lockstep.utils.spans import Span, take_spans

ACTOR = "actor_rollout_ref.actor"
TOOLS = "global_profiler.global_tool_config"


def ranges(file: Path) -> set[str]:
    """Names of the user's ranges in a trace of torch.profiler."""
    with gzip.open(file) as trace:
        events: list[dict[str, Any]] = json.load(trace)["traceEvents"]
    assert any(event.get("cat") == "cpu_op" for event in events)
    return {event["name"] for event in events if event.get("cat") == "user_annotation"}


def inside(inner: Span, outer: Span) -> bool:
    return outer.begin_us <= inner.begin_us <= inner.end_us <= outer.end_us


SAVES = {"save_checkpoint", "save_rollout"}
CALLS = {
    "gen": ("actor_rollout", "advance_generation"),
    "ref": ("ref", "compute_ref_log_prob"),
    "old_log_prob": ("actor_rollout", "compute_log_prob"),
    "values": ("critic", "compute_values"),
    "update_critic": ("critic", "update_critic"),
    "update_actor": ("actor_rollout", "update_actor"),
}
"""Phase of the controller to the call of a worker in it."""


def test_profile_and_timeline_of_a_run(overrides: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = ["trainer.total_training_steps=2", f"{ACTOR}.use_kl_loss=true", "trainer.profile_steps=[2]"]
    more += ["actor_rollout_ref.rollout.mode=async"]
    with caplog.at_level(logging.INFO):
        assert cli.main(["ppo", *overrides, *more]) == 0
    run = tmp_path / "run"
    folder, name = run / "profile" / "step_2", "actor_rollout+critic+ref_rank0.json.gz"
    assert sorted(path.name for path in (run / "profile").rglob("*")) == [name, "step_2", "timeline.json"]
    assert f"profiled step 2: {name} in {folder}; open the .json.gz files at" in caplog.text
    labels = {f"{role}.{method}" for role, method in CALLS.values()}
    assert labels | CALLS.keys() | {"step", "rewards.reward", "adv", "forward_backward"} <= ranges(folder / name)

    steps = read_steps(run)
    assert list(steps) == [0, 1, 2]
    for step in (1, 2):
        spans = steps[step]
        (whole,) = [span for span in spans if span.name == "step"]
        after = [span for span in spans if span.begin_us >= whole.end_us]
        assert {span.name for span in after} == (SAVES if step == 2 else set())
        assert all(inside(span, whole) for span in spans if span not in after)
        phases = {span.name for span in spans if span.role == "controller"} - SAVES
        assert phases == CALLS.keys() | {"step", "adv"}
        for phase, (role, method) in CALLS.items():
            calls = [span for span in spans if (span.name, span.role, span.rank) == (method, role, 0)]
            own = [span for span in spans if span.name == phase and span.role == "controller"]
            assert calls and all(any(inside(call, span) for span in own) for call in calls)
        updates = [span for span in spans if span.name == "optimizer_step"]
        assert {span.role for span in updates} == {"actor_rollout", "critic"}
    assert {span.name for span in steps[0]} == {"testing", "generate_sequences"}
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {2}


def test_sft_takes_the_same_keys(tiny_run_files: Path, tmp_path: Path) -> None:
    pairs = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    command = [f"model.path={tiny_run_files}/model", f"data.train_files={tmp_path}/train.jsonl", "trainer.device=cpu"]
    command += ["data.train_batch_size=2", "data.max_length=64", "trainer.total_epochs=1", "trainer.save_freq=0"]
    command += ["trainer.profile_steps=[2,3]", "global_profiler.profile_continuous_steps=true"]
    command += [f"global_profiler.save_path={tmp_path}/mine", f"trainer.default_local_dir={tmp_path}/run"]
    assert cli.main(["sft", *command]) == 0
    assert sorted(p.name for p in (tmp_path / "mine").rglob("*")) == ["sft_rank0.json.gz", "steps_2-3", "timeline.json"]
    trace = tmp_path / "mine" / "steps_2-3" / "sft_rank0.json.gz"
    assert {"step", "forward_backward", "optimizer_step"} <= ranges(trace)
    steps = read_steps(tmp_path / "run")
    assert list(steps) == [1, 2, 3, 4]
    assert [(span.name, span.role) for span in steps[2]] == [
        ("step", "sft"),
        ("forward_backward", "sft"),
        ("optimizer_step", "sft"),
    ]


class Adder(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self) -> float:
        return float(torch.ones(3).sum())


def test_discrete_profile_has_one_trace_per_call_of_the_chosen_ranks(tmp_path: Path) -> None:
    parts = {role: ClassWithInitArgs(Adder) for role in ("actor", "critic")}
    processes = LocalWorkerGroup(ResourcePool([3]), create_colocated_worker_cls(parts))
    groups: dict[str, Any] = processes.spawn(parts)
    request = ProfileRequest(
        "torch",
        ToolsConfig(torch=TorchToolConfig(contents=["cpu", "shapes"])),
        str(tmp_path / "p"),
        {"actor": [0, 2], "critic": []},
        discrete=True,
    )
    take_spans()
    processes.start_profile(request)
    groups["critic"].add()
    groups["actor"].add()
    groups["actor"].add()
    files = sorted(Path(file).name for of_rank in processes.stop_profile() for file in of_rank)
    assert files == [f"actor_rank{rank}_add{end}.json.gz" for rank in (0, 2) for end in ("", "_2")]
    assert ranges(tmp_path / "p" / "actor_rank2_add.json.gz") >= {"add"}
    assert sum(len(spans) for spans in processes.take_spans()) == 9
    groups["actor"].add()
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == files


class Calls:
    """Stands in for functions of torch.cuda."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[Any, ...]] = []
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        for module, name in (
            (torch.cuda.profiler, "start"),
            (torch.cuda.profiler, "stop"),
            (torch.cuda.nvtx, "range_push"),
            (torch.cuda.nvtx, "range_pop"),
            (torch.cuda.memory, "_record_memory_history"),
            (torch.cuda.memory, "_dump_snapshot"),
        ):
            patch.setattr(module, name, self._function(name))

    def _function(self, name: str) -> Any:
        return lambda *args, **options: self.made.append((name, *args, *([options] if options else [])))


def record_one_call(request: ProfileRequest) -> list[str]:
    processes = LocalWorkerGroup(ResourcePool([1]), create_colocated_worker_cls({"actor": ClassWithInitArgs(Adder)}))
    group: Any = processes.spawn(["actor"])["actor"]
    processes.start_profile(request)
    group.add()
    (files,) = processes.stop_profile()
    return [str(file) for file in files]


@pytest.mark.parametrize("discrete", [False, True])
def test_nsys_captures_between_start_and_stop(discrete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    files = record_one_call(ProfileRequest("nsys", ToolsConfig(), str(tmp_path), {"actor": None}, discrete))
    name = "add" if discrete else "actor.add"
    assert files == []
    assert calls.made == [("start",), ("range_push", name), ("range_pop",), ("stop",)]


def test_memory_snapshot_has_the_options_of_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    tools = ToolsConfig(torch_memory=TorchMemoryToolConfig(trace_alloc_max_entries=7, context="alloc", stacks="python"))
    files = record_one_call(ProfileRequest("torch_memory", tools, str(tmp_path), {"actor": [0]}))
    assert files == [f"{tmp_path}/actor_rank0.pickle"]
    options = {"context": "alloc", "stacks": "python", "max_entries": 7, "clear_history": True}
    assert calls.made == [
        ("_record_memory_history", options),
        ("_dump_snapshot", files[0]),
        ("_record_memory_history", {"enabled": None}),
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_snapshot_of_a_gpu(tmp_path: Path) -> None:
    class Allocator(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def allocate(self) -> int:
            return torch.ones(1 << 20, device="cuda").numel()

    torch.ones(1, device="cuda")
    parts = {"actor": ClassWithInitArgs(Allocator)}
    processes = LocalWorkerGroup(ResourcePool([1]), create_colocated_worker_cls(parts))
    group: Any = processes.spawn(["actor"])["actor"]
    processes.start_profile(ProfileRequest("torch_memory", ToolsConfig(), str(tmp_path), {"actor": [0]}))
    group.allocate()
    ((file,),) = processes.stop_profile()
    with open(file, "rb") as snapshot:
        entries = [entry for device in pickle.load(snapshot)["device_traces"] for entry in device]
    assert any(entry["action"] == "alloc" and entry["size"] == 4 << 20 for entry in entries)


def exit_code(command: list[str]) -> int | str | None:
    try:
        return cli.main(command)
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            ["global_profiler.tool=torhc"],
            "global_profiler.tool=torhc: must be one of torch, nsys, torch_memory or null",
        ),
        (["trainer.profile_steps=[0]"], "trainer.profile_steps=[0]: must be steps, the first of which is 1"),
        (["trainer.profile_steps=[3,9]"], "trainer.profile_steps=[9]: the run has 8 steps; set some of those"),
        (
            [f"{TOOLS}.torch.contents=[gpu]"],
            f"{TOOLS}.torch.contents=[gpu]: must be a list, each item one of cpu, cuda",
        ),
        (
            [f"{ACTOR}.profiler.enable=false", "critic.profiler.enable=false"],
            f"trainer.profile_steps=[1]: no role is profiled; set {ACTOR}.profiler.enable=true",
        ),
        ([f"{ACTOR}.profiler.ranks=[0,1]"], f"{ACTOR}.profiler.ranks=[0,1]: actor_rollout has no rank 1, but 0 to 0"),
        (
            ["global_profiler.tool=torch_memory"],
            "global_profiler.tool=torch_memory: needs a CUDA device, but the run is",
        ),
        (["global_profiler.tool=nsys"], "global_profiler.tool=nsys: there is no nsys on PATH"),
    ],
)
def test_what_cannot_be_profiled_ends_with_code_2(
    overrides: list[str],
    extra: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert exit_code(["ppo", *overrides, "trainer.profile_steps=[1]", *extra]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "profile").exists()


def test_command_must_run_under_nsys(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nsys").touch()
    os.chmod(tmp_path / "nsys", 0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("NSYS_PROFILING_SESSION_ID", raising=False)
    command = ["ppo", *overrides, "trainer.profile_steps=[1]", "global_profiler.tool=nsys"]
    assert cli.main(command) == 2
    assert "put `nsys profile --trace=cuda,nvtx,cublas --capture-range=cudaProfilerApi" in capsys.readouterr().err
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    assert cli.main(command) == 2
    assert "global_profiler.tool=nsys: needs a CUDA device" in capsys.readouterr().err


def test_ray_processes_get_the_options_of_nsys(overrides: list[str], tmp_path: Path) -> None:
    ray = [*overrides, "trainer.controller=ray"]
    assert nsys_environment(load_config(PPOConfig, ray), "worker") == {}
    assert _timeline_file(load_config(PPOConfig, ray)) is None
    seeds = ["trainer.worker_nsight_options={trace: 'cuda,nvtx', cuda-memory-usage: 'true', kill: none}"]
    config = load_config(PPOConfig, [*ray, "trainer.profile_steps=[1]", "global_profiler.tool=nsys", *seeds])
    folder = tmp_path / "run" / "profile"
    assert nsys_environment(config, "worker")["runtime_env"]["nsight"] == {
        "trace": "cuda,nvtx",
        "cuda-memory-usage": "true",
        "cuda-graph-trace": "graph",  # the other options keep their defaults
        "capture-range": "cudaProfilerApi",
        "kill": "none",
        "capture-range-end": "repeat",
        "o": f"{folder}/nsys",
    }
    assert nsys_environment(config, "controller")["runtime_env"]["nsight"] == {
        "trace": "cuda,nvtx,cublas,ucx",
        "cuda-memory-usage": "true",
        "cuda-graph-trace": "graph",
        "o": f"{folder}/nsys/controller",
    }
    assert _timeline_file(config) == f"{folder}/ray_timeline.json"


def test_keys_of_verls_roles_are_read_as_the_global_ones(
    overrides: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    keys = [f"{ACTOR}.profiler.tool_config.torch.contents=[cpu]", "critic.profiler.tool=torch"]
    keys += ["global_profiler.steps=[2]", "actor_rollout_ref.rollout.profiler.all_ranks=true"]
    follows = f"'${{oc.select:{TOOLS}.nsys.discrete}}'"
    config = load_config(PPOConfig, [*overrides, *keys, f"critic.profiler.tool_config.nsys.discrete={follows}"])
    assert (config.trainer.profile_steps, config.global_profiler.tool) == ([2], "torch")
    assert config.global_profiler.global_tool_config.torch.contents == ["cpu"]
    assert config.global_profiler.global_tool_config.nsys.discrete is False
    assert config.actor_rollout_ref.actor.profiler.all_ranks
    with caplog.at_level(logging.WARNING):
        load_config(PPOConfig, [*overrides, *keys, f"{TOOLS}.nsys.discrete=true"])
        load_config(PPOConfig, [*overrides, f"{TOOLS}.torch.discrete=true"])
    assert f"{TOOLS}.nsys.discrete=True has no effect: global_profiler.tool is torch" in caplog.text
    assert f"{TOOLS}.torch.discrete=True has no effect: trainer.profile_steps is empty" in caplog.text
