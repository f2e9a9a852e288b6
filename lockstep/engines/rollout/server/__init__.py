"""Rollout by inference servers that are already running.

engine.py            requests, updates and proof behind `RolloutEngine`
pool.py              which server gets a request; retries, deadlines
inference_server.py  one server: its protocol, load and health
protocols.py         what vLLM, SGLang and OpenAI-compatible servers are asked, and what they answer
tgi.py               the same for text-generation-inference; prompt_text.py: prompts as text
http.py              the connection to one server
weights.py           how new weights reach them; reload.py: by a folder and a command, if they cannot take any
"""
