"""Sandbox for untrusted programs and graders."""

from lockstep.rewards.sandbox.process import (
    Limits as Limits,
    Sandbox as Sandbox,
    SandboxedProcess as SandboxedProcess,
    SandboxError as SandboxError,
    announce as announce,
    configure as configure,
    isolation as isolation,
)
