"""Engine, scheduler and pool under random traffic: everything but the arithmetic.

The model is a function of the tokens so far, and its cache holds, at every place a K/V would be, which tokens it was
made from. So a page shared, evicted, freed or taken over wrongly is seen by the next pass that reads it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.examples import examples
from tests.support import Always

from infer.contracts.attention import AttentionSpec
from infer.contracts.cache import CacheContext
from infer.contracts.params import SamplingParams
from infer.contracts.proposer import DraftRequest
from infer.contracts.records import RequestRecord, StepRecord
from infer.contracts.request import Event, Request
from infer.contracts.scheduler import PENDING
from infer.contracts.sections import EngineSettings
from infer.engine.batch import Batch, Draw
from infer.engine.engine import Abort, Engine
from infer.engine.runner import Drawn, Result
from infer.engine.schedulers import ContinuousScheduler
from infer.engine.speculation import Speculation
from infer.kernels.reference import ReferenceKernels
from infer_cache_paged import PagedPool, PagedSettings, longest
from infer_cache_paged import pages as pages_module
from infer_cache_paged.pages import ROLLBACK
from infer_cache_slotted import SlottedPool

MAX_SEQ_LEN = 24
EOS = 0


def answer(tokens: Seq[int]) -> int:
    """What the model says after these tokens: 1 or 2, or now and then EOS."""
    return (EOS, 1, 2, 1, 2, 1, 2)[hash(tuple(tokens)) % 7]


def expected(prompt: Seq[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_tokens, MAX_SEQ_LEN):
        tokens.append(answer(tokens))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


@dataclass
class Launched:
    tokens: list[int | None]
    hidden_TD: None = None

    def results(self) -> list[Result]:
        return [Drawn(self.tokens, [None] * len(self.tokens))] if self.tokens else []


class Runner:
    """Computes at once, as a device does in its own time: tokens that the host does not know yet it knows itself."""

    def __init__(self, pool: Any, windows: Seq[int] = (MAX_SEQ_LEN,)) -> None:
        """``windows`` are those of the pool's tables."""
        self.pool = pool
        self.windows = windows
        self.memory: dict[int, tuple[int, ...]] = {}
        self.last: dict[int, int] = {}
        self.fault = ""
        self.computed = 0

    def launch(self, batch: Batch) -> Launched:
        fault, self.fault = self.fault, ""
        if fault == "launch":
            raise RuntimeError("never set out")
        if batch.decode_only:
            view = self.pool.decode_view(batch.slots)
        else:
            view = self.pool.batched_chunked_prefill_view(batch.slots, batch.starts, batch.lens)
        size = self.pool.storage.block_size
        ids = batch.token_ids_T.tolist()
        for row, slot in zip(batch.fed_rows.tolist(), batch.fed_slots.tolist(), strict=True):
            ids[row] = self.last[slot]
        assert PENDING not in ids
        histories = []
        for b, (start, length) in enumerate(zip(batch.starts, batch.lens, strict=True)):
            for ragged, window in zip(view.raggeds, self.windows, strict=True):
                places = [int(ragged.block_table_BP[b, p // size]) * size + p % size for p in range(start + length)]
                row = ragged.offsets[b]
                assert ragged.flat_T[row : row + length].tolist() == places[start:]
                history = self.memory[places[start - 1]] if start else ()
                for p in range(max(0, start - window + 1), start):
                    assert self.memory[places[p]] == history[: p + 1], "what was computed is what is read"
                for i in range(length):
                    history = (*history, ids[row + i])
                    self.memory[places[start + i]] = history
            histories.append(history)
        self.computed += len(ids)
        tokens: list[int | None] = []
        for readout in batch.readouts:
            assert isinstance(readout, Draw)
            for b, position in zip(readout.of, readout.positions_N.tolist(), strict=True):
                self.last[batch.slots[b]] = answer(histories[b][:position])
                tokens.append(self.last[batch.slots[b]])
        if fault == "not finite" and tokens:
            tokens[0] = None
        if fault == "not finite at the end" and tokens:
            tokens[-1] = None
        return Launched(tokens)


class Guesser:
    """A proposer that knows the model, and is right with some probability."""

    def __init__(self, right: float) -> None:
        self.right, self.draw = right, random.Random(1)

    def propose(self, draft_requests: Seq[DraftRequest]) -> list[list[int]]:
        proposals = []
        for draft_request in draft_requests:
            tokens = list(draft_request.token_ids)
            assert PENDING not in tokens
            for _ in range(draft_request.most):
                token = answer(tokens)
                tokens.append(token if self.draw.random() < self.right else (token + 1) % 3)
            proposals.append(tokens[len(draft_request.token_ids) :])
        return proposals

    def end(self, request_id: str) -> None: ...


class Traffic(RuleBasedStateMachine):
    """Clients come and leave, passes fail now and then; the drain always finishes and leaves nothing behind."""

    @initialize(
        pages=st.none() | st.integers(0, 12),
        size=st.sampled_from([1, 2, 4, 16]),
        batch=st.integers(1, 4),
        over=st.none() | st.integers(0, 12),
        lag=st.integers(0, 2),
        windows=st.sampled_from([(MAX_SEQ_LEN,), (5,), (2, 4, MAX_SEQ_LEN)]),
        right=st.none() | st.sampled_from([0.0, 0.6, 1.0]),
        keys=st.fixed_dictionaries(
            {
                "mixed_batches": st.booleans(),
                "prefill_chunk_size": st.sampled_from([1, 3, 8, 512]),
                "max_prefill_chunks_per_step": st.none() | st.integers(1, 2),
                "max_num_partial_prefills": st.none() | st.integers(1, 2),
            }
        ),
    )
    def start(
        self,
        pages: int | None,
        size: int,
        batch: int,
        over: int | None,
        lag: int,
        keys: dict[str, Any],
        windows: Seq[int] = (MAX_SEQ_LEN,),
        right: float | None = None,
    ) -> None:
        """``right``: how often drafts are; None without drafts."""
        self.budget = None if over is None else batch + over
        chosen = EngineSettings.model_validate({"max_batch_size": batch, "max_tokens_per_step": self.budget} | keys)
        pages_module.ROLLBACK = 0 if right is None else 5
        layers = [AttentionSpec(1, 1, 1, 1.0, window) for window in windows]
        context = CacheContext(layers, batch, MAX_SEQ_LEN, torch.float32, torch.device("cpu"), ReferenceKernels())
        context = replace(context, max_chunk=chosen.prefill_chunk_size)
        if pages is None:
            self.pool: Any = SlottedPool(context)
            windows = windows[:1]
        else:
            least = -(-MAX_SEQ_LEN // size)
            if len(windows) > 1:
                tried = (PagedSettings(block_size=size, num_blocks=n) for n in range(1, least + 1))
                least = sum(longest(context, found, 0) < MAX_SEQ_LEN for found in tried) + 1
            self.pool = PagedPool(context, PagedSettings(block_size=size, num_blocks=least + pages))
        self.pool.commit = self.checked(self.pool.commit)
        self.room = self.pool.free_tokens()
        self.runner = Runner(self.pool, windows)
        self.events: dict[str, list[Event]] = {}
        self.requests: dict[str, Request] = {}
        self.hurt: set[str] = set()
        self.steps: list[StepRecord] = []
        self.engine = Engine(
            self.runner,  # type: ignore[arg-type]
            ContinuousScheduler(self.pool, chosen),
            self.pool,
            tokenizer=None,
            eos_token_ids=frozenset({EOS}),
            max_seq_len=MAX_SEQ_LEN,
            lag=lag,
            publish=self.publish,
            notify=self.notify,
            speculation=None
            if right is None
            else Speculation(
                Guesser(right),
                "The proposer",
                self.pool,
                Always(random.Random(batch)),
                truncate=self.pool.truncate,
                most=5,
                max_tokens_per_step=self.budget,
                vocab_size=3,
            ),
        )

    @staticmethod
    def checked(commit: Callable[[int, list[int], int], None]) -> Callable[[int, list[int], int], None]:
        def wrapper(slot: int, token_ids: list[int], num_computed: int) -> None:
            assert PENDING not in token_ids[:num_computed]
            commit(slot, token_ids, num_computed)

        return wrapper

    def publish(self, events: Seq[Event]) -> None:
        for event in events:
            before = self.events.setdefault(event.request_id, [])
            assert not before or before[-1].finish_reason is None, "nothing follows the last event"
            before.append(event)

    def notify(self, hook: str, record: StepRecord | RequestRecord) -> None:
        if isinstance(record, StepRecord):
            self.steps.append(record)
            assert self.budget is None or sum(work.length for work in record.work) <= self.budget

    @rule(
        common=st.integers(0, 20),
        own=st.lists(st.integers(1, 2), min_size=1, max_size=3),
        new=st.integers(1, 12),
        salt=st.sampled_from(["", "", "s"]),
        times=st.integers(1, 4),
        group=st.sampled_from(["", "new", "g"]),
    )
    def submit(self, common: int, own: list[int], new: int, salt: str, times: int, group: str = "") -> None:
        group = f"g{len(self.requests)}" if group == "new" else group
        for _ in range(times):
            prompt = (*[1] * common, *own)
            params = SamplingParams(max_tokens=new)
            request = Request(prompt, params, id=f"r{len(self.requests)}", cache_salt=salt, group=group)
            self.requests[request.id] = request
            self.engine.submit(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(sorted(self.requests)))
        self.hurt.add(victim)
        self.engine.submit(Abort(victim))

    @rule(fault=st.sampled_from(["launch", "not finite", "not finite at the end"]))
    def fail(self, fault: str) -> None:
        self.runner.fault = fault

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()

    @invariant()
    def the_pool_is_whole(self) -> None:
        if isinstance(getattr(self, "pool", None), PagedPool):
            pages = self.pool.block_manager.pages
            tables = [table for holding in pages.holdings.values() for table in holding.tables]
            owned = {page for table in tables for block in table for page in block or ()}
            cached = [page for k, found in enumerate(pages.cached) for node in found for page in node.blocks[k] or ()]
            assert sorted([*pages.free_list, *owned, *cached]) == list(range(pages.num_pages))

    def teardown(self) -> None:
        pages_module.ROLLBACK = ROLLBACK
        if not hasattr(self, "engine"):
            return
        steps = 0
        while self.engine.has_work():
            self.engine.step()
            steps += 1
            assert steps < 5000, "the drain finishes"
        assert self.pool.free_tokens() == self.room
        for id, request in self.requests.items():
            events = self.events[id]
            assert [e.finish_reason is not None for e in events] == [False] * (len(events) - 1) + [True]
            tokens = [token for event in events for token in event.token_ids]
            truth = expected(request.prompt_token_ids, request.params.max_tokens or 0)
            assert tokens == truth[: len(tokens)]
            if events[-1].finish_reason in ("stop", "length"):
                assert tokens == truth
            else:
                assert events[-1].finish_reason == "error" or id in self.hurt


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=examples(300, 60), stateful_step_count=25)


def rows_by_lag(common: int, new: int) -> list[int]:
    """Rows computed for one request, with each lag."""
    rows = []
    for lag in (0, 1, 2):
        machine = Traffic()
        machine.start(None, 1, 1, None, lag, {})
        machine.submit(common, [1], new, "", 1)
        machine.teardown()
        rows.append(machine.runner.computed)
    return rows


def test_whoever_stops_is_computed_once_more_for_each_pass_of_lag() -> None:
    common = next(n for n in range(8) if len(expected([1] * (n + 1), 10)) < 10)
    rows = rows_by_lag(common, 10)
    assert rows == [rows[0], rows[0] + 1, rows[0] + 2]


def test_whoever_ends_by_length_is_never_computed_in_vain() -> None:
    common = next(n for n in range(8) if EOS not in expected([1] * (n + 1), 3))
    assert len(set(rows_by_lag(common, 3))) == 1


def test_answers_to_one_prompt_compute_it_once_whatever_is_on_its_way() -> None:
    """Nothing but its last token, which is wanted for its logits, is computed again; not even behind an answer of one
    token that has not been read back."""
    for lag, new in product((0, 1, 2), (1, 3)):
        machine = Traffic()
        machine.start(12, 1, 4, None, lag, {"prefill_chunk_size": 8})
        common = next(n for n in range(12, 20) if EOS not in expected([1] * (n + 1), new))
        machine.submit(common, [1], new, "", 4, "new")
        machine.teardown()
        assert machine.runner.computed == common + 4 * new, (lag, new)


def test_a_late_result_does_not_reach_the_next_request_of_the_same_id() -> None:
    stops, goes_on = (next(n for n in range(9) if (EOS in expected([1] * n + [2], 4)) == early) for early in (1, 0))
    machine = Traffic()
    machine.start(None, 1, 1, None, 1, {})
    machine.submit(stops, [2], 9, "", 1)
    while "r0" not in machine.events or machine.events["r0"][-1].finish_reason is None:
        machine.engine.step()
    assert machine.engine.has_work(), "a pass is on its way"
    machine.events.clear()
    machine.requests.clear()
    machine.submit(goes_on, [2], 4, "", 1)
    machine.teardown()


def test_drafts_are_made_from_known_tokens() -> None:
    """Whatever is on its way."""
    for lag in (0, 1, 2):
        machine = Traffic()
        machine.start(12, 1, 4, None, lag, {"prefill_chunk_size": 8}, right=1.0)
        common = next(n for n in range(12, 20) if EOS not in expected([1] * (n + 1), 9))
        machine.submit(common, [1], 9, "", 3, "new")
        machine.teardown()
        assert sum(step.accepted for step in machine.steps) > 3
