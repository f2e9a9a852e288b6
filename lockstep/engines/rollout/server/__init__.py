"""Rollout by inference servers that are already running.

engine.py      requests, updates and proof behind `RolloutEngine`
pool.py        which server gets a request; retries, deadlines
http.py        one server: its connection, load and health
protocols.py   what vLLM, SGLang and OpenAI-compatible servers are asked, and what they answer
weights.py     how new weights reach them
"""
