"""A network in virtual time: every link and direction has its delay and its rate, and can be cut, silenced, or lose what is under way.

It keeps the contract of `roost.transport.interface`, with the failures that the gRPC transport shows: a stream delivers a prefix of
what it took, one that is silent breaks when keepalives go unanswered, and the send that notices raises once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from virtual_loop import VirtualLoop

from roost.errors import InvalidConfigError, PeerUnreachableError, RoostError
from roost.messages import Message
from roost.types import Peer

if TYPE_CHECKING:
    from virtual_transport import VirtualTransport

PATIENCE_S = (5.0, 11.0)
"""A keepalive goes out every 5 s and has 5 s to be answered."""
OWN_DELAY_S = 2e-5
"""From a machine to itself."""


@dataclass(kw_only=True)
class Way:
    """One direction of a link."""

    delay_s: float
    """Least time from one end to the other."""
    jitter: float
    """A message may take so many times the delay longer, at random."""
    bytes_per_s: float
    silent: bool = False
    """What is sent does not arrive, and nobody is told."""


class Passage:
    """A stream or a call that is open between two endpoints; it breaks when the way is silent for too long."""

    def __init__(self, source: VirtualTransport, target: VirtualTransport, patience_s: float) -> None:
        self.source = source
        self.target = target
        self.patience_s = patience_s
        self.silent_s = 0.0
        self.error: RoostError | None = None
        self.on_break: list[Callable[[], None]] = []

    @property
    def ends(self) -> frozenset[str]:
        return frozenset((self.source.peer_id, self.target.peer_id))

    def cut(self, error: RoostError) -> None:
        """End it; the first reason counts."""
        if self.error is None:
            self.error = error
            for callback in self.on_break:
                callback()


class VirtualNetwork:
    """Carries messages between endpoints. Everything random comes from `rng`; everything that happens is told to `note`."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, note: Callable[..., None]) -> None:
        self.loop = loop
        self.rng = rng
        self.note = note
        self.after_message: Callable[[str, Message], None] = lambda peer_id, message: None
        """Called when a handler has taken a message or answered a call."""
        self._members: dict[str, VirtualTransport] = {}
        """By address."""
        self._ways: dict[tuple[str, str], Way] = {}
        self._cut: set[frozenset[str]] = set()
        self._open: dict[int, Passage] = {}
        self._stalled: dict[tuple[str, str], list[tuple[Passage, Callable[[], None]]]] = {}
        self._vanished: dict[str, VirtualTransport] = {}
        self._sweeping = False
        self._numbers = 0
        self.window = rng.choice([1, 2, 4, 16])

    # ------------------------------------------------------------ members

    def join(self, member: VirtualTransport, address: str) -> None:
        """Make an endpoint reachable. Raises InvalidConfigError if its address is taken."""
        if address in self._members:
            raise InvalidConfigError(f"{address} is already in use on this network")
        self._members[address] = member
        gone = self._vanished.pop(address, None)
        for passage in self._passages():
            # A machine that is back knows nothing of the connections that it had, and says so.
            if gone is not None and gone in (passage.source, passage.target):
                self._break(passage, "the peer was started again")

    def leave(self, member: VirtualTransport, why: str) -> None:
        """Make an endpoint unreachable and break its streams."""
        for address in [address for address, known in self._members.items() if known is member]:
            del self._members[address]
        for passage in self._passages():
            if member in (passage.source, passage.target):
                self._break(passage, f"{member.peer_id} {why}")

    def vanish(self, member: VirtualTransport) -> None:
        """Make an endpoint silent for ever, like a machine without power."""
        for address in [address for address, known in self._members.items() if known is member]:
            self._vanished[address] = self._members.pop(address)
        self._sweep()

    # ------------------------------------------------------------ faults

    def way(self, source: str, target: str) -> Way:
        """Return one direction of a link, drawn when it is first used."""
        key = (source, target)
        if key not in self._ways:
            base = self.rng.choice([0.0005, 0.005, 0.02])
            rate = self.rng.choice([1e5, 3e5, 1e6])
            self._ways[key] = Way(delay_s=base * self.rng.uniform(0.5, 1.5), jitter=self.rng.choice([0.1, 1.0, 3.0]), bytes_per_s=rate)
        return self._ways[key]

    def silence(self, source: str, target: str) -> None:
        """Let nothing arrive in this direction, without a word, until `restore`."""
        self.way(source, target).silent = True
        self._sweep()

    def restore(self, source: str, target: str) -> None:
        """Undo `silence`: what was under way and has not been given up arrives now."""
        way = self.way(source, target)
        way.silent = False
        for passage, deliver_now in self._stalled.pop((source, target), []):
            self.loop.after(way.delay_s, self._arrive, passage, (source, target), deliver_now)

    def cut(self, first: str, second: str) -> None:
        """Break everything between two peers, and refuse new connections at once until `mend`."""
        self._cut.add(frozenset((first, second)))
        self.reset(first, second)

    def mend(self, first: str, second: str) -> None:
        """Undo `cut`."""
        self._cut.discard(frozenset((first, second)))

    def reset(self, first: str, second: str) -> None:
        """Break the streams and calls that are open between two peers; new ones may be opened at once."""
        ends = frozenset((first, second))
        for passage in self._passages():
            if passage.ends == ends:
                self._break(passage, f"the connection between {first} and {second} was reset")

    # ------------------------------------------------------------ carrying

    def reach(self, source: VirtualTransport, peer: Peer) -> VirtualTransport:
        """Return the endpoint at an address. Raises PeerUnreachableError if nobody listens there."""
        target = self._members.get(peer.address) or self._vanished.get(peer.address)
        if target is None or target.peer_id != peer.peer_id or frozenset((source.peer_id, peer.peer_id)) in self._cut:
            raise PeerUnreachableError(f"{peer.peer_id} at {peer.address} cannot be reached from {source.peer_id}")
        return target

    def open(self, passage: Passage) -> None:
        """Watch over a new stream or call."""
        self._numbers += 1
        number = self._numbers
        self._open[number] = passage
        passage.on_break.append(lambda: self._open.pop(number, None) and None)
        if self._is_silent(passage):
            self._sweep()

    def patience(self) -> float:
        return self.rng.uniform(*PATIENCE_S)

    def carry(self, passage: Passage, source: str, target: str, nbytes: int, deliver_now: Callable[[], None], not_before: float) -> float:
        """Call `deliver_now` when `nbytes` have gone from `source` to `target`, not before that time; return when that is planned."""
        if source == target:
            due = max(not_before, self.loop.now + OWN_DELAY_S)
        else:
            way = self.way(source, target)
            took = way.delay_s * (1 + way.jitter * self.rng.random()) + nbytes / way.bytes_per_s
            due = max(not_before, self.loop.now + took)
        self.loop.after(due - self.loop.now, self._arrive, passage, (source, target), deliver_now)
        return due

    def _arrive(self, passage: Passage, direction: tuple[str, str], deliver_now: Callable[[], None]) -> None:
        if passage.error is not None:
            return
        stalled = self._stalled.get(direction)
        if direction[0] != direction[1] and (self.way(*direction).silent or stalled):
            self._stalled.setdefault(direction, []).append((passage, deliver_now))
            return
        deliver_now()

    def _passages(self) -> list[Passage]:
        return list(self._open.values())

    def _break(self, passage: Passage, why: str) -> None:
        target = passage.target
        passage.cut(PeerUnreachableError(f"{target.peer_id} at {target.known_as} cannot be reached from {passage.source.peer_id}: {why}"))

    def _is_silent(self, passage: Passage) -> bool:
        ends = (passage.source, passage.target)
        if any(end.machine.frozen or end.machine.dead for end in ends):
            return True
        if passage.source is passage.target:
            return False
        first, second = passage.source.peer_id, passage.target.peer_id
        return self.way(first, second).silent or self.way(second, first).silent

    def _sweep(self) -> None:
        if not self._sweeping:
            self._sweeping = True
            self.loop.after(1.0, self._sweep_again)

    def watch_silence(self) -> None:
        """Begin to count how long passages are silent: a machine was frozen."""
        self._sweep()

    def _sweep_again(self) -> None:
        self._sweeping = False
        silent = False
        for passage in self._passages():
            if not self._is_silent(passage):
                passage.silent_s = 0.0
                continue
            silent = True
            passage.silent_s += 1.0
            if passage.silent_s >= passage.patience_s:
                self._break(passage, "keepalives are not answered")
        if silent:
            self._sweep()
