"""The table of members: who belongs to a cluster, and where each is reached."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, select, update

from gateway.cluster.leadership import parse_holder
from gateway.store.database import insert_for
from gateway.store.schema import leadership, members, processes


class MemberRow(NamedTuple):
    """A member as the store has it."""

    name: str
    # The one that has registered last; no other one has this name. Empty: the member was removed.
    process: str
    generation: int  # counts the processes that have registered by this name
    address: str  # HOST:PORT for the other members
    version: str  # of its program

    @property
    def contender(self) -> str:
        """Its process, as it contends for the leadership."""
        return f"{self.name}/{self.process}"


def read_members(connection: Connection, cluster: str) -> list[MemberRow]:
    """All members of the cluster, by name; removed ones too."""
    wanted = select(*(members.c[name] for name in _COLUMNS)).where(members.c.cluster == cluster)
    return [MemberRow(*row) for row in connection.execute(wanted.order_by(members.c.member))]


def register(connection: Connection, cluster: str, own: MemberRow) -> list[MemberRow]:
    """Make this process its member's, over those that registered before; all members then.

    `own.generation`: the one that it has had, in a state of the database that is lost; else 0.
    """
    found = next((one for one in read_members(connection, cluster) if one.name == own.name), None)
    before = 0 if found is None else found.generation
    row = own._replace(generation=max(own.generation, before + 1))
    values = dict(zip(_COLUMNS, row, strict=True))
    keys = ["cluster", "member"]
    put = insert_for(connection)(members).values(cluster=cluster, **values)
    connection.execute(put.on_conflict_do_update(index_elements=keys, set_=values))
    return read_members(connection, cluster)


class StoredMember(NamedTuple):
    """A member, and what the store knows of its process."""

    row: MemberRow
    epoch: int | None  # in which it leads, or has led last; None: another one does
    seen_at: float | None  # its last sign of life, by its clock, Unix time; None: it has ended


def stored_members(connection: Connection, cluster: str) -> list[StoredMember]:
    """All members of the cluster, for operators."""
    row = leadership.c
    lead = connection.execute(select(row.holder, row.epoch).where(row.cluster == cluster)).first()
    holder, epoch = ("", 0) if lead is None else lead
    leading = parse_holder(holder)[0]
    signs = connection.execute(select(processes.c.id, processes.c.seen_at))
    seen = {process: seen_at for process, seen_at in signs}  # noqa: C416 - of rows, for mypy
    return [
        StoredMember(one, epoch if leading == one.contender else None, seen.get(one.process))
        for one in read_members(connection, cluster)
        if one.process
    ]


def remove(connection: Connection, cluster: str, name: str, process: str | None = None) -> bool:
    """Remove a member whose process has ended for good; False: there is none of this name.

    `process`: only if that is its process still. Its row stays: that one is missing may also be an
    old state of the database.
    """
    row = members.c
    of_process = row.process != "" if process is None else row.process == process
    gone = update(members).where(row.cluster == cluster, row.member == name, of_process)
    return connection.execute(gone.values(process="")).rowcount > 0


def read_sharers(connection: Connection, cluster: str) -> str:
    """The lists of those that share the slots without a leader, in JSON."""
    wanted = select(leadership.c.sharers).where(leadership.c.cluster == cluster)
    return connection.scalar(wanted) or "[]"


def write_sharers(
    connection: Connection, cluster: str, holder: str, epoch: int, sharers: str
) -> bool:
    """Replace these lists, as the leader of this epoch; False: another one has the leadership."""
    row = leadership.c
    own = row.cluster == cluster, row.holder == holder, row.epoch == epoch
    return connection.execute(update(leadership).where(*own).values(sharers=sharers)).rowcount > 0


_COLUMNS = ("member", "process", "generation", "address", "version")
