"""Conversations with tools: tool schemas and the parsers of a model's tool calls."""
