"""The command and the programs of endpoint.md run, on a tiny model."""

import asyncio
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lockstep.models.tokenizer import hf_tokenizer
from lockstep.protocol.generation import Completion, GenerationRequest
from tests.programs import Program, run_python
from tests.tiny import save_tiny_model

PAGE = (Path(__file__).parents[2] / "docs" / "endpoint.md").read_text()


def program_of(name: str) -> str:
    (text,) = re.findall(rf"```python\n# {name}\n(.*?)```", PAGE, flags=re.S)
    return str(text)


def test_a_client_talks_to_the_served_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    step = tmp_path / "global_step_100"
    save_tiny_model(step / "actor" / "huggingface")
    (line,) = re.findall(r"^lockstep serve .*$", re.findall(r"```bash\n(.*?)```", PAGE, flags=re.S)[0], flags=re.M)
    words = shlex.split(line.replace("$RUN", str(tmp_path)).replace("--port 8000", "--port 0"))
    server = Program("lockstep.serve", [*words[2:], "--device", "cpu"], tmp_path)
    assert server.until(lambda: "serving policy at" in server.stdout), server.stderr
    url = server.stdout.split(" at ")[1].split()[0]
    assert run_python(["-c", program_of("client.py").replace("http://127.0.0.1:8000/v1", url)]) == 0
    assert capfd.readouterr().out
    server.signal(signal.SIGINT)
    assert server.wait() == 0, server.stderr


def test_the_endpoint_of_a_training_run(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(save_tiny_model(tmp_path / "model"))
    names: dict[str, Any] = {}
    exec(program_of("in_training.py"), names)

    async def generate(request: GenerationRequest) -> Completion:
        return Completion([5, tokenizer.eos_token_id], [-1.0, -2.0], "stop", [4, 4])

    async def agent(url: str) -> None:
        async with httpx2.AsyncClient(base_url=url) as client:
            body = {"model": "policy", "messages": [{"role": "user", "content": "1+1?"}]}
            assert (await client.post("/chat/completions", json=body)).status_code == 200

    (branch,) = asyncio.run(names["rollout"](generate, tokenizer, agent))
    assert branch.response_ids == [5, tokenizer.eos_token_id] and branch.log_probs == [-1.0, -2.0]
