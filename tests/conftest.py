"""Settings of all tests."""

import hypothesis

# the same examples on every machine and no clock, so that a busy machine fails nothing
hypothesis.settings.register_profile("lockstep", derandomize=True, deadline=None)
hypothesis.settings.load_profile("lockstep")
