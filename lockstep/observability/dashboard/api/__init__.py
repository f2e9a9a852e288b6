"""The JSON that the page asks for: one file per panel, each with its `ROUTES` (path to function)."""
