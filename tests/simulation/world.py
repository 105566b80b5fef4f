"""A world of its own: clients, faults and the real engine and its loop, scheduler, pool, trie, snapshots and
speculation, without a model. Everything that happens in it follows from a seed."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, cast

import torch
from tests.simulation.door import Door
from tests.simulation.executor import VOCAB, Executor, answer, windows_of
from tests.support import Always, Knowing
from tokenizers.decoders import ByteLevel

from infer.contracts.attention import AttentionSpec
from infer.contracts.cache import CacheContext
from infer.contracts.params import SamplingParams
from infer.contracts.records import RequestRecord, StepRecord
from infer.contracts.request import Event, Owner, Request
from infer.contracts.scheduler import PENDING, Schedule, Sequence, Works
from infer.contracts.sections import EngineSettings
from infer.contracts.states import StateSpec
from infer.engine.batch import Batch
from infer.engine.engine import Abort, Engine
from infer.engine.pace import Pace
from infer.engine.schedulers import ContinuousScheduler, FairScheduler
from infer.engine.seats import Step
from infer.engine.speculation import Speculation
from infer.errors import InferError
from infer.kernels.reference import ReferenceKernels
from infer_cache_paged import PagedPool, PagedSettings
from infer_cache_paged.pages import Block, Node
from infer_cache_paged.snapshots import Snapshots

LONGEST = 256
AGING_S = 20.0
"""A step takes a second, unless the clock leaps."""
LEAPS_S = (5.0, 50.0, 500.0, 5000.0)
REFUSED, RAISED = 0.01, 0.001
"""How often a pool says that it has no room, or raises, of the calls that ask for some."""
WALK_EVERY = 8
"""A walk takes longer than a step, and what is wrong with the books mostly stays so."""
ENDS = frozenset(range(90, 93))
CPU = torch.device("cpu")

MARKS = (
    "a cached block was evicted",
    "a block has another user",
    "a prefix was found",
    "a state was evicted",
    "a state is kept at a fork",
    "a state was taken while one waits to be read",
    "step of several passes",
    "a prompt was cut",
    "preempted in the middle of its prompt",
    "preempted while it decoded",
    "who had lost its slot came back first",
    "a lower priority has waited for longer",
    "a share went before arrival",
    "drafts were right",
    "drafts taken back",
    "drafts taken back, at a block's edge",
    "memory ran out before a pass was computed",
    "a request's pass raised",
    "allocate found no room",
    "grow found no room",
    "the pool raised",
    "the clock leapt",
    "a client read what had ended",
    "a client left",
    "no place was left",
    "aborted",
    "aborted before its last token",
    "ended by stop",
    "ended by length",
    "ended by abort",
    "ended by error",
    "ended by timeout",
    "a token has no text",
)
"""What has to happen in many worlds together, or they would show little."""


class Fickle(ContinuousScheduler):
    """With ``draw``, whom it preempts is anybody."""

    def __init__(self, pool: PagedPool, settings: EngineSettings, draw: random.Random | None) -> None:
        super().__init__(pool, settings)
        self._draw = draw

    def victim(self) -> Sequence:
        return super().victim() if self._draw is None else self._draw.choice(self.seats.running)


class Hurried(Pace):
    """Has time for any number of tokens of prompts, which it draws."""

    def __init__(self, draw: random.Random, marks: Counter[str]) -> None:
        self._draw, self._marks = draw, marks

    def learn(self, works: Sequences[Works], seconds: float) -> None:
        pass

    def cut(self, schedule: Schedule) -> Schedule:
        lens = [self._draw.choice([0, 1, work.length // 2, work.length]) for work in schedule.prefills]
        if lens and not (schedule.decodes or any(lens)):
            lens[0] = 1
        pairs = [*zip(schedule.prefills, lens, strict=True)]
        self._marks["a prompt was cut"] += any(length < work.length for work, length in pairs)
        kept = [work.sequence.extend(length) for work, length in pairs if length]
        return Schedule(schedule.decodes, kept, schedule.mixed)


class InjectedError(Exception):
    """A fault that the world plans."""


class Letters:
    """A tokenizer whose tokens are pairs of letters, one of which may have no text: looking that up raises."""

    decoder = ByteLevel()

    def __init__(self, mute: int | None, marks: Counter[str]) -> None:
        self.mute, self._marks = mute, marks

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {}

    def id_to_token(self, token_id: int) -> str:
        if token_id == self.mute:
            self._marks["a token has no text"] += 1
            raise InjectedError("mute")
        return chr(97 + token_id // 26) + chr(97 + token_id % 26)

    def decode(self, token_ids: Sequences[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(self.id_to_token, token_ids))

    def fails(self, request: Request, answer: Sequences[int]) -> bool:
        """Whether a text is needed that does not exist: of the answer, or of the prompt's last token, after which a
        character may go on."""
        return self.mute in answer or self.mute == request.prompt_token_ids[-1]


def command(seed: int, steps: int, faults: bool) -> str:
    """What shows a world that fails again. It compares the books after each step, so it fails in the last one at the
    latest."""
    return f"python -m tests.simulation --seed {seed} --worlds 1 --steps {steps}{'' if faults else ' --no-faults'}"


@dataclass
class World:
    """One engine and its clients. ``step`` does what happens next; ``check`` and ``finish`` raise for what must not
    be."""

    seed: int
    faults: bool = True
    events: dict[str, list[Event]] = field(default_factory=dict)
    marks: Counter[str] = field(default_factory=Counter)
    """What has happened, and how often."""
    walk_every: int = WALK_EVERY
    """After how many steps all books are compared."""
    steps: int = 0
    now: float = 0.0

    def __post_init__(self) -> None:
        draw = self.draw = random.Random(self.seed)
        self.batch = draw.randint(1, 8)
        self.size = draw.choice([1, 2, 4, 7, 16])
        chunk = draw.choice([1, 3, 16, 64])
        windows: list[int | None] = [None]
        if draw.random() < 0.4:
            windows.append(draw.choice([3, 12, 40]))
        self.stateful = draw.random() < 0.5
        self.lag = draw.randint(0, 1)
        self.speculates = draw.random() < 0.4
        budget = draw.choice([None, draw.randint(self.batch, 80)])
        self.settings = EngineSettings(
            max_batch_size=self.batch,
            prefill_chunk_size=chunk,
            max_tokens_per_step=budget,
            max_num_partial_prefills=draw.choice([None, 1, 2]),
            mixed_batches=draw.random() < 0.7,
        )
        layers = [
            AttentionSpec(1, 1, 1, 1.0, window=window) for window in windows for _ in range(1 if window is None else 2)
        ]
        self._context = CacheContext(
            layers,
            self.batch,
            LONGEST,
            torch.float32,
            CPU,
            ReferenceKernels(),
            max_chunk=max(chunk, 9),
            states=[StateSpec(((1,),), (torch.float32,))] if self.stateful else (),
            max_drafts=8 if self.speculates else 0,
        )
        blocks = -(-LONGEST // self.size)
        self._paged = PagedSettings(
            block_size=self.size,
            num_blocks=blocks + draw.randint(0, max(1, blocks // 4)),
            state_snapshots=draw.choice([None, 1, 4]) if self.stateful else None,
        )
        self.answers: dict[str, list[int]] = {}
        """What each request is to be answered with."""
        self.requests: dict[str, Request] = {}
        self._open: set[str] = set()
        """Requests that have not ended."""
        self.aborted: set[str] = set()
        self.failed: set[str] = set()
        """Requests that a fault may have ended."""
        self._right = draw.choice([0.0, 0.5, 0.8, 1.0]) if self.speculates else 0.0
        self.budget = budget
        self._fickle = draw if draw.random() < 0.3 else None
        self._owners = random.Random(f"owners {self.seed}")
        self._seeds = random.Random(f"seeds {self.seed}")
        self._times = random.Random(f"times {self.seed}")
        self._forks = random.Random(f"forks {self.seed}")
        self._rooms = random.Random(f"rooms {self.seed}")
        texts = random.Random(f"texts {self.seed}")
        self._texts = (
            Letters(texts.choice([None, texts.randrange(VOCAB)]), self.marks) if texts.random() < 0.3 else None
        )
        self.fair = self._owners.random() < 0.3
        self.aging = AGING_S if random.Random(f"aging {self.seed}").random() < 0.5 else None
        self._paces = own if (own := random.Random(f"pace {self.seed}")).random() < 0.3 else None
        self._clients = own if (own := random.Random(f"clients {self.seed}")).random() < 0.2 else None
        """Draws how clients read, where they have streams."""
        self._injected = self._reported = 0
        """How many passes raised because the world wanted it, and how many did according to observers."""
        self._start()
        self._disturbed = False
        """Whether a pass has raised since the last walk."""
        self._deadlines: dict[str, float] = {}
        """When requests have to have ended that have not, by their ids."""
        self._recent: deque[Request] = deque(maxlen=8)
        self._rate = draw.choice([0.05, 0.15, 0.5])
        self._prefixes = [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 150))] for _ in range(4)]
        self._short = self._most = 0
        """For how many passes memory is short, and how many tokens they have at most."""
        self._poison: set[str] = set()
        """Requests whose passes raise."""

    def _start(self) -> None:
        """A new process begins."""
        self._gone = False
        """Whether the pool has raised, so that the engine has to end."""
        self.pool = PagedPool(self._context, self._paged)
        self.room = self.pool.free_tokens()
        executor = Executor(self.pool, self.batch, self._fault)
        speculation = None
        if self.speculates:
            speculation = Speculation(
                Knowing(self.answers, self._right, self.seed),
                "The proposer",
                self.pool,
                Always(random.Random(self.seed)),
                truncate=lambda slot, length: self.pool.block_manager.truncate(slot, length),
                most=8,
                max_tokens_per_step=self.budget,
                vocab_size=VOCAB,
            )
        self.scheduler = (
            FairScheduler(self.pool, self.settings) if self.fair else Fickle(self.pool, self.settings, self._fickle)
        )
        self.pace = None if self._paces is None else Hurried(self._paces, self.marks)
        self.engine = Engine(
            executor,
            self.scheduler,
            self.pool,
            tokenizer=cast(Any, self._texts),
            eos_token_ids=ENDS,
            max_seq_len=LONGEST,
            lag=self.lag,
            publish=self._publish,
            notify=self._notify,
            speculation=speculation,
            priority_aging_s=self.aging,
            clock=lambda: self.now,
            pace=self.pace,
        )
        self.door: Door | None = None
        if self._clients is not None:
            self.door = Door(self.engine, 3 * self.batch, self._ended, self.marks)
        self._watch()
        self._refuse("allocate", None)
        self._refuse("grow", False)

    def _refuse(self, name: str, refusal: object) -> None:
        """The pool has no room now and then, though it has; or it raises."""
        inner = getattr(self.pool, name)

        def refusing(*args: Any, **keys: Any) -> Any:
            if self.faults and (drawn := self._rooms.random()) < REFUSED:
                if drawn < RAISED:
                    self.marks["the pool raised"] += 1
                    self._gone = True
                    raise MemoryError("no memory for the books")
                self.marks[f"{name} found no room"] += 1
                return refusal
            return inner(*args, **keys)

        setattr(self.pool, name, refusing)

    def _end(self) -> None:
        """The engine has ended, and whoever runs it tells all who wait."""
        left = sorted(self._open, key=int)
        self.failed.update(left)
        door, self.door = self.door, None
        self._publish([Event(id, finish_reason="error", error="the engine has stopped") for id in left])
        if door is not None:
            door.fail(MemoryError("no memory for the books"))
            self._compare(door)
        self._reported += self.engine._reporter.failed_passes
        self._start()

    def arrive(self) -> None:
        """A client asks for something, which often begins like what others ask for."""
        draw, id = self.draw, str(len(self.requests))
        prefix = draw.choice(self._prefixes)
        prompt = prefix[: draw.randint(0, len(prefix))]
        prompt += [draw.randrange(VOCAB) for _ in range(draw.randint(0 if prompt else 1, 40))]
        known = draw.choice(self._recent) if self.requests and draw.random() < 0.5 else None
        if known is not None:  # a conversation goes on
            prompt = [*known.prompt_token_ids, *self.answers[known.id], *prompt[:20]]
        prompt = prompt[: LONGEST - 2]
        request = Request.make(
            prompt,
            SamplingParams(max_tokens=draw.randint(1, 40), seed=self._seeds.getrandbits(63)),
            vocab_size=VOCAB,
            max_seq_len=LONGEST,
            id=id,
            cache_salt=draw.choice(["", "", "", "a"]),
            priority=draw.choice([0, 0, 0, 1]),
            group=draw.choice(["", "", f"group {len(self.requests) // 3}"]),
            forks=tuple(self._forks.sample(range(len(prompt) + 1), 2)) if self._forks.random() < 0.5 else (),
            owner=Owner(self._owners.choice("ab"), self._owners.choice("xy")),
            timeout_s=self._times.choice([3.0, 30.0, 300.0]) if self._times.random() < 0.1 else None,
        )
        request = replace(request, arrival=self.now)
        if self._clients is None:
            self.engine.submit(request)
        elif not self._finds_place(request):
            return
        self.requests[id] = request
        if not self._ended(id):
            self._open.add(id)
        self._recent.append(request)
        if request.timeout_s is not None:
            self._deadlines[id] = request.arrival + request.timeout_s
        self.answers[id] = answer(request, ENDS, windows_of(self.pool), self.stateful, LONGEST)
        if self.faults and draw.random() < 0.02:
            self._poison.add(id)
            self.failed.add(id)
        if self._texts is not None and self._texts.fails(request, self.answers[id]):
            self.failed.add(id)

    def _finds_place(self, request: Request) -> bool:
        """Let a client ask for its stream. Those of a group may share a place; of others, each has one."""
        assert self.door is not None
        assert self._clients is not None
        here = [self.requests[id] for id in self._open]
        names = {other.group or other.id for other in here}
        if self.door.submit(request, late=self._clients.random() < 0.3):
            assert len(names) < self.door.max_open or request.group in names, "there is no place, and it is taken"
            return True
        assert len(here) >= self.door.max_open, "there is a place, and it is refused"
        self.marks["no place was left"] += 1
        return False

    def step(self) -> None:
        """Something happens."""
        draw = self.draw
        self.steps += 1
        leaps = self._times.random() < 0.005
        self.marks["the clock leapt"] += leaps
        self.now += self._times.choice(LEAPS_S) if leaps else 1.0
        if len(self.scheduler.seats.waiting) > 3 * self.batch:  # as many as an engine lets wait
            self._rate = 0.02
        elif self.steps % 50 == 0:
            self._rate = draw.choice([0.05, 0.15, 0.5])
        while draw.random() < self._rate:
            self.arrive()
        gone: list[str] = []
        if self.faults and self.requests and draw.random() < 0.02:
            id = draw.choice([*self.requests])
            if not self._ended(id):
                said = sum(len(event.token_ids) for event in self.events.get(id, ()))
                self.marks["aborted before its last token" if said + 1 == len(self.answers[id]) else "aborted"] += 1
            self.aborted.add(id)
            gone.append(id)
            if self.door is None:
                self.engine.submit(Abort(id))
            else:
                self.door.leave(id)
        if self.engine.has_work():
            raised = self._injected
            try:
                self.engine.step()
            except (MemoryError, InferError):
                if not self._gone:
                    raise
                self._end()
            assert not self._gone, "what the pool raised is lost"
            assert all(map(self._ended, gone)), f"{gone} goes on, though nobody wants it"
            if self.door is not None and self._clients is not None:
                self.door.turn(late=self._clients.random() < 0.05)
            self._disturbed = self._disturbed or self._injected > raised
            if self._deadlines and min(self._deadlines.values()) <= self.now:
                late = [id for id, due in self._deadlines.items() if due <= self.now]
                raise AssertionError(f"{', '.join(late)} should have ended by now")

    def drain(self) -> None:
        """No more arrivals and faults, and time for whole chunks. Raises AssertionError if that takes longer than those
        who are here would take one after another."""
        self.faults = False
        self._poison.clear()
        self.engine._pace = None
        most = self.most_steps()
        for _ in range(most):
            if not self.engine.has_work():
                break
            self.engine.step()
        assert not self.engine.has_work(), f"what takes {most} steps, one after another, has not ended"

    def most_steps(self) -> int:
        """How many steps an engine takes at most that answers the requests that are here one after another: a step for
        each chunk of what a request has so far, one for each token that it still needs, and a pass ahead, because it
        may have ended by a token that was not known yet. One step reads what is in flight, one the inbox.

        In company, the first in order still gets its whole chunk or token in each step, unless those who decode use up
        the budget, and they are then ahead of their own time. What is computed again of whoever loses its slot is not
        counted: no world has needed that yet, because others get on in the same steps. Where one runs at a time, an
        engine comes within a step or two of this."""
        isolation, most = self.engine._isolation, 2
        chunk = min(self.settings.prefill_chunk_size, self.budget or LONGEST)
        if isolation._limit is not None:  # a fault has left it, and only time lifts it
            chunk = min(chunk, isolation._limit.tokens)
        alone = {sequence.id: suspects.most or chunk for sequence, suspects in isolation._suspects.items()}
        for id, request in self.requests.items():
            if not self._ended(id):
                said = sum(len(event.token_ids) for event in self.events.get(id, ()))
                most += math.ceil((len(request.prompt_token_ids) + said) / min(chunk, alone.get(id, chunk)))
                most += len(self.answers[id]) - said + self.lag
        return most

    def live(self, steps: int) -> None:
        """So many steps, and all that is left to be answered. Raises AssertionError for what must not be; a note says
        how it is seen again."""
        faults = self.faults
        try:
            self._live(steps)
        except Exception as error:
            error.add_note(command(self.seed, self.steps, faults))
            raise
        finally:
            if self.door is not None:
                self.door.discard()

    def _live(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            self.check()
            if self._disturbed or self.steps % self.walk_every == 0:
                self._disturbed = False
                self.walk()
        self.drain()
        self.check()
        self.walk()
        self.finish()

    # What must be so

    def check(self) -> None:
        """What is told fast: the queues, the slots, and how many pages there are. Raises AssertionError."""
        pages, seats = self.pool.block_manager.pages, self.scheduler.seats
        for queue in (seats.waiting, seats.running):
            keys = [*map(seats.key, queue)]
            assert keys == sorted(keys), "a queue is out of order"
        ahead = any(a.request.priority > b.request.priority for a, b in pairwise(seats.waiting))
        self.marks["a lower priority has waited for longer"] += ahead
        if isinstance(self.scheduler, FairScheduler):
            self.marks["a share went before arrival"] += seats.waiting != sorted(
                seats.waiting, key=self.scheduler._place
            )
        for sequence in seats.running:
            assert sequence.slot is not None, "a sequence runs without a slot"
            assert pages.holdings[sequence.slot].salt == sequence.request.cache_salt, "a slot has another's salt"
        assert len(pages.holdings) == len(seats.running), "a slot has no sequence"
        blocks = set[Block | None]().union(
            *[
                table[first:] if first else table
                for holding in pages.holdings.values()
                for first, table in zip(holding.firsts, holding.tables, strict=True)
            ]
        )
        known = len(pages.free_list) + sum(map(len, filter(None, blocks)))
        for group, cached in zip(pages.groups, pages.cached, strict=True):
            known += group.pages * len(cached)
        assert known == pages.num_pages, "a page is lost"

    def walk(self) -> None:
        """Every page, node and state is where the books have it. Raises AssertionError."""
        pages = self.pool.block_manager.pages
        nodes: list[Node] = []
        stack = [*pages.root.children.values()]
        while stack:
            node = stack.pop()
            nodes.append(node)
            tokens: Any = node.edge[1] if node.parent is pages.root else node.edge  # type: ignore[index]
            assert PENDING not in tokens, "a block of tokens that nobody knows is shared"
            stack += node.children.values()
        owned: Counter[int] = Counter()
        owners: Counter[Node] = Counter()
        users: list[Counter[Block]] = [Counter() for _ in pages.groups]
        for holding in pages.holdings.values():
            owners.update({*holding.nodes})
            for counts, table in zip(users, holding.tables, strict=True):
                blocks = [*filter(None, table)]
                owned.update(chain.from_iterable(blocks))
                counts.update({*blocks})
        shared = Counter(chain.from_iterable(block for node in nodes for block in node.blocks if block))
        assert max(shared.values(), default=1) == 1, "a page is in two nodes"
        cached = shared.keys() - owned.keys()
        free = {*pages.free_list}
        assert len(free) == len(pages.free_list), "a page is free twice"
        assert free.isdisjoint(chain(owned, shared)), "a free page is used"
        assert len(free) + len(owned) + len(cached) == pages.num_pages, "a page is lost"
        several = {page for page, count in owned.items() if count > 1}
        assert several <= shared.keys(), "two sequences have a page of one"
        for node in nodes:
            assert node.owners == owners.get(node, 0), "a node has another number of owners"
            for k, block in enumerate(node.blocks):
                if block is not None:
                    used = users[k].get(block, 0)
                    assert node.users[k] == used, "a node's pages have another number of users"
                    assert (node in pages.cached[k]) == (not used), "a node is cached that is used, or the reverse"
        self._check_states(nodes)

    def _check_states(self, nodes: Iterable[Any]) -> None:
        books = self.pool.block_manager.state_manager
        if not isinstance(books, Snapshots):
            return
        uses: Counter[int] = Counter(node.state for node in nodes if node.state is not None)
        assert max(uses.values(), default=1) == 1, "a row is two nodes' state"
        uses.update(row for plan in books._plans.values() for _, row in plan.saved)
        uses.update(books._reading.values())
        rows = range(books.num_rows - books.count, books.num_rows)
        assert [books._uses[row] for row in rows] == [uses.get(row, 0) for row in rows], (
            "a row has another number of uses"
        )
        assert sorted(books._free) == [row for row in rows if not uses[row]], "a row is lost, or free and used"
        assert {*books._kept, *books._served} == {node for node in nodes if node.state is not None}

    def finish(self) -> None:
        """Everybody has been answered, and nothing is left over. Raises AssertionError."""
        for id, request in self.requests.items():
            events = self.events.get(id, [])
            assert [e.finish_reason is not None for e in events].count(True) == 1, f"{id} has not ended once"
            assert events[-1].finish_reason is not None, f"{id} goes on after its end"
            found = [token for event in events for token in event.token_ids]
            wanted, reason = self.answers[id], events[-1].finish_reason
            if reason in ("abort", "error", "timeout"):
                assert reason == "timeout" or id in (self.aborted if reason == "abort" else self.failed), (
                    f"{id}: {events[-1].error}"
                )
                assert found == wanted[: len(found)], f"{id} has other tokens"
            else:
                assert found == wanted, f"{id} is answered otherwise: {request}"
                if self._texts is not None:
                    text = self._texts.decode(wanted[: -1 if reason == "stop" else None])
                    assert "".join(event.text for event in events) == text, f"{id} has another text"
        if self.door is not None:
            self.door.close()
            self._compare(self.door)
        assert self.pool.free_tokens() == self.room, "the pool has lost room"
        raised = self._reported + self.engine._reporter.failed_passes
        assert raised == self._injected, "a pass raised of itself"

    def _compare(self, door: Door) -> None:
        """Clients have read what the engine has told, all of it unless they left."""
        for id, events in door.read.items():
            read, told = (
                [(e.token_ids, e.text, e.finish_reason) for e in these] for these in (events, self.events[id])
            )
            assert read == told or (id in self.aborted and read == told[: len(read)]), f"{id} has read otherwise"

    def _watch(self) -> None:
        """Count what happens inside."""
        seats, manager, marks = self.scheduler.seats, self.pool.block_manager, self.marks
        pages, books = manager.pages, manager.state_manager

        def before(owner: Any, name: str, mark: Callable[..., str | None]) -> None:
            inner = getattr(owner, name)

            def watched(*args: Any) -> Any:
                if found := mark(*args):
                    marks[found] += 1
                return inner(*args)

            setattr(owner, name, watched)

        admit = seats.admit

        def admitted(sequence: Sequence, step: Step) -> bool:
            if not admit(sequence, step):
                return False
            place, waiting = self._place(sequence), [*seats.waiting]
            assert all(place <= self._place(other) for other in waiting), f"{sequence.id} is admitted out of order"
            marks["who had lost its slot came back first"] += sequence.recomputed and bool(waiting)
            return True

        def preempted(sequence: Sequence) -> str:
            if self.fair or self._fickle is None:
                last = max(seats.running, key=self._place)
                assert sequence is last, f"{sequence.id} is preempted, though {last.id} comes after it"
            return f"preempted {'while it decoded' if sequence.decoding else 'in the middle of its prompt'}"

        def cut(slot: int, length: int) -> str | None:
            taken = manager.length(slot) - length
            edge = ", at a block's edge" if length % self.size == 0 else ""
            return f"drafts taken back{edge}" if taken else None

        def used(nodes: Sequences[Node], k: int) -> str | None:
            return "a block has another user" if any(node.users[k] for node in nodes) else None

        setattr(seats, "admit", admitted)  # noqa: B010
        before(seats, "preempt", preempted)
        before(pages, "_evict", lambda: "a cached block was evicted")
        before(pages, "_use", used)
        before(manager, "truncate", cut)
        if isinstance(books, Snapshots):
            before(books, "forget", lambda node: "a state was evicted")
            before(books, "_join", lambda plan, node, kind: "a state is kept at a fork" if kind == "fork" else None)
            reading = books._reading
            before(
                books, "_take", lambda slot, border: "a state was taken while one waits to be read" if reading else None
            )

    def _place(self, sequence: Sequence) -> tuple[Any, ...]:
        """Where a sequence comes in the order in which slots are given and, from its end, taken. By default that is the
        priority, or the time with what a priority is worth, and then the arrival: ids count arrivals. Fair shares come
        before; who has lost a slot once comes first there, and keeps the next one for the longest."""
        request = sequence.request
        rank = request.priority if self.aging is None else request.arrival + request.priority * self.aging
        if not self.fair:
            return rank, int(request.id)
        shares, owner = cast(FairScheduler, self.scheduler), request.owner
        got = shares._keys[owner.key], shares._users[owner.key][owner.user]
        return not sequence.recomputed, *got, rank, int(request.id)

    def _ended(self, id: str) -> bool:
        return id in self.events and self.events[id][-1].finish_reason is not None

    def _publish(self, events: Sequences[Event]) -> None:
        for event in events:
            if event.finish_reason is not None:
                self._open.discard(event.request_id)
                due = self._deadlines.pop(event.request_id, math.inf)
                assert event.finish_reason != "timeout" or due <= self.now, "it still has time"
            self.events.setdefault(event.request_id, []).append(event)
        if self.door is not None:
            self.door.publish(events)

    def _notify(self, hook: str, record: StepRecord | RequestRecord) -> None:
        if isinstance(record, StepRecord):
            assert self.budget is None or record.computed_tokens <= self.budget, "a step is over its budget"
            self._reported += record.failed_passes
            self.marks["step of several passes"] += record.passes > 1
        else:
            self.marks[f"ended by {record.finish_reason}"] += 1
            self.marks["a prefix was found"] += record.num_cached > 0
            self.marks["drafts were right"] += record.accepted > 0

    def _fault(self, place: str, batch: Batch) -> None:
        if not self.faults:
            return
        asked = {request.id for readout in batch.readouts for request in getattr(readout, "requests", ())}
        if place == "after" and asked & self._poison:
            self.marks["a request's pass raised"] += 1
            self._injected += 1
            raise InjectedError("poison")
        if place == "before":
            if self._short:
                self._short -= 1
            elif self.draw.random() < 0.003:
                self._short, self._most = self.draw.randint(1, 30), self.draw.randint(1, 12)
        if self._short and sum(batch.lens) > self._most:
            self.marks[f"memory ran out {place} a pass was computed"] += 1
            self._injected += 1
            raise MemoryError("injected")
