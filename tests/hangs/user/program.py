"""A program that holds a conversation: one request to the policy."""

import json
import os
import sys
import urllib.request

from tests.hangs.plants import hang_here, is_now

row = json.load(sys.stdin)
if is_now("program"):
    hang_here()
body = {"model": "policy", "messages": row["prompt"], "max_tokens": 4}
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
print(0.5)
