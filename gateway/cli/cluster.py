"""`llama-gateway cluster`: the members of a cluster, as its store has them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.cli import options
from gateway.cli.client import named_store, open_alone, read_settings
from gateway.cli.options import CommandGroup, argument, flag
from gateway.cli.terminal import CommandFailed, WrongUsage, print_listing, print_note

if TYPE_CHECKING:
    from gateway.cluster.tables import StoredMember
    from gateway.store.store import Store

# Seconds since its last sign of life within which a member is taken to be at work.
LIVING_SECONDS = 60.0

app = CommandGroup(
    "The members of a cluster (`cluster` in the settings), from the store that they share.",
    ("llama-gateway cluster members", "who belongs to it, who leads, who was last seen when"),
    ("llama-gateway cluster remove gw-c", "after that machine is gone for good"),
)


@app.add("members")
def members(*, config: Path | None = options.CONFIG, as_json: bool = options.JSON) -> None:
    """List the members, and who of them leads.

    What each of them does now is told by the leader: 'llama-gateway top', GET /admin/status.
    """
    with _opened(config) as (store, cluster):
        found = _members(store, cluster)
    now = time.time()
    told = [
        {
            "name": one.row.name,
            "address": one.row.address,
            "version": one.row.version,
            "leads": one.epoch is not None,
            "epoch": one.epoch,
            "seen_seconds": None if one.seen_at is None else round(max(0.0, now - one.seen_at), 1),
        }
        for one in found
    ]
    rows = ([(key.upper(), value) for key, value in one.items()] for one in told)
    nothing = f"the cluster {cluster} has no member yet"
    print_listing({"cluster": cluster, "members": told}, rows, nothing, as_json=as_json)


@app.add("remove")
def remove(
    *,
    name: str = argument("NAME", "The member's name."),
    config: Path | None = options.CONFIG,
    force: bool = flag.switch("--force", "Although its process may be running."),
) -> None:
    """Remove a member that is gone for good: the others share the nodes without it.

    End its process first, or switch the machine off: one that still runs without the database and
    the leader would use the same slots, and one that runs with them registers again.
    """
    from gateway.cluster import tables as jobs

    with _opened(config) as (store, cluster):
        found = {one.row.name: one for one in _members(store, cluster)}
        if name not in found:
            raise CommandFailed(
                f"the cluster {cluster} has no member {name}, but {', '.join(found) or 'none'}"
            )
        seen_at = found[name].seen_at
        if seen_at is not None and time.time() - seen_at < LIVING_SECONDS and not force:
            raise CommandFailed(
                f"{name} was seen {max(0.0, time.time() - seen_at):.0f} s ago: end its process "
                "first, else it registers again; --force removes it all the same"
            )
        store.run_now(lambda connection: jobs.remove(connection, cluster, name))
    print_note(f"{name} is no member of the cluster {cluster} any more")


def _members(store: Store, cluster: str) -> list[StoredMember]:
    from gateway.cluster.tables import stored_members

    return store.run_now(lambda connection: stored_members(connection, cluster), write=False)


@contextlib.contextmanager
def _opened(config: Path | None) -> Iterator[tuple[Store, str]]:
    """The store of the cluster that the settings name, and the cluster's name."""
    settings = read_settings(config)
    if settings.cluster is None:
        raise WrongUsage("the settings have no section `cluster`: name others with --config")
    with open_alone(named_store(settings)) as store:
        yield store, settings.cluster.name
