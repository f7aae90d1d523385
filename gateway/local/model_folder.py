"""A folder of models for a llama-server in router mode: what it holds, and the preset file of it.

The router could read the folder by itself, but would take each part of a split model for a model,
leave projectors out that lie beside their models, give all models one context, and offer files that
can't be loaded. So it is given a preset of the whole models alone. It reads the preset again
whenever its list is asked for with `reload=1`, as the gateway does; a model whose section changes
is unloaded, so that sections only come and go.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from gateway.local import LocalFleetError
from gateway.local.gguf import PART_NAME, ModelFile, model_parts, read_headers, read_model
from gateway.local.memory import MIB, ServerSettings, format_gib, server_needs
from gateway.local.server import MEAN

MOST_FILES = 10_000  # that are looked at
MOST_MODELS = 1000
PROJECTOR = "mmproj"  # in the names of files that read images for a model, as llama.cpp has it
# The types and sizes by which the files of one model differ.
_PROJECTOR_WORDS = re.compile(r"(?i)[-._]?(mmproj|f16|bf16|f32|q8_0)(?![a-z0-9])[-._]?")
# A preset can't quote: it ends values at these, and changes names with a colon.
_UNWRITABLE = re.compile(r"[#;:\[\]\\]|^\s|\s$|^\*$")
_NOT_WRITABLE = r"a router can't be told names with # ; : [ ] or \; rename the file or its folder"
# Of what a model needs, the least that its prompt cache gets.
PROMPT_CACHE_SHARE = 0.25
MOST_PROMPT_CACHE_BYTES = 8192 * MIB


@dataclass(frozen=True, slots=True)
class FolderModel:
    """One model of a folder, as its server is to be started."""

    file: ModelFile
    projector: Path | None
    settings: ServerSettings
    memory: int  # bytes that it takes with full slots and a full prompt cache


@dataclass(frozen=True, slots=True)
class FolderContents:
    """The models of a folder, by name, and why each other file of it is none."""

    models: dict[str, FolderModel]
    passed_over: dict[str, str]


class ModelFolder:
    """Reads a folder again and again, each file once; and keeps the preset of it."""

    def __init__(
        self,
        folder: Path,
        settings: ServerSettings,
        room: int,
        *,
        embedding: bool = False,
        force: bool = False,
    ) -> None:
        """`settings.context` is the most of each model; `room`: bytes of the smallest host."""
        self.folder = folder.absolute()
        self._settings = settings
        self._room = room
        self._embedding = embedding
        self._force = force
        self._read: dict[Path, tuple[tuple[object, ...], ModelFile | str]] = {}
        self._caches: dict[str, int] = {}

    def contents(self, progress: Callable[[int, int], None] = lambda _, __: None) -> FolderContents:
        """Return what the folder holds now. Raises OSError where it can't be read."""
        files = list(islice(_gguf_files(self.folder), MOST_FILES))
        passed_over: dict[str, str] = {}
        found: dict[str, tuple[ModelFile, Path | None]] = {}
        projectors = [path for path in files if PROJECTOR in path.name]
        whole = {_without_part(path): path for path in reversed(files) if path not in projectors}
        for number, path in enumerate(sorted(whole.values())):
            progress(number, len(whole))
            read = self._model(path) if number < MOST_MODELS else f"beyond the first {MOST_MODELS}"
            if isinstance(read, str):
                passed_over[self._shown(path)] = read
            elif read.name in found:
                other = self._shown(found[read.name][0].path)
                passed_over[self._shown(path)] = f"{other} has this name too; rename one of them"
            else:
                found[read.name] = read, None
        for path in projectors:
            if isinstance(read := self._model(path, _read_projector), str):
                passed_over[self._shown(path)] = read
                continue
            name = _model_of(path, {name: one.path for name, (one, _) in found.items()})
            if name is None:
                passed_over[self._shown(path)] = (
                    "a projector of images whose model is not clear; put both into a folder of "
                    "their own"
                )
            elif found[name][1] is None:
                found[name] = found[name][0], path
            else:
                passed_over[self._shown(path)] = f"{name} has another projector"
        return FolderContents(self._sized(found, passed_over), passed_over)

    def preset(self, contents: FolderContents) -> str:
        """Return the preset file of these models."""
        sections = []
        for name, model in contents.models.items():
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
            sections.append("\n".join((f"[{name}]", *lines, "")))
        return "\n".join(sections)

    def _shown(self, path: Path) -> str:
        return str(path.relative_to(self.folder))

    def _model(
        self, path: Path, read: Callable[[Path], ModelFile | str] | None = None
    ) -> ModelFile | str:
        """Return a model, or why it can't be served."""
        try:
            marks = tuple(
                (stat.st_size, stat.st_mtime_ns) for stat in map(Path.stat, model_parts(path))
            )
        except OSError:
            marks = ()
        known = self._read.get(path)
        if known is None or known[0] != marks:
            known = self._read[path] = marks, (read or _read_model)(path)
        return known[1]

    def _sized(
        self, found: dict[str, tuple[ModelFile, Path | None]], passed_over: dict[str, str]
    ) -> dict[str, FolderModel]:
        models: dict[str, FolderModel] = {}
        for name, (file, projector) in found.items():
            context = min(self._settings.context, file.trained_context or self._settings.context)
            settings = replace(self._settings, context=context)
            needed, why = server_needs(file, settings)
            needed += projector.stat().st_size if projector else 0
            if needed > self._room and not self._force:
                passed_over[self._shown(file.path)] = (
                    f"needs {format_gib(needed)} ({why}), and {format_gib(max(0, self._room))} are "
                    "there for models; take a smaller quantization, or less --context or --slots"
                )
            else:
                models[name] = FolderModel(file, projector, settings, needed)
        # Half of what all of them would leave: the rest is for models that come later.
        spare = (self._room - sum(model.memory for model in models.values())) // 2
        for name, model in models.items():
            # Once given it stays: the router would unload the model for another figure.
            share = max(int(model.memory * PROMPT_CACHE_SHARE), spare // len(models))
            most = max(0, min(MOST_PROMPT_CACHE_BYTES, self._room - model.memory))
            cache = self._caches.setdefault(name, min(share, most) // MIB * MIB)
            models[name] = replace(
                model,
                settings=replace(model.settings, prompt_cache_bytes=cache),
                memory=min(model.memory + cache, max(self._room, 1)),
            )
        return models


def write_preset(path: Path, text: str) -> None:
    """Replace the preset file whole, since a router may read it at any time."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as draft:
        draft.write(text)
    Path(draft.name).replace(path)


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
    if head is not None and (head.architecture == "clip" or not head.tensors):
        return "no model of texts: it holds a projector of images, or no weights"
    if head is not None and head.metadata.get("general.type") == "adapter":
        return "an adapter, which changes a model and is none"
    return found if _is_writable(found) else _NOT_WRITABLE


def _read_projector(path: Path) -> ModelFile | str:
    try:
        found = read_model(path)
        is_one = read_headers([path])[0].architecture == "clip"
    except LocalFleetError as error:
        return str(error).removeprefix(f"{path}: ")
    if not is_one:
        return "no projector of images, though its name says so"
    return found if _is_writable(found) else _NOT_WRITABLE


def _is_writable(model: ModelFile) -> bool:
    texts = (model.name, str(model.path))
    return all(text.isprintable() and not _UNWRITABLE.search(text) for text in texts)


def _model_of(projector: Path, models: dict[str, Path]) -> str | None:
    """Return the model that a projector belongs to: the only one beside it, or that of its name."""
    beside = [name for name, path in models.items() if path.parent == projector.parent]
    if len(beside) == 1:
        return beside[0]
    stem = _PROJECTOR_WORDS.sub("", projector.stem).lower()
    named = [name for name in beside if stem and name.lower().startswith(stem)]
    return named[0] if len(named) == 1 else None
