"""`lockstep dashboard`: one local web page over the folders of runs.

run folders ─► readers (runs.py, metrics_store.py, ...) ─► api/ (JSON, one file per panel) ─► app.py (HTTP) ─► static/ (the page)

Everything is read from what runs write; nothing here is needed to train, and nothing is written into a run's folder.
"""
