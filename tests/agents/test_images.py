"""Conversations with images: in the prompt, in a tool's result and in messages from outside."""

import asyncio
import base64
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.agents.agents import Agents
from lockstep.agents.endpoint.recorder import SessionRecorder, trajectory_of
from lockstep.agents.environments.environment import Calls, with_observation
from lockstep.agents.environments.gym import SkyrlEpisode
from lockstep.agents.interactions.simulated_user import from_the_users_side
from lockstep.agents.trajectory import Trajectory
from lockstep.data.image_prompts import ImageEncoder
from lockstep.data.images import ImageError, data_uri, read_image
from lockstep.models.processor import load_processor
from lockstep.observability.show_rollouts import _answer_lines
from lockstep.protocol import DataProto, object_array
from lockstep.protocol.generation import Completion, SamplingParams
from lockstep.protocol.images import IMAGES, ImageInputs, content_ids
from lockstep.rewards.model_judge import as_text
from lockstep.trainer.ppo.agent_rollout import with_responses
from lockstep.utils.state_file import from_bytes, to_bytes
from tests.agents.scripted import END, TOKENIZER, Scripted, call, converse, make_agents
from tests.tiny_vision import image_message, save_tiny_vision_model, tiny_image

TOOLS = """
from PIL import Image
from lockstep.agents.schemas import ToolResponse
from lockstep.agents.tools.tool import BaseTool

class Draw(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        side = parameters.get("side", 32)
        if side < 0:
            return ToolResponse(text="filmed", video=["a.mp4"]), None, {}
        images = [Image.new("RGB", (side, 32), "red")] if side else ["no such file.png"]
        return ToolResponse(text="drawn <image>", image=images), None, {}
"""
CONFIG = """
tools:
  - class_name: {path}/drawing.py:Draw
    config: {{}}
    tool_schema:
      type: function
      function:
        name: draw
        description: draws
        parameters: {{type: object, properties: {{side: {{type: integer}}}}, required: []}}
"""


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_tiny_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")
    return load_processor(folder)


LOOPS = "lockstep.verl.experimental.agent_loop"
OWN_LOOP = """
from PIL import Image
from lockstep.verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from lockstep.verl.tools.schemas import ToolResponse

class Loop(ToolAgentLoop):
    async def _call_tool(self, tool_call, tools_kwargs, agent_data):
        if "side" in tool_call.arguments:
            return ToolResponse(text="filmed", video=["a.mp4"]), None, {}
        return ToolResponse(text="mine", image=[Image.new("RGB", (64, 32), "red")]), None, {}
"""


def agents_with(processor: Any, folder: Path, **settings: Any) -> Agents:
    (folder / "drawing.py").write_text(TOOLS)
    (folder / "tools.yaml").write_text(CONFIG.format(path=folder))
    config = replace(make_agents(tool_config_path=str(folder / "tools.yaml"), **settings).config, prompt_length=300)
    tokenizer = TOKENIZER if processor is None else processor.tokenizer
    return Agents(config, tokenizer, [END], processor=processor)


def row_with_image(processor: Any) -> tuple[dict[str, Any], list[int], ImageInputs]:
    picture = read_image(tiny_image(48, 32))
    (message,) = image_message("what?")
    text = processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    ids, images = ImageEncoder(processor)(text, [picture])
    message["content"][0]["image"] = data_uri(picture)
    return {"raw_prompt": [message], "raw_prompt_ids": ids, IMAGES: images}, ids, images


def held(agents: Agents, policy: Scripted) -> Any:
    """A conversation about an image, by the default loop of `agents`."""
    row, ids, images = row_with_image(agents.renderer.encoder.processor)  # type: ignore[union-attr]
    loop = agents.config.agent.default_agent_loop

    async def hold() -> Any:
        async with agents.running():
            return await agents.hold(row | {"agent_name": loop}, ids, policy, SamplingParams(max_tokens=400), seed=1)

    result = asyncio.run(hold())
    assert policy.requests[0].prompt_ids == ids and policy.requests[0].images.digests == images.digests
    for request in policy.requests:  # each has as many placeholders as features
        content_ids(request.prompt_ids, request.images)
    return result


def test_an_image_of_a_tool_is_context(processor: Any, tmp_path: Path) -> None:
    script = (call("draw"), call("draw", side=0), call("draw", side=64), "red")
    policy = Scripted(*script, tokenizer=processor.tokenizer)
    result = held(agents_with(processor, tmp_path, loop="tool_agent"), policy)
    trajectory = result.trajectory
    assert trajectory.images is not None and trajectory.images.num_tokens == (6, 4, 8)
    token = trajectory.images.token_id
    assert not any(mask for id, mask in zip(trajectory.response_ids, trajectory.response_mask) if id == token)
    decoded = processor.tokenizer.decode(trajectory.response_ids)
    assert "drawn <image>" in decoded and "no such file" in decoded  # text that looks like a placeholder stays text
    assert result.counts.tool_errors == 1
    shown = [
        part["image"][:15] for m in result.new_messages if isinstance(m["content"], list) for part in m["content"][:1]
    ]
    assert shown == ["data:image/png;"] * 2
    assert (
        Trajectory.from_state(from_bytes(to_bytes(trajectory.to_state(), "test"))).images.digests
        == trajectory.images.digests
    )  # type: ignore[union-attr]


def test_loops_on_token_ids_keep_images(processor: Any, tmp_path: Path) -> None:
    """verl's loops: the same tokens and images as the built-in one; images of a subclass's own calls."""
    script = (call("draw"), call("draw", side=0), call("draw", side=64), "red")
    loops = (f"{LOOPS}.tool_agent_loop:ToolAgentLoop", "tool_agent")
    made = [agents_with(processor, tmp_path, loop=loop) for loop in loops]
    theirs, own = (held(agents, Scripted(*script, tokenizer=processor.tokenizer)) for agents in made)
    for name in ("prompt_ids", "response_ids", "response_mask"):
        assert getattr(theirs.trajectory, name) == getattr(own.trajectory, name), name
    assert theirs.trajectory.images.digests == own.trajectory.images.digests
    assert theirs.trajectory.images.num_tokens == (6, 4, 8) and theirs.counts.tool_errors == 1
    single = agents_with(processor, tmp_path, loop=f"{LOOPS}.single_turn_agent_loop:SingleTurnAgentLoop")
    assert held(single, Scripted("red", tokenizer=processor.tokenizer)).trajectory.images.num_tokens == (6,)
    (tmp_path / "mine.py").write_text(OWN_LOOP)
    mine = agents_with(processor, tmp_path, loop=f"{tmp_path}/mine.py:Loop")
    result = held(mine, Scripted(call("draw"), "red", tokenizer=processor.tokenizer))
    assert result.trajectory.images.num_tokens == (6, 8) and result.new_messages[1]["content"][1]["text"] == "mine"
    with pytest.raises(ValueError, match="_call_tool returned a video; text and images are supported"):
        held(mine, Scripted(call("draw", side=1), tokenizer=processor.tokenizer))


def test_a_model_without_images_answers_the_tool_with_an_error(tmp_path: Path) -> None:
    done = converse(agents_with(None, tmp_path), Scripted(call("draw"), "well"))
    assert done.counts.tool_errors == 1 and "reads only text" in done.messages[-2]["content"]
    done = converse(agents_with(None, tmp_path), Scripted(call("draw", side=-1), "well"))
    assert done.counts.tool_errors == 1 and "the tool returned a video" in done.messages[-2]["content"]


def test_images_from_outside_must_be_data(processor: Any) -> None:
    renderer = agents_renderer(processor)
    uri = data_uri(read_image(tiny_image()))
    raw = base64.b64decode(uri.partition(",")[2])
    for part in (
        {"type": "image_url", "image_url": {"url": uri}},
        {"type": "image_url", "image_url": uri},
        {"type": "image", "image": raw},
        {"type": "image", "image": tiny_image()},
    ):
        (plain,) = renderer.plain_messages(
            [{"role": "user", "content": [part, {"type": "text", "text": "a<|im_end|>"}]}]
        )
        assert plain["content"][0]["image"].startswith("data:image/png;base64,")
        assert plain["content"][1]["text"] == "a< |im_end|>"
    for given in (
        "/etc/hostname",
        "http://localhost/x.png",
        {"path": "/etc/hostname"},
        {"url": "file:///etc/hostname"},
    ):
        with pytest.raises(ImageError, match="not a data URI"):
            renderer.plain_messages([{"role": "user", "content": [{"type": "image", "image": given}]}])
    with pytest.raises(ValueError, match="message 0 has type 'video'; text and image are supported"):
        renderer.plain_messages([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}])
    with pytest.raises(ImageError, match="not valid base64"):
        renderer.plain_messages([{"role": "user", "content": [{"type": "image", "image": "data:image/png;base64,?"}]}])


def test_only_the_data_of_an_image_is_read(processor: Any, tmp_path: Path) -> None:
    tiny_image().save(tmp_path / "secret.png")
    uri = data_uri(read_image(tiny_image(32, 32)))
    renderer = agents_renderer(processor)
    bare = {"type": "image", "base64": uri.partition(",")[2], "path": str(tmp_path / "secret.png")}
    (plain,) = renderer.plain_messages([{"role": "user", "content": [bare]}])
    assert plain["content"] == [{"type": "image", "image": uri}]
    for given in ({"image": str(tmp_path / "secret.png"), "base64": "AA=="}, {"image": tmp_path / "secret.png"}):
        with pytest.raises(ImageError, match="not a data URI"):
            renderer.plain_messages([{"role": "user", "content": [{"type": "image", **given}]}])


PROGRAM = """
import json, os, sys, urllib.request
body = json.dumps({"model": "any", "messages": json.load(sys.stdin)["prompt"]}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
"""


@pytest.mark.parametrize("loop", ["program_agent", "react_agent"])
def test_programs_and_graphs_get_the_images_of_their_row(processor: Any, tmp_path: Path, loop: str) -> None:
    if loop == "react_agent":
        pytest.importorskip("langgraph", reason="needs LangGraph: pip install 'lockstep-rl[langgraph]'")
    (tmp_path / "agent.py").write_text(PROGRAM)
    agents = agents_with(processor, tmp_path, loop=loop)
    program = replace(agents.config.agent.program, command=[sys.executable, str(tmp_path / "agent.py")])
    config = replace(agents.config, agent=replace(agents.config.agent, program=program))
    agents = Agents(config, processor.tokenizer, [END], processor=processor)
    row, _, _ = row_with_image(processor)
    row["raw_prompt"][0]["content"].append({"type": "text", "text": "a<|im_end|>b"})
    ids, images = agents.renderer.ids_and_images(row["raw_prompt"], agents.tools_of(row | {"agent_name": loop}))
    policy = Scripted("red", tokenizer=processor.tokenizer)

    async def hold() -> Any:
        async with agents.running():
            return await agents.hold(row | {"agent_name": loop}, ids, policy, SamplingParams(max_tokens=400), seed=1)

    result = asyncio.run(hold())
    assert result.failure is None and result.trajectory.prompt_ids == ids
    assert result.trajectory.images.digests == images.digests  # type: ignore[union-attr]


def test_observations_follow_the_images_of_a_prompt() -> None:
    prompt = [{"role": "user", "content": [{"type": "image", "image": "data:,"}, {"type": "text", "text": "Q"}]}]
    added = [*prompt[0]["content"], {"type": "text", "text": "\n\nGo."}]
    assert with_observation(prompt, "Go.") == [{"role": "user", "content": added}] and len(prompt[0]["content"]) == 2

    class Env:
        def init(self, messages: Any) -> Any:
            return [*messages, {"role": "user", "content": 3}], {}

    episode = SkyrlEpisode(Calls("env", 5), lambda **_: Env(), None, {})
    assert asyncio.run(episode.begin(prompt)) == [*prompt, {"role": "user", "content": "3"}]


def test_texts_about_messages_have_a_word_for_an_image() -> None:
    prompt = [{"role": "user", "content": [{"type": "image", "image": "data:,"}, {"type": "text", "text": "Q"}]}]
    answer = {"role": "assistant", "content": "A"}
    assert as_text(prompt) == "<image>Q" and as_text([*prompt, answer]) == "[user]\n<image>Q\n\n[assistant]\nA"
    assert from_the_users_side(prompt, "Begin.")[1] == {"role": "assistant", "content": "<image>Q"}
    assert list(_answer_lines({"messages": [answer, *prompt], "output": ""}, 0, ""))[-1] == "  <image>Q"


def agents_renderer(processor: Any) -> Any:
    return Agents(make_agents().config, processor.tokenizer, [END], processor=processor).renderer


def test_recorded_turns_keep_their_images(processor: Any) -> None:
    recorder = SessionRecorder(agents_renderer(processor))

    def message(seed: int) -> dict[str, Any]:
        parts = [{"type": "image", "image": tiny_image(32, 32, seed=seed)}, {"type": "text", "text": "and?"}]
        (plain,) = recorder.renderer.plain_messages([{"role": "user", "content": parts}])
        return plain

    first = recorder.prompt_for([message(1)])
    other = recorder.prompt_for([message(2)])
    assert first.ids == other.ids and content_ids(first.ids, first.images) != content_ids(other.ids, other.images)
    completion = Completion([40, END], [0.0, 0.0], "stop", [0, 0])
    answer = {"role": "assistant", "content": "x"}
    recorder.add(first, answer, completion, trainable=True)
    again = recorder.prompt_for([message(1), answer, message(3)])
    assert again.parent is not None and again.images is not None and len(again.images.num_tokens) == 2
    content_ids(again.ids, again.images)
    leaf = recorder.add(again, answer, completion, trainable=True)
    assert trajectory_of(leaf).images.num_tokens == again.images.num_tokens  # type: ignore[union-attr]


def test_images_of_a_batch_are_saved_once_and_replaced_by_those_of_the_conversation(processor: Any) -> None:
    _, ids, images = row_with_image(processor)
    longer = images.then(images)
    rows = DataProto.from_dict(
        non_tensors={"raw_prompt_ids": object_array([ids] * 3), IMAGES: object_array([images] * 3)}
    )
    content = to_bytes(rows.to_state(), "test")
    assert len(content) < 2 * len(to_bytes(rows[:1].to_state(), "test"))
    back = DataProto.from_state(from_bytes(content)).non_tensor_batch[IMAGES]
    assert back[0] is back[2] and back[0].files == images.files and back[0].num_tokens == images.num_tokens
    assert (
        back[0].digests == images.digests and (back[0].tensors["pixel_values"] == images.tensors["pixel_values"]).all()
    )
    both = with_responses(rows, DataProto.from_dict(non_tensors={IMAGES: object_array([longer, None, images])}))
    assert both.non_tensor_batch[IMAGES].tolist() == [longer, None, images]
