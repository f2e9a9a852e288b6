"""Hangs planted in real training runs: `make test-all` runs a few of them, `python -m tests.hangs` sixty.

    run with one hang ─► exit code 3 within its deadline ─► the verdict names the culprit and nobody else, the report has its stack

plants.py has the ways to hang and when; user/ has what a user could write: rewards, tools, datasets; shim.py hangs inside of our
own processes; cases.py has the kinds of hangs and the culprit of each. Runs are started by the Lab of tests/faults.
"""
