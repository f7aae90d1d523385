"""The modules of `gateway.cluster` and a sender, as they are or with one rule broken: a mutant."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

MODULES = {
    "leadership": "gateway.cluster.leadership",
    "leader_row": "gateway.cluster.tables",
    "fencing": "gateway.cluster.fencing",
    "sending": "tests.cluster.sending",
}
"""In the order of their imports."""


@dataclass(frozen=True)
class Mutant:
    """A rule that is broken by changing a text of a module."""

    name: str
    module: str
    rule: str  # the text, which is there once
    broken: str
    found_by: int = 0  # A script that finds it, or one shortly before that
    clock: str = "boot"  # the clock that members and edges use


@dataclass(frozen=True)
class Rules:
    leadership: ModuleType
    leader_row: ModuleType
    fencing: ModuleType
    sending: ModuleType
    clock: str = "boot"


@contextmanager
def _modules_put_back() -> Iterator[None]:
    kept = {name: importlib.import_module(name) for name in MODULES.values()}
    try:
        yield
    finally:
        sys.modules.update(kept)


def load(mutant: Mutant | None = None) -> Rules:
    """Run the modules' sources anew, with the mutant's change. Raises: ValueError."""
    made = {}
    with _modules_put_back():
        for name, full in MODULES.items():
            path = Path(str(sys.modules[full].__file__))
            text = path.read_text()
            if mutant is not None and mutant.module == name:
                if text.count(mutant.rule) != 1:
                    raise ValueError(
                        f"{mutant.name}: {name} has {text.count(mutant.rule)} times:\n{mutant.rule}"
                    )
                text = text.replace(mutant.rule, mutant.broken)
            sys.modules[full] = made[name] = ModuleType(full)
            exec(compile(text, str(path), "exec"), made[name].__dict__)
    return Rules(**made, clock=mutant.clock if mutant else "boot")
