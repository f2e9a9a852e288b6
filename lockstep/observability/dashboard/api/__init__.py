"""The JSON that the page asks for: one file per panel, each with its `ROUTES` (path to function).

A file may have `recorded` (`request.Recorder`): the requests whose answers are part of an exported page (`export.py`).
"""
