"""`llama-gateway`, the command, and the programs that units, playbooks and images start by name."""

from __future__ import annotations

import sys
from importlib import import_module

# These names stay while modules move. A host of a node has none of the packages that the command
# imports, and an edge needs none of them, so the programs are looked for before it.
PROGRAMS = {
    "node-server": "gateway.local.embedded",
    "node-memory": "gateway.local.memory",
}
OWN_PROGRAMS = {"edge": "gateway.app.edge"}  # that the gateway alone starts


def main() -> None:
    """Run the program or the command that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if module := (PROGRAMS | OWN_PROGRAMS).get(name):
        import_module(module).main(sys.argv[2:])
        return
    from gateway.cli import main as command

    command()


if __name__ == "__main__":
    main()
