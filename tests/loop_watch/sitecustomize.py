"""Has every gateway that a test starts watched: its `PYTHONPATH` begins with this folder."""

import os
import sys


class _OnImport:
    """Begins when a process imports the gateway's application: before it has an event loop."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "gateway.app.assembly" and "pytest" not in sys.modules:  # there the plugin does
            sys.meta_path.remove(self)
            import watch  # type: ignore[import-not-found] # this folder is on the path

            turns_only = os.environ.get("LOOP_WATCH_ONLY") == "turns"
            watch.begin(watch.in_file(folder), turns_only=turns_only)


folder = os.environ.get("LOOP_WATCH")
if folder:
    sys.meta_path.insert(0, _OnImport())
