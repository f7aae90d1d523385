"""Fuzzing of what reads strangers' bytes: atheris here, schemathesis in `tests.fuzz.api`."""
