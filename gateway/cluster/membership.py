"""A member of a cluster: whether it leads, follows, or is alone, and what it and the leader tell.

A member that does not lead has a control link to the leader, over a tunnel: it says which edges it
has, is told of each term, and confirms it. The leader tells by its account of all members' requests
(`Account`). What a member may start without a leader is its `Fence`'s to say. All waits are
durations by the clock since the machine was booted.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import msgspec

from gateway.cluster.fencing import Fence, Session
from gateway.cluster.leadership import Leadership, boot_clock
from gateway.cluster.members import MemberRow
from gateway.cluster.tunnel import Greeting, Tunnels, Welcome
from gateway.config.cluster import ClusterSettings
from gateway.watch.metrics import EdgeSample


class Role(NamedTuple):
    """What a member is, until it is told of its next role.

    `limbo`: no leader is known, and it is not alone (yet); `follower`: its session with the leader
    has begun, so that its edges may be linked to it; `leader`: it may grant slots; `alone`: no
    leader can be reached.
    """

    kind: Literal["limbo", "follower", "leader", "alone"]
    epoch: int = 0  # of the leader; limbo, alone: the highest that it has seen
    leader: str = ""  # the name of the leading member; limbo, alone: empty
    process: str = ""  # and of its process
    won_at: float = 0.0  # leader: when it knew that it had its epoch, by the boot clock


class MemberState(msgspec.Struct, frozen=True, array_like=True):
    """What a member tells of itself about once a second, for operators, and for its session."""

    edges: tuple[EdgeSample, ...] = ()  # its processes that run
    died: int = 0  # edges that have ended by themselves
    cores: int = 0
    folder: str = ""  # the id of the folder of its files
    version: str = ""  # of the program


class SeenMember(NamedTuple):
    """A member, as this one sees it."""

    row: MemberRow
    role: Literal["leader", "follower", "draining", "away"]
    state: MemberState | None  # None: it has told nothing yet
    silent: float  # seconds since it was heard; of one that was never: since this one looks


class Account(Protocol):
    """The leader's account of the members' requests, which says what they are told of its term.

    The leader's own member has a session too. A member with a session may begin another one.
    """

    def members(self, names: Sequence[str]) -> None:
        """These are all members from now on."""

    def begins(self, session: Session, edges: Sequence[str]) -> None:
        """A member begins a session: these of its edges are to be heard first.

        Called again with the same session if it has other edges now.
        """

    def tell(self, member: str, now: float, lead_until: float) -> tuple[int, int, float] | None:
        """What the member is told of the term, as `Fence.told` takes it; None: not yet."""

    def confirmed(self, session: Session, number: int, now: float) -> bool:
        """The member was told of the term with this number; False: it has to begin anew."""

    def left(self, session: Session) -> None:
        """The control link of this session is lost: it can confirm nothing more."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who is told by a membership. Nothing is called before `start` or after `aclose`."""

    on_role: Callable[[Role], None]
    """Its role is another one: called in order, from the event loop, never for one that is over."""
    on_replaced: Callable[[str], None]
    """Another process (its name) has registered as this member, later: this one has to end, or is
    being succeeded by it."""
    on_tunnel: Callable[[Greeting, socket.socket], None]
    """A member has opened a tunnel that is no control link, while this one leads."""
    state: Callable[[], MemberState]


class Membership:
    """The membership of this process.

    `store`: runs the jobs of `members.py`. `fence`: what this member may start alone.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        process: str,
        leadership: Leadership,
        store: Callable[..., object],
        fence: Fence,
        owner: Owner,
        *,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self.fence = fence
        self.role = Role("limbo")
        self.tunnels: Tunnels

    def start(self) -> None:
        """Register as a member as soon as the store lets it, and begin to contend and to follow."""

    def lead(self, epoch: int, account: Account) -> None:
        """In the role of the leader of this epoch: others may follow, and are told by `account`.

        Nothing happens if that role is over.
        """

    def drain(self) -> None:
        """Lead no more, and never be alone: a successor takes over, or this process ends."""

    def admit(self, greeting: Greeting) -> Welcome:
        """Whether this member takes a tunnel: for `Tunnels`."""
        raise NotImplementedError

    def seen(self) -> list[SeenMember]:
        """All members; of their states only the leader knows."""
        raise NotImplementedError

    async def open(self, kind: Literal["link", "public", "admin"], name: str = "") -> socket.socket:
        """Open a tunnel to the leader that it follows; the end here. Raises: TunnelError."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """End all of it."""
