"""The router as pure code: which replica is chosen, and what is remembered."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.examples import examples

from infer_router.prefixes import LENGTHS, MOST_BLOCKS, STEP, chain, prompt_bytes
from infer_router.router import CHOICES, Choice, Replica, Router

NAMES = [f"r{i}" for i in range(5)]
CHAINS = [tuple(100 * i + j for j in range(1, length + 1)) for i, length in enumerate((1, 3, 4, 6))]
CHAINS += [(*CHAINS[2][:2], 901, 902), (*CHAINS[3][:5], 903), ()]


class Model(RuleBasedStateMachine):
    """A router beside a plain account of the same events, which looks through everything at each choice."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(balance=1.25, slack=2, most_blocks=1000)
        self.taking: dict[str, bool] = {}
        self.own: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self.held: dict[str, set[int]] = {}
        self.tickets: dict[str, list[Replica]] = {}
        self.old: list[Replica] = []

    def load(self, name: str) -> int:
        return self.own[name] + self.others[name]

    @precondition(lambda self: len(self.taking) < 5)
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(set(NAMES) - set(self.taking))))
        self.router.join(name)
        self.taking[name], self.held[name], self.tickets[name] = True, set(), []

    @precondition(lambda self: self.taking)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.taking)))
        self.router.leave(name)
        del self.taking[name], self.held[name], self.own[name], self.others[name]
        self.old += self.tickets.pop(name)

    @precondition(lambda self: self.taking)
    @rule(data=st.data(), taking=st.booleans())
    def take(self, data: st.DataObject, taking: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.taking)))
        self.router.take(name, taking)
        self.taking[name] = taking

    @precondition(lambda self: self.taking)
    @rule(data=st.data(), open=st.integers(0, 12))
    def report(self, data: st.DataObject, open: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.taking)))
        self.router.report(name, open)
        self.others[name] = max(0, open - self.own[name])

    @precondition(lambda self: self.taking)
    @rule(data=st.data(), blocks=st.sampled_from(CHAINS), forget=st.booleans())
    def tell(self, data: st.DataObject, blocks: tuple[int, ...], forget: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.taking)))
        if forget:
            self.router.forgets(name, blocks[1:])
            self.held[name] -= set(blocks[1:])
        else:
            self.router.holds(name, blocks)
            self.held[name] |= set(blocks)

    @rule(asked=st.sampled_from(CHAINS), without=st.sets(st.sampled_from(NAMES), max_size=2))
    def request(self, asked: tuple[int, ...], without: set[str]) -> None:
        choice = self.router.choose(asked, without)
        loads = {name: self.load(name) for name, taking in self.taking.items() if taking}
        allowed = {name: load for name, load in loads.items() if name not in without}
        if not allowed:
            assert choice is None
            return
        assert choice is not None
        assert choice.replica in allowed
        least, share = min(loads.values()), (sum(loads.values()) + 1) / len(loads)
        most = max(least + 2, min(ceil(1.25 * share), 2 * least + 2))
        near = {name for name, load in allowed.items() if load < most}
        depth = {name: max((i for i, b in enumerate(asked, 1) if b in self.held[name]), default=0) for name in near}
        longest = max(depth.values(), default=0)
        assert choice.known == longest
        if longest:
            assert depth[choice.replica] == longest
            assert allowed[choice.replica] == min(allowed[name] for name in near if depth[name] == longest)
        elif asked:
            assert allowed[choice.replica] <= max(least + 1, min(allowed.values()))
        else:
            assert allowed[choice.replica] == min(allowed.values())
        self.tickets[choice.replica].append(self.router.begin(choice.replica, asked))
        self.own[choice.replica] += 1
        self.held[choice.replica] |= set(asked)

    @precondition(lambda self: any(self.own.values()))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, own in self.own.items() if own)))
        self.router.end(self.tickets[name].pop())
        self.own[name] -= 1

    @precondition(lambda self: self.old)
    @rule()
    def end_after_its_replica(self) -> None:
        self.router.end(self.old.pop())

    @invariant()
    def same_replicas(self) -> None:
        assert set(self.router) == set(self.taking)
        assert all(self.router.open(name) == self.own[name] for name in self.router)


Model.TestCase.settings = settings(max_examples=examples(60, 30), stateful_step_count=40)
TestModel = Model.TestCase


def test_what_is_remembered_is_bounded_and_the_latest_is_kept() -> None:
    router = Router(most_blocks=100)
    router.join("a")
    for block in range(1000):
        router.end(router.begin("a", (7, block)))
        assert router.blocks <= 101
        assert router.choose((7,)) == Choice("a", 1)  # used again and again
        assert all(router.choose((at,)) == Choice("a", 1) for at in range(max(0, block - 40), block + 1))
    assert router.choose((1,)) == Choice("a", 0)


def test_a_replica_that_has_left_is_not_chosen_for_what_it_held_and_its_requests_may_end_later() -> None:
    router = Router()
    router.join("a")
    begun = router.begin("a", (1, 2))
    router.join("b")
    router.leave("a")
    router.leave("a")
    router.end(begun)
    assert router.choose((1, 2)) == Choice("b", 0)
    router.leave("b")
    assert router.choose((1, 2)) is None


def test_a_hot_prefix_spreads_over_as_many_replicas_as_its_load_needs() -> None:
    router = Router(balance=1.25, slack=2)
    for name in NAMES:
        router.join(name)
    for i in range(100):
        choice = router.choose((1, 2, 1000 + i))
        assert choice is not None
        router.begin(choice.replica, (1, 2, 1000 + i))
        loads = [router.open(name) for name in NAMES]
        assert max(loads) <= max(ceil(1.25 * (i + 1) / len(NAMES)), min(loads) + 2)
    assert min(loads) >= 15


def test_ingresses_that_do_not_talk_send_new_prompts_to_the_same_few_replicas() -> None:
    first, second = Router(), Router()
    names = [f"r{i}" for i in range(50)]
    for router, order in ((first, names), (second, names[::-1])):
        for name in order:
            router.join(name)
    rng = random.Random(1)
    places: Counter[str] = Counter()
    for _ in range(200):
        block = rng.getrandbits(64)
        one, other = first.choose((block,)), second.choose((block,))
        assert one is not None
        assert one == other
        places[one.replica] += 1
        near = {choice.replica for _ in range(2) if (choice := second.choose((block,), {one.replica}))}
        assert len(near | {one.replica}) == CHOICES
    assert len(places) > 40


@given(st.binary(max_size=5000), st.binary(max_size=5000), st.sampled_from(("", "a", "ab")))
def test_texts_share_as_many_blocks_as_they_have_in_common(one: bytes, other: bytes, salt: str) -> None:
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    first, second = chain(one, salt), chain(other, salt)
    assert len(first) == sum(length <= len(one) for length in LENGTHS)
    shared = sum(a == b for a, b in zip(first, second, strict=False))
    assert shared == sum(length <= common for length in LENGTHS)
    assert not set(chain(one, salt + "x")) & set(first)


def test_a_long_text_has_few_blocks() -> None:
    assert len(chain(b"x" * (8 << 20))) == MOST_BLOCKS < 100
    assert all(b - a <= max(STEP, a // 8) for a, b in itertools.pairwise(LENGTHS))


@pytest.mark.parametrize(
    ("shorter", "longer"),
    [
        ({"prompt": "def f"}, {"prompt": "def f(x)"}),
        ({"prompt": [1, 2]}, {"prompt": [1, 2, 3]}),
        ({"prompt": [[1, 2], [9]]}, {"prompt": [1, 2, 3]}),
        ({"prompt": ["def f", "y"]}, {"prompt": "def f(x)"}),
        ({"input": "a"}, {"input": "ab"}),
        ({"messages": [{"role": "user", "content": "a"}]}, {"messages": [{"role": "user", "content": "a"}, {"x": 1}]}),
        (
            {"tools": [{"a": 1}], "messages": [{"role": "user"}], "seed": 1},
            {"messages": [{"role": "user"}, {"role": "assistant"}], "tools": [{"a": 1}]},
        ),
        ({"instructions": "be", "input": [{"a": 1}]}, {"input": [{"a": 1}, {"b": 1}], "instructions": "be"}),
    ],
)
def test_a_longer_prompt_begins_with_a_shorter_ones_bytes(
    shorter: dict[str, object], longer: dict[str, object]
) -> None:
    assert prompt_bytes(shorter)
    assert prompt_bytes(longer).startswith(prompt_bytes(shorter))


def test_instructions_count_but_for_the_line_that_changes_with_every_request() -> None:
    def of(*texts: str) -> bytes:
        system = [{"type": "text", "text": text} for text in texts]
        return prompt_bytes({"system": system, "messages": [{"role": "user", "content": "x"}]})

    assert of("be brief") != of("be kind")
    assert of("x-anthropic-billing-header: a", "be brief") == of("x-anthropic-billing-header: b", "be brief")
    assert of("x-anthropic-billing-header: a", "be brief") == of("be brief")


def test_bodies_without_a_prompt_have_no_bytes() -> None:
    bodies: tuple[dict[str, object], ...] = ({}, {"prompt": []}, {"prompt": 3}, {"messages": "x"}, {"input": []})
    for body in bodies:
        assert prompt_bytes(body) == b""
