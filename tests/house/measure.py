"""Measures the house: `python -m tests.house.measure [CHECKOUT]`.

Prints figures of a checkout's code, from the code alone; an older checkout is measured as well as
this one. `--list NAME` prints the places behind a figure, `--json` everything for scripts. Types
come from mypy (half a minute); `--quick` leaves out the figures that need them. `--trace` runs
the checkout's gateway over an emulated node, and lists what a streaming chat request enters.

Exit status: 0 measured, whatever the figures; 2 usage error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.house import apis, reach, shape, writes
from tests.house.source import Figure, modules

ROOT = Path(__file__).resolve().parents[2]
WAY = Path(__file__).with_name("way.py")

PLAIN: dict[str, str] = {
    "modules": "modules of gateway/ in all",
    "modules_short": f"modules of {shape.SHORT} lines or less",
    "modules_long": f"modules of more than {shape.LONG} lines",
    "lines": "lines of gateway/ in all",
    "circles": "sets of modules that import each other, within functions or for types too",
    "circles_of_packages": "the same of gateway.<package>, and modules of gateway/ itself",
    "circles_of_folders": "the same of packages and modules side by side in any one folder",
    "classes_twice": "names of classes, at a module's top or in a class, that two modules define",
    "classes_twice_private": "the same of names that begin with _",
    "writes": "targets x.a = ..., del x.a and setattr(x, ...) where x is neither self nor cls, "
    "nor a local that the function binds only to what a constructor returns",
    "api_tests": "tests of an API's path, name, class or constant, and dictionaries by path, "
    "outside its module and the route table (see apis.py)",
    "private_in_tests": "x._name in tests, where the gateway or tests define it and x is not "
    "one's own, and private names imported from gateway",
    "monkeypatches": f"monkeypatch.{{{','.join(sorted(reach.PATCHES))}}} in tests",
    "monkeypatches_of_gateway": "those of what is the gateway's by its dotted name or an import",
    "instruction_counts": "calls of instructions(), which counts bytecode, in tests",
    "tests_in_all": "modules tests/**/test_*.py",
    "tests_that_mirror": "those named tests/a/test_b*.py where gateway/a/b is",
    "modules_without_test": "modules, packages' __init__ aside, that none is named for",
}
"""What each figure is the number of."""

TYPED: dict[str, str] = {
    "writes_across": "those writes where the class that defines the attribute is the gateway's, "
    "in another package than the writer",
    "writes_untyped": "those writes where mypy knows no class (Any)",
    "request_names": "last words of names and attributes whose value may be the Request, or a "
    "class with an attribute that is one or carries one; beside cli, local, planning, tools",
    "request_names_in_proxy": "the same in proxy/ (relay/ before) alone",
    "request_spellings": "the same spelled whole (live.request, self._live.request)",
    "request_classes": "classes that are or carry a Request",
    "request_stays": "classes and functions at a module's top where such a name is",
    "request_rooms": "modules where such a name is",
}
"""The same of those that need mypy."""

TRACED: dict[str, str] = {
    "to_lease": "modules with functions entered from the handler's receiving a streaming chat "
    "request to its lease, by each of several requests behind the first",
    "to_lease_first": "the same of a gateway's first request",
    "asked_to_lease": "the same from the forwarder's getting the Request value to its lease",
    "asked_to_lease_first": "the same of a gateway's first request",
    "entered": "the same from the first byte to the last",
    "entered_first": "the same of a gateway's first request",
}
"""The same of those that need --trace."""


def measured(root: Path, *, typed: bool = True, trace: bool = False) -> dict[str, Figure]:
    """All figures of a checkout, by their names."""
    found, tests = modules(root), modules(root, "tests")
    figures = {
        **shape.sizes(found),
        **shape.import_circles(found),
        **shape.classes_twice(found),
        "writes": writes.of_others(found),
        "api_tests": apis.api_tests(found),
        "private_in_tests": reach.private_accesses(found, tests),
        **reach.patches(found, tests),
        "instruction_counts": reach.instruction_counts(tests),
        **shape.mirrored(found, tests),
    }
    if typed:
        # Here, since only `make dev` installs mypy.
        from tests.house import names
        from tests.house.typed import Types

        types = Types(root, found)
        figures |= writes.across(found, types)
        figures |= names.request_names(found, types)
    if trace:
        figures |= {name: Figure(len(entered), entered) for name, entered in _way(root).items()}
    return figures


def _way(root: Path) -> dict[str, list[str]]:
    """What `way.py` prints, run in the checkout's own code. Raises: CalledProcessError."""
    run = subprocess.run(
        [sys.executable, "-P", str(WAY)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    entered: dict[str, list[str]] = json.loads(run.stdout.splitlines()[-1])
    return entered


def _options() -> argparse.ArgumentParser:
    every = {**PLAIN, **TYPED, **TRACED}
    told = "\n".join(f"  {name}\n      {what}" for name, what in every.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.house.measure",
        description=__doc__,
        epilog=f"figures:\n{told}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT, help="default: this one")
    parser.add_argument("--json", action="store_true", help="figures and their places, as JSON")
    parser.add_argument(
        "--list", metavar="NAME", action="append", choices=list(every), help="places of a figure"
    )
    parser.add_argument("--quick", action="store_true", help="leave out what needs mypy")
    parser.add_argument("--trace", action="store_true", help="run it, for what a request enters")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print."""
    parser = _options()
    chosen = parser.parse_args(arguments)
    root = chosen.checkout.resolve()
    if not (root / "gateway").is_dir():
        parser.error(f"{chosen.checkout} has no folder gateway: name a checkout's root")
    listed: list[str] = chosen.list or []
    if chosen.list and not chosen.json:
        typed = any(name in TYPED for name in listed)
        trace = any(name in TRACED for name in listed)
    else:
        typed, trace = not chosen.quick, chosen.trace
    figures = measured(root, typed=typed, trace=trace)
    if chosen.json:
        shown = {
            name: {"value": figure.value, "places": [str(place) for place in figure.places]}
            for name, figure in figures.items()
        }
        print(json.dumps(shown, indent=1))
    elif listed:
        for name in listed:
            print(f"{name}: {figures[name].value}")
            print(*(f"  {place}" for place in figures[name].places), sep="\n")
    else:
        for name, what in {**PLAIN, **TYPED, **TRACED}.items():
            if name in figures:
                print(f"{figures[name].value:7,}  {name:26}{what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
