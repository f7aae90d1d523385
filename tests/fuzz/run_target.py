"""`python -m tests.fuzz.run_target NAME [libFuzzer's options]`: fuzz one target in this process.

Only modules of the gateway are instrumented. `tests.fuzz` starts it with the limits that it needs.
"""

from __future__ import annotations

import importlib
import sys

import atheris

from tests.fuzz import MODULES


def main() -> None:
    """Fuzz until libFuzzer's options say that it is enough."""
    name = sys.argv[1]
    with atheris.instrument_imports(include=["gateway"]):
        module = importlib.import_module(MODULES[name])
        inputs = importlib.import_module("tests.fuzz.inputs")
    check = inputs.timed(getattr(module, name.upper()).make_check())
    # By this command libFuzzer starts itself again to merge corpora.
    again = f"{sys.executable} -m tests.fuzz.run_target {name}"
    atheris.Setup([again, *sys.argv[2:]], check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
