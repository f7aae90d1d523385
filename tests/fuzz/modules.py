"""Where each fuzz target is. They are imported late: what they import is instrumented then."""

MODULES = {
    "head": "tests.fuzz.head",
    "chunks": "tests.fuzz.head",
    "sse": "tests.fuzz.sse",
    "body": "tests.fuzz.body",
    "config": "tests.fuzz.config",
    "identity": "tests.fuzz.identity",
    "limits": "tests.fuzz.limits",
    "models": "tests.fuzz.models",
    "replies": "tests.fuzz.replies",
}
