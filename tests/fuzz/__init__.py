"""Fuzzing of what reads strangers' bytes: atheris here, schemathesis in `tests.fuzz.api`."""

MODULES = {
    "head": "tests.fuzz.head",
    "chunks": "tests.fuzz.head",
    "sse": "tests.fuzz.sse",
    "body": "tests.fuzz.body",
    "config": "tests.fuzz.config",
    "identity": "tests.fuzz.identity",
    "limits": "tests.fuzz.limits",
    "replies": "tests.fuzz.replies",
}
"""Where each target is. They are imported late: what they import is instrumented then."""
