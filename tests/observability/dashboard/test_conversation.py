"""The conversation panel: its answers, and the page in a browser."""

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.observability.dashboard.api.conversation import shown_pieces
from lockstep.observability.dashboard.app import APIS, json_response
from lockstep.observability.dashboard.request import ApiRequest
from lockstep.observability.dashboard.runs import Runs
from lockstep.observability.image_files import write_images
from tests.observability.dashboard.conftest import OpenPage, Serve
from tests.observability.dashboard.made_conversations import (
    CONTEXT,
    HOSTILE,
    LONG,
    LONG_CHARS,
    LONG_TOKENS,
    MARKUP,
    ODD,
    PIXEL,
    TOOLS,
    WITHOUT_TOKENS,
    make_conversations,
)


def ask(run: Path, path: str, row: int = 0, **params: Any) -> Any:
    """The answer as the page gets it, or {"error": ...}."""
    query = {"run": run.name, "kind": "train", "step": 1, "row": row} | params
    request = ApiRequest(Runs([run]), {name: str(value) for name, value in query.items()})
    try:
        return json.loads(bytes(json_response(APIS[path](request)).body))
    except (ValueError, OSError) as error:
        return {"error": str(error)}


def test_images_of_the_prompt_are_files_beside_the_dump(tmp_path: Path) -> None:
    run = make_conversations(tmp_path / "run")
    dump = run / "rollouts" / "1.jsonl"
    picture = base64.b64decode(PIXEL)
    names = write_images(dump.parent, [(picture, picture), ()])
    assert [len(row) for row in names] == [2, 0] and names[0][0] == names[0][1]
    assert write_images(dump.parent, [(picture, picture)]) == names[:1]
    assert [file.read_bytes() for file in (dump.parent / "images").iterdir()] == [picture]
    rows = dump.read_bytes().splitlines()
    images = [names[0][0], "images/../../secret.png", f"images/{'0' * 32}.png"]
    rows[0] = json.dumps(json.loads(rows[0]) | {"images": images}).encode()
    dump.write_bytes(b"\n".join(rows) + b"\n")
    places = ask(run, "/api/conversation", TOOLS)["images"]
    found = [ask(run, "/api/conversation/image", TOOLS, place=json.dumps(place)) for place in places]
    assert found[0] == {"uri": f"data:image/png;base64,{PIXEL}"}
    assert "not an embedded" in found[1]["error"] and "No such file" in found[2]["error"]
    assert ask(run, "/api/conversation", HOSTILE)["images"] == []


def test_no_more_images_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.observability.image_files.MOST_BYTES", 10)
    rows = [(bytes([number]) * 6,) for number in range(2)]
    assert [len(names) for names in write_images(tmp_path, rows)] == [1, 0]


def test_turns_with_tool_calls_rewards_and_images(tmp_path: Path) -> None:
    run = make_conversations(tmp_path / "run")
    data = ask(run, "/api/conversation", TOOLS)
    assert [turn["role"] for turn in data["turns"]] == ["assistant", "tool", "assistant", "tool", "user", "assistant"]
    assert [turn["reward"] for turn in data["turns"]] == [0.5, None, -0.25, None, None, 1.0]
    assert [turn["failed"] for turn in data["turns"]] == [False, False, False, True, False, False]
    (call,) = data["turns"][0]["calls"]
    assert call["name"] == "double" and call["arguments"]["text"] == '{"x": 2}'
    said, image, elsewhere = data["turns"][4]["parts"]
    assert said["text"]["text"] == "Look:" and elsewhere == {"note": "image: http://example.invalid/x.png"}
    found = ask(run, "/api/conversation/image", TOOLS, place=json.dumps(image["image"]))
    assert found == {"uri": f"data:image/png;base64,{PIXEL}"}
    assert "not an embedded" in ask(run, "/api/conversation/image", TOOLS, place='["output"]')["error"]
    assert (data["rows"], data["step_neighbours"]) == (4, [None, HOSTILE])
    assert (data["group_size"], data["group_place"], data["group_neighbours"]) == (2, 0, [None, HOSTILE])
    assert (data["score"], data["length"], data["finish_reason"], data["index"]) == (0, 11, "stop", 3)
    assert data["prompt"]["text"] == "What is 2 + 2?" and data["expected"]["text"] == "4"
    assert data["extras"] == [{"name": "acc", "text": {"text": "true", "length": 4, "place": ["acc"]}}]
    assert data["counts"] == [{"name": "num_turns", "value": 7}]


def test_neighbours_match_the_filters(tmp_path: Path) -> None:
    run = make_conversations(tmp_path / "run")
    data = ask(run, "/api/conversation", TOOLS, min_score=0.5)
    assert (data["rows"], data["num_matching"], data["step_neighbours"]) == (4, 2, [None, LONG])
    assert data["group_neighbours"] == [None, HOSTILE], "the group is whole"
    assert ask(run, "/api/conversation", LONG, text="short")["step_neighbours"] == [None, WITHOUT_TOKENS]
    assert ask(run, "/api/conversation", WITHOUT_TOKENS)["step_neighbours"] == [LONG, None]


def test_hostile_text_is_text(tmp_path: Path) -> None:
    data = ask(make_conversations(tmp_path / "run"), "/api/conversation", HOSTILE)
    (turn,) = data["turns"]
    assert turn["parts"][0]["text"]["text"] == (MARKUP + ODD).replace("\ud800", "?")
    assert data["extras"][1]["name"] == MARKUP
    assert data["extras"][2]["text"]["text"] == json.dumps({"a": [MARKUP]})


def test_long_answers_come_in_parts(tmp_path: Path) -> None:
    run = make_conversations(tmp_path / "run")
    (turn,) = ask(run, "/api/conversation", LONG)["turns"]
    cut = turn["parts"][0]["text"]
    assert (len(cut["text"]), cut["tail"][-3:], cut["length"]) == (20_000, "END", LONG_CHARS)
    page = ask(run, "/api/conversation/text", LONG, place=json.dumps(cut["place"]), begin=LONG_CHARS - 5)
    assert page == {"text": "xxEND", "begin": LONG_CHARS - 5, "length": LONG_CHARS}
    assert len(ask(run, "/api/conversation/text", LONG, place='["output"]')["text"]) == 200_000
    for place in ("[", "{}", '["no"]', "[0]", '["output", "x"]'):
        assert ask(run, "/api/conversation/text", LONG, place=place)["error"], place


def test_an_answer_is_bounded_however_many_turns_there_are(tmp_path: Path) -> None:
    run = make_conversations(tmp_path / "run")
    messages = [{"role": "assistant", "content": "y" * 5000}] * 2000
    (run / "rollouts" / "1.jsonl").write_text(json.dumps({"input": "", "output": "", "score": 1, "messages": messages}))
    data = ask(run, "/api/conversation")
    assert data["num_turns"] == 2000 and len(data["turns"]) == 500 and len(json.dumps(data)) < 600_000
    assert data["turns"][-1]["parts"][0]["text"]["length"] == 5000


@pytest.mark.parametrize("step", ["x" * 1_000_000, [[[1]]], {"a": 1}, 10**400, True])
def test_a_step_that_is_not_a_number(tmp_path: Path, step: Any) -> None:
    run = make_conversations(tmp_path / "run")
    dump = run / "rollouts" / "1.jsonl"
    rows = [json.loads(line) | {"step": step} for line in dump.read_text().splitlines()]
    dump.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert ask(run, "/api/conversation", TOOLS)["step"] is None


def test_tokens_in_pages_with_their_numbers(tmp_path: Path) -> None:
    run = make_conversations(tmp_path / "run")
    data = ask(run, "/api/tokens", TOOLS)
    assert data["num_tokens"] == 11 and data["pieces"][:2] == ["I", " double"] and data["ids"] == list(range(11))
    assert [place for place, trained in enumerate(data["mask"]) if not trained] == list(CONTEXT)
    assert all(data["numbers"]["rollout_log_probs"][place] is None for place in CONTEXT)
    assert (data["least_likely"], data["largest_gap"]) == (2, 8)
    assert data["numbers"]["rollout_log_probs"][2:4] == [-9, -0.01] and data["numbers"]["gap"][8] == pytest.approx(0.7)
    assert data["turns"] == [[0, 4, True], [4, 7, False], [7, 11, True]]
    assert data["versions"][0] == 3 and data["versions"][-1] == 5 and data["version_range"] == [3, 5]
    assert data["missing"] == {}
    prompt = ask(run, "/api/tokens", TOOLS, of="prompt")
    assert prompt["pieces"] == ["<|im_start|>", "What is 2 + 2?\n"]
    last = ask(run, "/api/tokens", LONG, begin=10_000)
    assert (last["num_tokens"], len(last["ids"]), last["least_likely"]) == (LONG_TOKENS, 2000, 11_000)
    assert len(ask(run, "/api/tokens", LONG)["ids"]) == 5000 and ask(run, "/api/tokens", LONG, begin=10**9)["ids"] == []


def test_characters_that_are_split_over_tokens() -> None:
    pieces = [b"a", b" \xe4", b"\xb8", b"\xad\xf0\x9f", b"\x98\x80", b"b", b"\xff", b""]
    assert shown_pieces(pieces, slice(0, 100)) == [
        "a",
        {"hex": "20 e4", "of": "中"},
        {"hex": "b8", "of": "中"},
        {"hex": "ad f0 9f", "of": "中😀"},
        {"hex": "98 80", "of": "😀"},
        "b",
        {"hex": "ff"},
        "",
    ]


def test_what_is_missing_or_damaged_is_said(tmp_path: Path) -> None:
    run = make_conversations(tmp_path / "run", old_log_probs="update")
    tokens = run / "rollouts" / "1.tokens.parquet"
    assert "old_log_prob_pass=always" in ask(run, "/api/tokens", TOOLS)["missing"]["gap"]
    assert "trainer.rollout_token_rows" in ask(run, "/api/tokens", WITHOUT_TOKENS)["error"]
    assert "trainer.rollout_token_data=true" in ask(run, "/api/tokens", step=2)["error"]
    assert "no row 99" in ask(run, "/api/conversation", 99)["error"]
    assert "step 77 has no dump" in ask(run, "/api/conversation", step=77)["error"]
    assert "must be one of train, validation" in ask(run, "/api/conversation", kind="x")["error"]
    tokens.write_bytes(tokens.read_bytes()[:200])
    assert "cannot be read" in ask(run, "/api/tokens")["error"]
    shutil.copy(run / "rollouts" / "2.jsonl", run / "rollouts" / "1.jsonl")
    make_conversations(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "rollouts" / "1.tokens.parquet", tokens)
    assert "is not of this 1.jsonl" in ask(run, "/api/tokens")["error"]
    (run / "rollouts" / "1.jsonl").write_bytes(b"\xff\x00garbage\n[1]\n" + b"[" * 100_000 + b"\n")
    for row in range(3):
        assert "there is no row" in ask(run, "/api/conversation", row)["error"]
    odd = {"messages": [1, None, {"role": 3, "content": {"a": 1}, "tool_calls": [7, {"function": 1}]}], "score": "x"}
    odd |= {"turn_rewards": ["x"], "non_finite": 3, "uid": 5, "gts": [], "input": 7, "step": [], "index": 10**400}
    (run / "rollouts" / "1.jsonl").write_text(json.dumps(odd) + "\n")
    data = ask(run, "/api/conversation")
    assert [turn["role"] for turn in data["turns"]] == ["?", "?", "3"] and data["prompt"]["text"] == "7"
    shutil.rmtree(run)
    assert "error" in ask(run, "/api/conversation")


def test_the_dashboard_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    run = make_conversations(tmp_path / "run")
    code = f"""
import sys
from pathlib import Path
from lockstep.observability.dashboard.app import APIS
from lockstep.observability.dashboard.request import ApiRequest
from lockstep.observability.dashboard.runs import Runs
assert "pyarrow" not in sys.modules
request = ApiRequest(Runs([Path({str(run)!r})]), dict(run="run", step="1", row="0"))
assert APIS["/api/tokens"](request)["num_tokens"] == 11
assert not {{"torch", "transformers"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_conversation_in_the_browser(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    url = serve(make_conversations(tmp_path / "run"))
    page = open_page(f"{url}/#/conversation?run=run&kind=train&step=1&row={TOOLS}")
    page.wait_for_selector(".token")
    assert page.locator(".turn").count() == 8, "prompt, six turns, expected"
    assert page.locator(".turn img").get_attribute("src").startswith("data:image/png")
    assert "failed" in page.locator(".turn").nth(4).inner_text()
    assert "reward 0.5" in page.locator(".turn").nth(1).inner_text()
    assert "Conversation" not in page.locator("#tabs a").all_inner_texts()
    details, tokens = page.locator(".details"), page.get_by_role("listbox")
    assert details.inner_text().startswith('token 1: "I" | id 0')
    tokens.focus()
    page.keyboard.press("ArrowRight")
    assert details.inner_text().startswith('token 2: " double"')
    assert tokens.get_attribute("aria-activedescendant") == "token-1"
    page.keyboard.press("End")
    assert "token 11" in details.inner_text() and "policy version 5" in details.inner_text()
    page.locator("[role=listbox] .token").nth(CONTEXT[1]).hover()
    assert "not written by the policy | not trained on" in details.inner_text()
    page.get_by_role("button", name="Least likely token").click()
    assert 'token 3: " 2"' in details.inner_text() and "log-prob -9" in details.inner_text()
    page.get_by_role("button", name="Largest gap").click()
    assert "token 9" in details.inner_text()
    page.get_by_role("button", name="Next turn").click()
    assert "token 1:" in details.inner_text(), "after the last turn comes the first"
    for colour in page.get_by_label("Colour by").locator("option").all():
        page.get_by_label("Colour by").select_option(colour.get_attribute("value"))
        assert page.locator(".legend li").count() >= 1
        assert f"colour={colour.get_attribute('value')}" in page.url
    page.get_by_label("Colour by").select_option("entropy")
    page.get_by_text("Tokens of the prompt").click()
    page.wait_for_selector("details .token")
    assert page.get_by_role("button", name="Previous of the group").is_disabled()
    page.get_by_role("button", name="Next of the group").click()
    page.wait_for_selector("text=response 2 of 4")
    page.wait_for_selector(".token")
    assert page.get_by_label("Colour by").input_value() == "entropy"


@pytest.mark.slow
def test_the_way_from_the_rollouts_and_back_keeps_the_filters(
    serve: Serve, open_page: OpenPage, tmp_path: Path
) -> None:
    url = serve(make_conversations(tmp_path / "run"))
    page = open_page(f"{url}/#/rollouts?run=run&step=1&view=rows&min_score=0.25&max_score=0.5", refused=True)
    page.get_by_role("link", name="Open conversation of row 1").click()
    page.wait_for_selector("text=of the 2 responses that match the filters")
    assert page.get_by_role("button", name="Previous of the step").is_disabled()
    page.get_by_role("button", name="Next of the step").click()
    page.wait_for_selector("text=response 3 of 4")
    assert page.get_by_role("button", name="Next of the step").is_disabled()
    page.get_by_role("button", name="All rollouts of the step").click()
    page.wait_for_selector("text=2 responses match")
    assert page.get_by_label("reward from").input_value() == "0.25"


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(380, True), (1600, False)])
def test_hostile_text_in_the_browser(serve: Serve, open_page: OpenPage, tmp_path: Path, width: int, dark: bool) -> None:
    url = serve(make_conversations(tmp_path / "run"))
    page = open_page(f"{url}/#/conversation?run=run&kind=train&step=1&row={HOSTILE}", width=width, dark=dark)
    page.wait_for_selector(".token")
    shown = page.locator(".turn.policy").inner_text()
    assert "<script>window.hacked = 1</script>" in shown
    assert (
        "⟨U+202E⟩abc" in shown and "zero⟨U+200B⟩width" in shown and "⟨U+001B⟩[31mred" in shown and "⟨U+0000⟩" in shown
    )
    assert page.evaluate("window.hacked") is None and page.locator("main script, main b, main img").count() == 0
    pieces = page.locator("[role=listbox] .token").all_inner_texts()
    assert (
        "⟨E4⟩" not in pieces
        and "·⟨E4⟩" not in pieces
        and "⟨20 E4⟩" in pieces
        and "⟨B8⟩" in pieces
        and "⟨empty⟩" in pieces
    )
    page.get_by_role("listbox").focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    assert 'bytes B8 of "中"' in page.locator(".details").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (
        "the page does not scroll sideways"
    )


@pytest.mark.slow
def test_ten_megabytes_in_the_browser(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    url = serve(make_conversations(tmp_path / "run", long_chars=10_000_000))
    page = open_page(f"{url}/#/conversation?run=run&kind=train&step=1&row={LONG}")
    page.wait_for_selector(".token")
    answer = page.locator(".turn.policy pre")
    assert len(answer.text_content()) < 23_000
    page.get_by_role("button", name="9,978,000 of 10,000,000 characters are left out").click()
    page.wait_for_selector("text=9,778,000 of 10,000,000 characters are left out")
    assert page.locator("[role=listbox] .token").count() == 5000
    page.get_by_role("button", name="Least likely token").click()
    page.wait_for_selector("text=token 11,001:")
    assert page.locator("[role=listbox] .token").count() == 2000
    page.get_by_role("button", name="Previous page").click()
    page.wait_for_selector("text=tokens 5,001 to 10,000 of 12,000")


@pytest.mark.slow
def test_a_response_without_tokens_in_the_browser(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    url = serve(make_conversations(tmp_path / "run"))
    page = open_page(f"{url}/#/conversation?run=run")
    page.wait_for_selector("text=Choose a response")


@pytest.mark.slow
def test_the_tokens_of_a_real_run_in_the_browser(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    from lockstep.trainer.main_ppo import main
    from tests.tiny import save_tiny_model, small_run, write_rows

    save_tiny_model(tmp_path / "model")
    write_rows(tmp_path / "train.parquet", 8)
    write_rows(tmp_path / "val.parquet", 2)
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': len(solution_str) / 10, 'own': 'checked'}\n"
    )
    run = tmp_path / "run"
    settings = [f"trainer.default_local_dir={run}", f"trainer.rollout_data_dir={run}/rollouts", "trainer.save_freq=0"]
    settings += ["trainer.rollout_token_data=true", "trainer.total_training_steps=1", "trainer.val_before_train=false"]
    assert main([*small_run(tmp_path), *settings]) == 0
    page = open_page(f"{serve(run)}/#/conversation?run=run&kind=train&step=1&row=3&colour=entropy")
    page.wait_for_selector("[role=listbox] .token")
    assert page.get_by_label("Colour by").input_value() == "entropy"
    length = json.loads((run / "rollouts/1.jsonl").read_text().splitlines()[3])["length"]
    assert page.locator("[role=listbox] .token").count() == length
    assert "value" in page.locator(".details").inner_text() and "checked" in page.locator(".extras").inner_text()
