"""Tool use: tool schemas and parsers of a model's tool calls."""
