"""The panel "Talk": checkpoints of a run, one of them served, and a chat with it."""

import socket
from pathlib import Path
from typing import Any, cast

from lockstep.observability.dashboard.request import Api, ApiRequest, NotFound, Stream
from lockstep.observability.dashboard.runs import RunFolder
from lockstep.observability.dashboard.talk_server import Device
from lockstep.observability.status_file import read_status
from lockstep.utils.checkpoint_folder import STEP_FOLDER

DEVICES = ("cpu", "auto")
MOST_CHECKPOINTS = 500


def talk(request: ApiRequest) -> dict[str, Any]:
    """The checkpoints of a run, newest first, and the server if there is one."""
    found = checkpoints(request.run().folder)
    training = any(_is_training(run) for run in request.runs.all())
    return {
        "checkpoints": [folder.name for folder in found[:MOST_CHECKPOINTS]],
        "num_checkpoints": len(found),
        "training": training,
        "device": "cpu" if training else "auto",
        "server": request.talk.status(),
    }


def start(request: ApiRequest) -> dict[str, Any]:
    run = request.run()
    name = request.text("checkpoint")
    device = request.text("device")
    if device not in DEVICES:
        raise ValueError(f"device={device[:40]!r}: must be one of {', '.join(DEVICES)}")
    folder = next((folder for folder in checkpoints(run.folder) if folder.name == name), None)
    if folder is None:
        raise NotFound(f"{run.name} has no checkpoint {name!r} (any more)")
    request.talk.start(run.name, folder, cast(Device, device))
    return {"server": request.talk.status()}


def stop(request: ApiRequest) -> dict[str, Any]:
    request.talk.stop()
    return {"server": None}


def chat(request: ApiRequest) -> Stream:
    return Stream(request.talk.chat(request.body))


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints, largest step first."""
    found = [(int(match[1]), each) for each in run.iterdir() if (match := STEP_FOLDER.fullmatch(each.name))]
    return [folder for _, folder in sorted(found, reverse=True) if folder.is_dir()]


def _is_training(run: RunFolder) -> bool:
    """Whether its controller is a living process of this machine."""
    status = read_status(run.folder) or {}
    if status.get("state") != "running" or status.get("host") != socket.gethostname():
        return False
    return Path(f"/proc/{status.get('pid')}").exists()


ROUTES: dict[str, Api] = {"/api/talk": talk}
POSTS: dict[str, Api] = {"/api/talk/start": start, "/api/talk/stop": stop, "/api/talk/chat": chat}
