"""An agent that multiplies with a calculator, for any server with the protocol of OpenAI. Standard library only.

It gets a problem on stdin, {"prompt": [{"role": "user", "content": "47*85"}], "ground_truth": "3995", ...}, lets the model call the
calculator up to twice, and prints whether the model's last words are "=" and the right product.
"""

import json
import os
import re
import sys
import urllib.request

MAX_TURNS = 3
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Such as 12*34."}},
            "required": ["expression"],
        },
    },
}


def chat(messages: list[dict]) -> dict:
    """The model's next message."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "gpt-4o-mini", "messages": messages, "tools": [CALCULATOR]}).encode(),
        {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def calculate(arguments: str) -> str:
    try:
        factors = re.fullmatch(r"(\d+)\*(\d+)", json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError):
        factors = None
    return str(int(factors[1]) * int(factors[2])) if factors else "Error"


def main() -> None:
    problem = json.load(sys.stdin)
    messages = problem["prompt"]
    for _ in range(MAX_TURNS):
        answer = chat(messages)
        messages.append(answer)
        if not answer.get("tool_calls"):
            break
        for call in answer["tool_calls"]:
            result = calculate(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    print(json.dumps({"reward": float(answer.get("content") == "=" + problem["ground_truth"])}))


if __name__ == "__main__":
    main()
