"""A folder of models for a llama-server in router mode, and the preset file that lists them.

Left to itself the router takes each part of a split model for a model, leaves projectors out that
lie beside their models, and offers files that can't be loaded. It reads the preset again whenever
its list is asked for with `reload=1`, as the gateway does, and unloads a model whose section
changes: sections only come and go.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from gateway.local import LocalFleetError
from gateway.local.gguf import PART_NAME, ModelFile, model_parts, read_model
from gateway.local.memory import (
    MIB,
    MOST_PROMPT_CACHE_BYTES,
    ServerSettings,
    format_gib,
    server_needs,
)
from gateway.local.server import MEAN

MOST_FILES = 10_000  # that are looked at
PROJECTOR = "mmproj"  # in the names of files that read images for a model, as llama.cpp has it
# A preset can't quote: it ends values at these, and changes names with a colon.
_UNWRITABLE = re.compile(r"[#;:\[\]\\]|^\s|\s$|^\*$")
# A prompt cache gets these shares of what its model needs, or of all memory, whichever is more.
CACHE_SHARE_OF_NEED, CACHE_SHARE_OF_ROOM = 1 / 4, 1 / 16


class FolderModel(NamedTuple):
    """One model of a folder, as its server is to be started."""

    file: ModelFile
    projector: Path | None
    settings: ServerSettings
    memory: int  # bytes that it takes with full slots and a full prompt cache


@dataclass(slots=True, eq=False)
class ModelFolder:
    """Reads a folder again and again, each file once, and keeps the preset."""

    folder: Path
    preset: Path
    settings: ServerSettings  # `context`: the most of each model
    room: int  # bytes of the smallest host of a router
    _: KW_ONLY
    embedding: bool = False
    force: bool = False
    models: dict[str, FolderModel] = field(default_factory=dict)
    passed_over: dict[str, str] = field(default_factory=dict)
    """Why each other file is no model to serve."""
    _marks: dict[Path, object] = field(default_factory=dict)
    """By which a file that has changed is known."""
    _read: dict[Path, ModelFile | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()

    def memory(self, path: Path, _slots: int, _context: int) -> int:
        """Return what the model of a file takes, with its projector and its prompts.

        Raises: ValueError if it is not served.
        """
        for model in self.models.values():
            if model.file.path == path:
                return model.memory
        raise ValueError(f"{path} is not served")

    def refresh(self) -> dict[str, list[str]] | None:
        """Read the folder, write the preset, and return what has changed. Raises OSError."""
        files = list(islice(_gguf_files(self.folder), MOST_FILES))
        marks = {path: _mark(path) for path in files}
        if marks == self._marks:
            return None
        before, told = self.models, self.passed_over
        models, passed_over = self._contents(marks)
        draft = self.preset.with_suffix(".draft")
        draft.write_text("\n".join(self._section(*one) for one in models.items()), "utf-8")
        draft.replace(self.preset)  # whole, since a router may read it at any time
        self.models, self.passed_over, self._marks = models, passed_over, marks
        news = passed_over.items() - told.items()
        return {
            "added": sorted(models.keys() - before.keys()),
            "removed": sorted(before.keys() - models.keys()),
            "not_served": sorted(f"{name}: {why}" for name, why in news),
        }

    def _contents(self, marks: dict[Path, object]) -> tuple[dict[str, FolderModel], dict[str, str]]:
        models: dict[str, FolderModel] = {}
        passed_over: dict[str, str] = {}
        projectors = [path for path in marks if PROJECTOR in path.name]
        whole = {_without_part(path): path for path in reversed(marks) if path not in projectors}
        known, self._read = self._read, {}
        for path in (*sorted(whole.values()), *projectors):
            parts = model_parts(path)
            is_new = any(marks.get(part) != self._marks.get(part) for part in parts)
            found = _read_model(path) if is_new or path not in known else known[path]
            self._read[path] = found
            served = found if isinstance(found, str) else self._served(found, models)
            if isinstance(served, str):
                passed_over[str(path.relative_to(self.folder))] = served
            else:
                models[served.file.name] = served
        return models, passed_over

    def _served(self, file: ModelFile, models: dict[str, FolderModel]) -> FolderModel | str:
        """Return a model as it is served, or with this projector; or why the file is not."""
        projector = None
        if PROJECTOR in file.path.name:
            projector = file.path
            beside = [one for one in models.values() if one.file.path.parent == projector.parent]
            if len(beside) != 1 or beside[0].projector:
                return "a projector of images; put it and its model into a folder of their own"
            file = beside[0].file
        elif other := models.get(file.name):
            shown = other.file.path.relative_to(self.folder)
            return f"{shown} has this name too; rename one of them"
        most = self.settings.context
        settings = replace(self.settings, context=min(most, file.trained_context or most))
        needed, why = server_needs(file, settings)
        needed += projector.stat().st_size if projector else 0
        if needed > self.room and not self.force:
            return (
                f"needs {format_gib(needed)} ({why}) of the {format_gib(self.room)} that models "
                "may take; take a smaller quantization, or less --context or --slots"
            )
        cache = max(needed * CACHE_SHARE_OF_NEED, self.room * CACHE_SHARE_OF_ROOM)
        cache = int(max(0, min(cache, MOST_PROMPT_CACHE_BYTES, self.room - needed))) // MIB * MIB
        settings = replace(settings, prompt_cache_bytes=cache)
        return FolderModel(file, projector, settings, min(needed + cache, self.room))

    def _section(self, name: str, model: FolderModel) -> str:
        settings = model.settings
        keys = {
            "model": model.file.path,
            "mmproj": model.projector,
            "parallel": settings.slots,
            "ctx-size": settings.slots * settings.context,
            "cache-ram": settings.prompt_cache_bytes // MIB,
            "pooling": MEAN if self.embedding and not model.file.has_pooling else None,
        }
        lines = [f"{key} = {value}" for key, value in keys.items() if value is not None]
        return "\n".join((f"[{name}]", *lines, ""))


def _gguf_files(folder: Path) -> Iterator[Path]:
    """Yield the GGUF files of a folder and of the folders in it, as llama.cpp looks for them."""
    for entry in _listed(folder):
        if os.path.isdir(entry):  # noqa: PTH112 - it raises nothing
            with suppress(OSError):
                yield from (path for path in _listed(entry) if _is_gguf(path))
        elif _is_gguf(entry):
            yield entry


def _listed(folder: Path) -> list[Path]:
    seen = (entry for entry in folder.iterdir() if not entry.name.startswith("."))
    return sorted(islice(seen, MOST_FILES))


def _is_gguf(path: Path) -> bool:
    # A link to nothing is told of; what is no file, such as a pipe, may never end.
    return path.suffix == ".gguf" and (os.path.isfile(path) or not os.path.exists(path))  # noqa: PTH110, PTH113


def _mark(path: Path) -> object:
    with suppress(OSError):
        found = path.stat()
        # Not when it was written: a copy keeps that of its original.
        return found.st_size, found.st_ino, found.st_ctime_ns
    return None


def _without_part(path: Path) -> Path:
    """Return one path for all parts of a split model."""
    match = PART_NAME.match(path.name)
    return path.with_name(f"{match['stem']}-of-{match['parts']}") if match else path


def _read_model(path: Path) -> ModelFile | str:
    try:
        found = read_model(path)
    except LocalFleetError as error:
        return str(error).removeprefix(f"{path}: ")
    if (found.kind == "projector") is not (PROJECTOR in path.name):
        return "a projector of images by what it holds or by its name, but not by both"
    if found.kind == "adapter":
        return "an adapter, which changes a model and is none"
    if any(_UNWRITABLE.search(one) or not one.isprintable() for one in (found.name, str(path))):
        return r"a router can't be told names with # ; : [ ] or \; rename the file or its folder"
    return found
