"""A folder of models for a llama-server in router mode, and the preset file that lists them.

Left to itself the router takes each part of a split model for a model, leaves projectors out that
lie beside their models, and offers files that can't be loaded. It reads the preset again whenever
its list is asked for with `reload=1`, as the gateway does, and unloads a model whose section
changes: sections only come and go.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from gateway.local import LocalFleetError
from gateway.local.gguf import PART_NAME, ModelFile, model_parts, read_headers, read_model
from gateway.local.memory import MIB, ServerSettings, file_memory, format_gib, server_needs
from gateway.local.server import MEAN

MOST_FILES = 10_000  # that are looked at
PROJECTOR = "mmproj"  # in the names of files that read images for a model, as llama.cpp has it
# What the names of a model and of its projector differ by.
_PROJECTOR_WORDS = re.compile(r"(?i)[-._]?(mmproj|f16|bf16|f32|q8_0)(?![a-z0-9])[-._]?")
# A preset can't quote: it ends values at these, and changes names with a colon.
_UNWRITABLE = re.compile(r"[#;:\[\]\\]|^\s|\s$|^\*$")
# Of what a model needs, the least that its prompt cache gets; and the most, llama.cpp's default.
PROMPT_CACHE_SHARE, MOST_PROMPT_CACHE_BYTES = 0.25, 8192 * MIB


class FolderModel(NamedTuple):
    """One model of a folder, as its server is to be started."""

    file: ModelFile
    projector: Path | None
    settings: ServerSettings
    memory: int  # bytes that it takes with full slots and a full prompt cache


class ModelFolder:
    """Reads a folder again and again, each file once, and keeps the preset."""

    def __init__(
        self,
        folder: Path,
        preset: Path,
        settings: ServerSettings,  # `context`: the most of each model
        room: int,
        *,
        embedding: bool = False,
        force: bool = False,
    ) -> None:
        self.room = room  # bytes of the smallest host of a router
        self.models: dict[str, FolderModel] = {}
        self.passed_over: dict[str, str] = {}  # why each other file is no model to serve
        self._folder, self._preset = folder.absolute(), preset
        self._settings, self._embedding, self._force = settings, embedding, force
        self._read: dict[Path, tuple[object, ModelFile | str]] = {}
        self._caches: dict[str, int] = {}  # of prompts: once given, since another would unload it

    def memory(self, path: Path, slots: int, context: int) -> int:
        """Return what the model of a file takes, with its projector and its prompts."""
        for model in self.models.values():
            if model.file.path == path:
                return model.memory
        return file_memory(path, slots, context)

    def refresh(
        self, progress: Callable[[int, int], None] = lambda _, __: None
    ) -> dict[str, Any] | None:
        """Read the folder, write the preset, and return what has changed. Raises OSError."""
        before, told = self.models, self.passed_over
        models, passed_over = self._contents(progress)
        if (models, passed_over) == (before, told):
            return None
        with tempfile.NamedTemporaryFile("w", dir=self._preset.parent, delete=False) as draft:
            draft.write("\n".join(self._section(*one) for one in models.items()))
        Path(draft.name).replace(self._preset)  # whole, since a router may read it at any time
        self.models, self.passed_over = models, passed_over
        return {
            "added": sorted(models.keys() - before.keys()),
            "removed": sorted(before.keys() - models.keys()),
            "not_served": dict(passed_over.items() - told.items()),
        }

    def _contents(
        self, progress: Callable[[int, int], None]
    ) -> tuple[dict[str, FolderModel], dict[str, str]]:
        files = list(islice(_gguf_files(self._folder), MOST_FILES))
        models: dict[str, FolderModel] = {}
        passed_over: dict[str, str] = {}
        projectors = [path for path in files if PROJECTOR in path.name]
        whole = {_without_part(path): path for path in reversed(files) if path not in projectors}
        for number, path in enumerate((*sorted(whole.values()), *projectors)):
            progress(number, len(whole) + len(projectors))
            read = self._model(path)
            if isinstance(read, str):
                passed_over[self._shown(path)] = read
            elif path in projectors:
                name = _model_of(path, models)
                if name is None or models[name].projector:
                    passed_over[self._shown(path)] = (
                        "a projector of images, but which model's is not clear; put both into a "
                        "folder of their own"
                    )
                else:
                    models[name] = models[name]._replace(projector=path)
            elif read.name in models:
                other = self._shown(models[read.name].file.path)
                passed_over[self._shown(path)] = f"{other} has this name too; rename one of them"
            else:
                most = self._settings.context
                context = min(most, read.trained_context or most)
                settings = replace(self._settings, context=context)
                models[read.name] = FolderModel(read, None, settings, 0)
        return self._sized(models, passed_over), passed_over

    def _sized(
        self, models: dict[str, FolderModel], passed_over: dict[str, str]
    ) -> dict[str, FolderModel]:
        """Return the models that have room, with their memory; those without are passed over."""
        needs: dict[str, int] = {}
        for name, model in models.items():
            needed, why = server_needs(model.file, model.settings)
            needed += model.projector.stat().st_size if model.projector else 0
            if needed <= self.room or self._force:
                needs[name] = needed
                continue
            passed_over[self._shown(model.file.path)] = (
                f"needs {format_gib(needed)} ({why}) of the {format_gib(self.room)} that models "
                "may take; take a smaller quantization, or less --context or --slots"
            )
        # Half of what all of them would leave: the rest is for models that come later.
        spare = (self.room - sum(needs.values())) // 2
        sized = {}
        for name, needed in needs.items():
            share = max(int(needed * PROMPT_CACHE_SHARE), spare // len(needs))
            most = max(0, min(MOST_PROMPT_CACHE_BYTES, self.room - needed))
            cache = self._caches.setdefault(name, min(share, most) // MIB * MIB)
            settings = replace(models[name].settings, prompt_cache_bytes=cache)
            memory = min(needed + cache, self.room)
            sized[name] = models[name]._replace(settings=settings, memory=memory)
        return sized

    def _section(self, name: str, model: FolderModel) -> str:
        settings = model.settings
        keys = {
            "model": model.file.path,
            "mmproj": model.projector,
            "parallel": settings.slots,
            "ctx-size": settings.slots * settings.context,
            "cache-ram": settings.prompt_cache_bytes // MIB,
            "pooling": MEAN if self._embedding and not model.file.has_pooling else None,
        }
        lines = [f"{key} = {value}" for key, value in keys.items() if value is not None]
        return "\n".join((f"[{name}]", *lines, ""))

    def _shown(self, path: Path) -> str:
        return str(path.relative_to(self._folder))

    def _model(self, path: Path) -> ModelFile | str:
        """Return a model or projector, or why it can't be served."""
        marks: object = None
        with suppress(OSError):
            stats = [part.stat() for part in model_parts(path)]
            marks = [(stat.st_size, stat.st_mtime_ns) for stat in stats]
        if path not in self._read or self._read[path][0] != marks:
            self._read[path] = marks, _read_model(path)
        return self._read[path][1]


def _gguf_files(folder: Path) -> Iterator[Path]:
    """Yield the GGUF files of a folder and of the folders in it, as llama.cpp looks for them."""
    for entry in _listed(folder):
        if entry.is_dir():
            with suppress(OSError):
                yield from (path for path in _listed(entry) if _is_gguf(path))
        elif _is_gguf(entry):
            yield entry


def _listed(folder: Path) -> list[Path]:
    seen = (entry for entry in folder.iterdir() if not entry.name.startswith("."))
    return sorted(islice(seen, MOST_FILES))


def _is_gguf(path: Path) -> bool:
    # A link to nothing is told of; what is no file, such as a pipe, may never end.
    return path.suffix == ".gguf" and (path.is_file() or not path.exists())


def _without_part(path: Path) -> Path:
    """Return one path for all parts of a split model."""
    match = PART_NAME.match(path.name)
    return path.with_name(f"{match['stem']}-of-{match['parts']}") if match else path


def _read_model(path: Path) -> ModelFile | str:
    try:
        found = read_model(path)
        head = read_headers([found.path])[0] if found.shape is None else None
    except LocalFleetError as error:
        return str(error).removeprefix(f"{path}: ")
    is_projector = head is not None and head.architecture == "clip"
    if is_projector is not (PROJECTOR in path.name):
        return "a projector of images by what it holds or by its name, but not by both"
    if head is not None and head.metadata.get("general.type") == "adapter":
        return "an adapter, which changes a model and is none"
    if any(_UNWRITABLE.search(one) or not one.isprintable() for one in (found.name, str(path))):
        return r"a router can't be told names with # ; : [ ] or \; rename the file or its folder"
    return found


def _model_of(projector: Path, models: dict[str, FolderModel]) -> str | None:
    """Return the model that a projector belongs to: the only one beside it, or that of its name."""
    beside = [name for name, one in models.items() if one.file.path.parent == projector.parent]
    stem = _PROJECTOR_WORDS.sub("", projector.stem).lower()
    named = [name for name in beside if stem and name.lower().startswith(stem)]
    fitting = beside if len(beside) == 1 else named
    return fitting[0] if len(fitting) == 1 else None
