"""The OpenMP runtime, `libgomp.so.1`: the embedded llama.cpp needs it and its wheel has none.

Where the system has none either, the one that another wheel carries is used.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path

LIBRARY = "libgomp.so.1"
CARRIER = "pykdtree"  # the smallest wheel that brings a copy, under a name of its own


def openmp_folder(cache: Path) -> Path | None:
    """The folder that a server must search for the runtime; None where it needs none of ours.

    Made in the cache folder where it is missing; safe when several processes ask at once.
    Raises OSError when it can't be written.
    """
    if system_has_openmp() or (carried := carried_openmp()) is None:
        return None
    folder = cache / "lib"
    link = folder / LIBRARY
    if not link.exists() or not link.samefile(carried):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as draft:
            made = Path(draft) / LIBRARY
            made.symlink_to(carried)
            made.replace(link)
    return folder


def system_has_openmp() -> bool:
    """Whether a server finds the runtime by itself; outside Linux its wheel brings one."""
    if sys.platform != "linux":
        return True
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def carried_openmp() -> Path | None:
    """The copy among the installed packages."""
    try:
        files = importlib.metadata.files(CARRIER) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [Path(os.fspath(file.locate())) for file in files if file.name.startswith("libgomp")]
    return next((path.absolute() for path in paths if path.is_file()), None)
