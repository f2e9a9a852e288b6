"""Errors of the export, apart from torch."""


class CheckFailed(Exception):
    """The exported folder is not the checkpoint's model."""
