"""Hub caches written by hand, and a Hub server on the loopback interface."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "a" * 40


def write_cache(cache: Path, repo: str, files: Path, kind: str = "model", commit: str = COMMIT) -> Path:
    """Put the files of a folder into a Hub cache under a repository's name; returns the snapshot."""
    stored = cache / f"{kind}s--{repo.replace('/', '--')}"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text(commit)
    return Path(shutil.copytree(files, stored / "snapshots" / commit))


def use_hub(
    monkeypatch: pytest.MonkeyPatch, cache: Path, url: str = "http://127.0.0.1:9", offline: bool = False
) -> None:
    """Point huggingface_hub, which reads the environment when it is imported, to this cache and server."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


@contextmanager
def hub_server(
    repositories: dict[str, dict[str, bytes]], gated: tuple[str, ...] = ()
) -> Iterator[tuple[str, list[str]]]:
    """A Hub with the files of some repositories (`datasets/org/name` for datasets); yields its URL and the files it has sent."""
    sent: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None: ...

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            repo, action, rest = _parse(path)
            files = repositories.get(repo)
            if repo in gated:
                self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
            elif files is None:
                self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
            elif action == "revision" and rest not in ("main", COMMIT):
                self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            elif action == "revision":
                self._answer(200, json.dumps({"id": repo.removeprefix("datasets/"), "sha": COMMIT}).encode())
            elif action == "tree":
                tree = [
                    {"type": "file", "path": n, "size": len(c), "oid": sha1(c).hexdigest()} for n, c in files.items()
                ]
                self._answer(200, json.dumps(tree).encode())
            else:
                content = files[rest.partition("/")[2]]
                if self.command == "GET":
                    sent.append(rest.partition("/")[2])
                self._answer(200, content, {"ETag": f'"{sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT})

        def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", sent
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _parse(path: str) -> tuple[str, str, str]:
    """(repository, action, rest) of `api/models/org/name/tree/main` and `org/name/resolve/main/file`."""
    parts = path.split("/")
    if parts[0] == "api":
        parts = parts[1:] if parts[1] == "datasets" else parts[2:]
    count = 3 if parts[0] == "datasets" else 2
    return (
        "/".join(parts[:count]),
        parts[count] if len(parts) > count else "revision",
        "/".join(parts[count + 1 :]) or "main",
    )


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
