"""Watches a run: which phase is stuck, which process or service is the cause, and a report of what all processes do."""
