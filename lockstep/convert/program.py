"""`lockstep convert`."""
