"""Sandbox for untrusted programs and graders."""

from lockstep.rewards.sandbox.process import (
    Limits,
    Sandbox,
    SandboxedProcess,
    SandboxError,
    announce,
    configure,
    isolation,
)

__all__ = ["Limits", "Sandbox", "SandboxError", "SandboxedProcess", "announce", "configure", "isolation"]
