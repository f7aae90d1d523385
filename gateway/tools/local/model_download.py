"""Gets a model from an address into the cache: all its files, once for all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from gateway.tools.local.cache import downloads_folder, file_lock
from gateway.tools.local.download import (
    DigestError,
    DownloadError,
    DownloadHooks,
    DownloadWish,
    download,
    file_digest,
    part_path,
    read_record,
    write_record,
)
from gateway.tools.local.gguf_file import ModelFile, least_size
from gateway.tools.local.model_url import (
    ModelUrlError,
    cache_key,
    file_name,
    part_urls,
    printable,
)
from gateway.tools.local.remote_file import open_client, open_remote

FIRST_WAIT = 0.2  # seconds at another process's lock before this one says that it waits

WAIT_ROUND = 30.0

MOST_IDLE_ROUNDS = 20
"""Rounds in which the other process's download may not grow: it checks a digest, or hangs."""


@dataclass(frozen=True, slots=True)
class ModelWish:
    """A model to be downloaded."""

    url: httpx.URL
    sha256: tuple[str, ...] = ()  # of each file, in order
    token: str | None = field(default=None, repr=False)
    most_bytes: int | None = None  # of all files


def fetch_model(
    wish: ModelWish,
    cache: Path,
    hooks: DownloadHooks,
    *,
    check_fits: Callable[[ModelFile], None],
    make_client: Callable[[], httpx.Client] = open_client,
) -> Path:
    """Return the first file of the model in the cache, downloaded now unless it is there.

    `check_fits` raises where a model of that size is of no use here; it is asked before the first
    byte is read. Raises LocalFleetError and OSError.
    """
    urls = part_urls(wish.url)
    if wish.sha256 and len(wish.sha256) != len(urls):
        raise ModelUrlError(
            f"--sha256: given {len(wish.sha256)} times, but the model has {len(urls)} "
            f"{'file' if len(urls) == 1 else 'files'}; give it once for each, in order"
        )
    if found := _with_digest(wish, cache):
        return found
    folder = downloads_folder(cache) / cache_key(urls[0])
    targets = [folder / file_name(url) for url in urls]
    if _complete(wish, targets):
        return targets[0]
    with _only_process(folder, targets, hooks.note):
        if not _complete(wish, targets):
            with make_client() as client:
                _download_all(client, wish, urls, targets, hooks, check_fits)
    return targets[0]


def _download_all(
    client: httpx.Client,
    wish: ModelWish,
    urls: list[httpx.URL],
    targets: list[Path],
    hooks: DownloadHooks,
    check_fits: Callable[[ModelFile], None],
) -> None:
    sizes = [target.stat().st_size if target.exists() else 0 for target in targets]
    if len(urls) > 1:
        for index, (url, target) in enumerate(zip(urls, targets, strict=True)):
            if not target.exists():
                with open_remote(client, url, token=wish.token) as body:
                    sizes[index] = body.total or 0
    name = targets[0].stem
    for index, (url, target) in enumerate(zip(urls, targets, strict=True)):
        if target.exists():
            continue

        def check_size(size: int, index: int = index) -> None:
            sizes[index] = size
            check_fits(ModelFile(targets[0], name, sum(sizes), None))

        beside = sum(
            max(0, sizes[later] - _part_size(targets[later]))
            for later in range(index + 1, len(urls))
            if not targets[later].exists()
        )
        others = sum(sizes) - sizes[index]
        digest = download(
            client,
            DownloadWish(
                url,
                target,
                sha256=wish.sha256[index] if wish.sha256 else None,
                token=wish.token,
                most_bytes=None if wish.most_bytes is None else max(0, wish.most_bytes - others),
                space_beside=beside,
            ),
            replace(hooks, check_size=check_size, least_size=least_size),
        )
        if not wish.sha256:
            hooks.note(f"{target.name} has the SHA-256 {digest}; --sha256 checks it next time")


def _complete(wish: ModelWish, targets: list[Path]) -> bool:
    """Whether all files are there. Raises DigestError where one is not the file that was asked."""
    if not all(target.is_file() for target in targets):
        return False
    for target, wanted in zip(targets, wish.sha256, strict=False):
        record = read_record(target)
        digest = record.sha256 if record is not None else None
        if digest is None:
            digest = file_digest(target)
            if record is not None:
                write_record(target, replace(record, sha256=digest))
        if digest != wanted:
            raise DigestError(
                f"{target}: the file in the cache has the SHA-256 {digest}, not {wanted}. Remedy: "
                f"correct --sha256, or download it again after: llama-gateway cache remove "
                f"{target.name}"
            )
    return True


def _with_digest(wish: ModelWish, cache: Path) -> Path | None:
    """Return a downloaded file with the digest that was asked, from whatever address."""
    if len(wish.sha256) != 1:
        return None
    for record in sorted(downloads_folder(cache).glob("*/*.gguf.source.json")):
        target = record.with_name(record.name.removesuffix(".source.json"))
        found = read_record(target)
        if found is not None and found.sha256 == wish.sha256[0] and target.is_file():
            return target
    return None


@contextmanager
def _only_process(folder: Path, targets: list[Path], note: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a model's downloads; wait while another process makes progress with it."""
    path = folder.with_name(f"{folder.name}.lock")
    idle, seen, wait = 0, -1, FIRST_WAIT
    while True:
        lock = file_lock(path, timeout=wait)
        try:
            lock.__enter__()
            break
        except TimeoutError:
            if wait == FIRST_WAIT:
                note("Another process is downloading this model: waiting for it")
            wait = WAIT_ROUND
            size = sum(_part_size(target) for target in targets)
            idle, seen = (idle + 1, seen) if size == seen else (0, size)
            if idle >= MOST_IDLE_ROUNDS:
                raise DownloadError(
                    f"{path}: another process holds the lock of this download and has made no "
                    f"progress for {idle * WAIT_ROUND:.0f} s. Remedy: end it"
                ) from None
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def _part_size(target: Path) -> int:
    try:
        return part_path(target).stat().st_size
    except OSError:
        return 0


def describe_source(wish: ModelWish) -> str:
    """Return the address for people, without its secrets."""
    return printable(wish.url)
