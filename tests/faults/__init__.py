"""Faults injected into real training runs: `make test-all` runs a few of them, `make chaos` hundreds.

    baseline: undisturbed run ─────────────────────────────────────► weights, metrics, loader state
    case:     run with one fault ─► exit code, message ─► resume ──► the same, bit for bit; nothing left behind

server.py forks runs from a process that has imported torch; shim.py injects faults at file-system events; runs.py starts and
compares runs; cases.py has the kinds of faults and what each may lead to.
"""
