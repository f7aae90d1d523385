"""Measures the structure of a checkout's code: `python -m tests.house.measure [CHECKOUT]`.

The figures come from the code alone, so older checkouts can be measured too. `--list NAME` prints
the places behind a figure, `--json` prints everything for scripts. Types come from mypy (half a
minute); `--quick` leaves out the figures that need them. `--trace` runs the checkout's gateway
over an emulated node and counts the modules that a streaming chat request enters.

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

from tests.house import api_tests, foreign_writes, module_figures, tests_figures
from tests.house.source import ROOT, Figure, modules

REQUEST_TRACE = Path(__file__).with_name("request_trace.py")

SOURCE_FIGURES: dict[str, str] = {
    "modules": "modules of gateway/",
    "modules_short": f"modules of {module_figures.SHORT_LINES} lines or less",
    "modules_long": f"modules of more than {module_figures.LONG_LINES} lines",
    "lines": "lines of gateway/",
    "import_cycles": "import cycles of modules; imports in functions and for types count",
    "import_cycles_of_packages": "the same between gateway.<package>s",
    "import_cycles_of_folders": "the same between packages and modules of any one folder",
    "duplicate_classes": "class names, at the top level or in a class, that two modules define",
    "duplicate_private_classes": "the same of names that begin with _",
    "writes": "targets x.a = ..., del x.a and setattr(x, ...) where x is neither self nor cls, "
    "nor a local variable that is only bound to new objects",
    "api_tests": "tests of an API's path, name, class or constant, and dictionaries by path, "
    "outside the API's module and the route table (see api_tests.py)",
    "private_in_tests": "x._name in tests, where the gateway or the tests define it and x is "
    "another object, and private names imported from gateway",
    "monkeypatches": f"monkeypatch.{{{','.join(sorted(tests_figures.PATCH_METHODS))}}} in tests",
    "monkeypatches_of_gateway": "those whose target is in gateway, by a dotted name or an import",
    "instruction_counts": "calls of instructions(), which counts bytecode, in tests",
    "test_modules": "modules tests/**/test_*.py",
    "test_modules_that_mirror": "those named tests/a/test_b*.py for a module gateway/a/b",
    "modules_without_test": "modules for which no test module is named, except __init__",
}
"""Figures from the source alone, with their meaning."""

TYPED_FIGURES: dict[str, str] = {
    "writes_across": "those writes where another package of the gateway defines the attribute",
    "writes_untyped": "those writes where mypy knows no class (Any)",
    "request_attributes": "attributes of the class Request itself",
    "request_names": "names and attributes whose value may be a Request or an object that "
    "carries one, in an attribute or an attribute's attribute; without cli, local, tools",
    "request_names_in_proxy": "the same in proxy/ (formerly relay/) alone",
    "request_names_by_module": "the same, each name once in every module that uses it",
    "request_spellings": "the same as full expressions (live.request, self._live.request)",
    "request_classes": "classes that are or carry a Request",
    "request_functions": "top-level classes and functions that use such a name",
    "request_modules": "modules that use such a name",
}
"""Figures that need mypy."""

TRACED_FIGURES: dict[str, str] = {
    "to_lease": "modules whose functions a streaming chat request enters from the handler to its "
    "lease; those that most of several later requests enter",
    "to_lease_first": "the same of a gateway's first request",
    "forwarder_to_lease": "modules entered from the forwarder to the lease",
    "forwarder_to_lease_first": "the same of a gateway's first request",
    "entered": "modules entered from the first byte to the last",
    "entered_first": "the same of a gateway's first request",
}
"""Figures that need --trace."""


def measure(root: Path, *, typed: bool = True, trace: bool = False) -> dict[str, Figure]:
    """All figures of a checkout, by name."""
    found, tests = modules(root), modules(root, "tests")
    figures = {
        **module_figures.sizes(found),
        **module_figures.import_cycles(found),
        **module_figures.duplicate_classes(found),
        "writes": foreign_writes.foreign_writes_figure(found),
        "api_tests": api_tests.api_tests(found),
        "private_in_tests": tests_figures.private_accesses(found, tests),
        **tests_figures.patches(found, tests),
        "instruction_counts": tests_figures.instruction_counts(tests),
        **module_figures.mirroring_tests(found, tests),
    }
    if typed:
        # Imported here because only `make dev` installs mypy.
        from tests.house import request_names
        from tests.house.mypy_types import ModuleTypes

        types = ModuleTypes(root, found)
        figures |= foreign_writes.writes_across_packages(found, types)
        figures |= request_names.request_names(found, types)
    if trace:
        figures |= {
            name: Figure(len(entered), entered) for name, entered in traced_modules(root).items()
        }
    return figures


def traced_modules(root: Path) -> dict[str, list[str]]:
    """Run `request_trace.py` with the checkout's own code. Raises: CalledProcessError."""
    run = subprocess.run(
        [sys.executable, "-P", str(REQUEST_TRACE)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    entered: dict[str, list[str]] = json.loads(run.stdout.splitlines()[-1])
    return entered


def _options() -> argparse.ArgumentParser:
    all_figures = {**SOURCE_FIGURES, **TYPED_FIGURES, **TRACED_FIGURES}
    meanings = "\n".join(f"  {name}\n      {meaning}" for name, meaning in all_figures.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.house.measure",
        description=__doc__,
        epilog=f"figures:\n{meanings}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT, help="default: this one")
    parser.add_argument(
        "--json", action="store_true", help="print figures and their places as JSON"
    )
    parser.add_argument(
        "--list",
        metavar="NAME",
        action="append",
        choices=list(all_figures),
        help="print the places of a figure",
    )
    parser.add_argument("--quick", action="store_true", help="leave out the figures that need mypy")
    parser.add_argument("--trace", action="store_true", help="run the gateway and trace a request")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status."""
    parser = _options()
    options = parser.parse_args(arguments)
    root = options.checkout.resolve()
    if not (root / "gateway").is_dir():
        parser.error(f"{options.checkout} has no folder gateway: name a checkout's root")
    wanted: list[str] = options.list or []
    if options.list and not options.json:
        typed = any(name in TYPED_FIGURES for name in wanted)
        trace = any(name in TRACED_FIGURES for name in wanted)
    else:
        typed, trace = not options.quick, options.trace
    figures = measure(root, typed=typed, trace=trace)
    if options.json:
        shown = {
            name: {"value": figure.value, "places": [str(place) for place in figure.places]}
            for name, figure in figures.items()
        }
        print(json.dumps(shown, indent=1))
    elif wanted:
        for name in wanted:
            print(f"{name}: {figures[name].value}")
            print(*(f"  {place}" for place in figures[name].places), sep="\n")
    else:
        for name, meaning in {**SOURCE_FIGURES, **TYPED_FIGURES, **TRACED_FIGURES}.items():
            if name in figures:
                print(f"{figures[name].value:7,}  {name:26}{meaning}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
