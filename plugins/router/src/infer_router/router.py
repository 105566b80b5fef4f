"""Which replica a request goes to: the one that holds most of its prompt, as far as it is not busier than others.

Pure code without a clock, a network or threads. An ingress has one ``Router``; it tells it which replicas there are,
and asks for each request. A prompt is known by its ``chain``: a hash for each of its beginnings, the shortest first
(``infer_router.prefixes``).

Several ingresses do not talk to each other. They agree for two reasons: a prompt that an ingress has not seen goes to
one of few replicas that a hash of its first beginning chooses, and replicas tell all of them what they hold."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

HOLDERS = 8
"""How many replicas are remembered to hold a block: enough to spread a prefix that everybody uses."""
POINTS = 32
"""How many points of the ring a replica has. The ring chooses the replicas of prompts that are not known."""
CHOICES = 2
"""How many replicas the ring offers for such a prompt."""


@dataclass(frozen=True, slots=True)
class Choice:
    replica: str
    known: int
    """How many of the chain's blocks the replica is believed to hold."""


@dataclass(eq=False, slots=True)
class Replica:
    """A replica as long as it is known. If one of its name comes again, that is another."""

    name: str
    own: int = 0
    """Requests that this router has sent there and that have not ended."""
    others: int = 0
    """Requests that others have sent there, by its last report."""
    taking: bool = True
    """Whether it gets new requests."""
    points: list[int] = field(default_factory=list)

    @property
    def load(self) -> int:
        return self.own + self.others


class KnownBlocks:
    """Which replicas hold which blocks. At most ``most`` blocks are remembered, by two generations: a block that is
    used enters the young one, which becomes the old one when it is half of all, and the old one is dropped then, a few
    entries at a time. So it takes no list of what was used when, and what was used among the last ``most`` / 2 blocks
    is never dropped."""

    def __init__(self, most: int) -> None:
        self._half = max(1, most // 2)
        self._young: dict[int, tuple[Replica, ...]] = {}
        self._old: dict[int, tuple[Replica, ...]] = {}
        self._dropped: dict[int, tuple[Replica, ...]] = {}
        """Freeing it at once would hold up everybody for tens of milliseconds."""

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, block: int) -> tuple[Replica, ...]:
        """The holders, the latest first. Some may have left since."""
        return self._young.get(block) or self._old.get(block, ())

    def add(self, block: int, replica: Replica) -> None:
        holders = self._young.get(block)
        if holders is None:
            holders = self._old.pop(block, ())
            if len(self._young) >= self._half:
                self._dropped, self._old, self._young = self._old, self._young, {}
            for _ in range(min(2, len(self._dropped))):
                self._dropped.popitem()
        if not holders or holders[0] is not replica:
            holders = (replica, *[each for each in holders if each is not replica][: HOLDERS - 1])
        self._young[block] = holders

    def remove(self, block: int, replica: Replica) -> None:
        for generation in (self._young, self._old):
            holders = generation.get(block)
            if holders is not None and replica in holders:
                left = tuple([each for each in holders if each is not replica])
                if left:
                    generation[block] = left
                else:
                    del generation[block]


class Loads:
    """Replicas by load, for the least loaded one in constant time: a load changes by one at most times."""

    def __init__(self) -> None:
        self._by_load: dict[int, dict[Replica, None]] = {}
        self._least = 0
        self.total = 0
        self.count = 0

    def enter(self, replica: Replica) -> None:
        load = replica.load
        self._by_load.setdefault(load, {})[replica] = None
        self._least = min(self._least, load) if self.count else load
        self.count += 1
        self.total += load

    def leave(self, replica: Replica) -> None:
        load = replica.load
        level = self._by_load[load]
        del level[replica]
        if not level:
            del self._by_load[load]
        self.count -= 1
        self.total -= load

    def least(self) -> int:
        """The least load of all. There has to be a replica."""
        if self._least not in self._by_load:
            # A load mostly changes by one, so that the next level is near.
            above = self._least + 1
            self._least = above if above in self._by_load else min(self._by_load)
        return self._least

    def idle(self, without: Container[str]) -> Replica | None:
        """A replica of least load; of several, the one that has been at it for longest."""
        for load in (self.least(), *sorted(self._by_load)) if self.count else ():
            for replica in self._by_load[load]:
                if replica.name not in without:
                    return replica
        return None


class Router:
    """A replica may be chosen for what it holds if it then has at most ``slack`` requests more than the least loaded
    one; or at most ``balance`` times the mean load, rounded up, and ``slack`` more than twice the least load, so that
    none is idle for long. ``most_blocks`` bounds the memory, about 130 bytes for each."""

    def __init__(self, *, balance: float = 1.25, slack: int = 4, most_blocks: int = 1 << 20) -> None:
        self._balance = balance
        self._slack = slack
        self._known = KnownBlocks(most_blocks)
        self._loads = Loads()
        self._replicas: dict[str, Replica] = {}
        self._ring: list[tuple[int, str]] = []

    def __contains__(self, name: str) -> bool:
        return name in self._replicas

    def __iter__(self) -> Iterator[str]:
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)

    @property
    def blocks(self) -> int:
        """How many blocks are remembered."""
        return len(self._known)

    def open(self, name: str) -> int:
        """How many requests of this router the replica has."""
        return self._replicas[name].own

    def join(self, name: str) -> None:
        """A new replica, which gets requests from now on."""
        if name in self._replicas:
            return
        replica = self._replicas[name] = Replica(name)
        for i in range(POINTS):
            digest = blake2b(f"{name} {i}".encode(), digest_size=8).digest()
            replica.points.append(int.from_bytes(digest, "little"))
        self._ring = sorted([*self._ring, *[(point, name) for point in replica.points]])
        self._loads.enter(replica)

    def leave(self, name: str) -> None:
        """The replica is gone. Whatever it held is forgotten as it is met."""
        replica = self._replicas.pop(name, None)
        if replica is None:
            return
        if replica.taking:
            self._loads.leave(replica)
        replica.taking = False
        self._ring = [entry for entry in self._ring if entry[1] != name]

    def take(self, name: str, taking: bool) -> None:
        """Whether the replica gets new requests. What it has and holds remains."""
        replica = self._replicas[name]
        if replica.taking != taking:
            if taking:
                self._loads.enter(replica)
            else:
                self._loads.leave(replica)
            replica.taking = taking

    def taking(self, name: str) -> bool:
        return self._replicas[name].taking

    def report(self, name: str, open: int) -> None:
        """How many requests the replica itself says that it has, from whichever ingress."""
        if (replica := self._replicas.get(name)) is not None:
            self._change(replica, others=max(0, open - replica.own))

    def holds(self, name: str, blocks: Iterable[int]) -> None:
        """The replica says that its cache has these."""
        if (replica := self._replicas.get(name)) is not None:
            for block in blocks:
                self._known.add(block, replica)

    def forgets(self, name: str, blocks: Iterable[int]) -> None:
        """The replica says that its cache no longer has these."""
        if (replica := self._replicas.get(name)) is not None:
            for block in blocks:
                self._known.remove(block, replica)

    def choose(self, chain: Sequence[int], without: Container[str] = ()) -> Choice | None:
        """The replica for a request, other than those ``without``; None if there is none. Nothing is changed."""
        if not self._loads.count:
            return None
        most = self._most()
        for known in range(len(chain), 0, -1):
            best: Replica | None = None
            for replica in self._known.get(chain[known - 1]):
                if (
                    replica.taking
                    and replica.load < most
                    and replica.name not in without
                    and (best is None or replica.load < best.load)
                ):
                    best = replica
            if best is not None:
                return Choice(best.name, known)
        if chain:
            # As busy as another by a request at most: this is for agreement, and must not cost anybody a wait.
            least = self._loads.least()
            for replica in self._offered(chain[0]):
                if replica.load <= min(least + 1, most - 1) and replica.name not in without:
                    return Choice(replica.name, 0)
        idle = self._loads.idle(without)
        return None if idle is None else Choice(idle.name, 0)

    def begin(self, name: str, chain: Sequence[int]) -> Replica:
        """A request is sent to the replica, which will hold its prompt. Returns what ``end`` takes."""
        replica = self._replicas[name]
        self._change(replica, own=replica.own + 1)
        for block in chain:
            self._known.add(block, replica)
        return replica

    def end(self, replica: Replica) -> None:
        """A request that was begun has ended, in whatever way, be it after its replica."""
        self._change(replica, own=replica.own - 1)

    def _most(self) -> int:
        """The load that a replica may have after it got a request for what it holds."""
        share = (self._loads.total + 1) / self._loads.count
        least = self._loads.least()
        return max(least + self._slack, min(int(-(-self._balance * share // 1)), 2 * least + self._slack))

    def _offered(self, block: int) -> Iterator[Replica]:
        """The first replicas on the ring from the block's place on."""
        ring, seen = self._ring, set[str]()
        begin = bisect(ring, (block, ""))
        for i in range(min(len(ring), 4 * POINTS)):
            name = ring[(begin + i) % len(ring)][1]
            replica = self._replicas[name]
            if name not in seen and replica.taking:
                seen.add(name)
                yield replica
                if len(seen) == CHOICES:
                    return

    def _change(self, replica: Replica, own: int | None = None, others: int | None = None) -> None:
        if replica.taking:
            self._loads.leave(replica)
        replica.own = replica.own if own is None else own
        replica.others = replica.others if others is None else others
        if replica.taking:
            self._loads.enter(replica)
