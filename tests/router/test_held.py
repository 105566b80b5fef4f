"""A replica's account of what its cache holds."""

from __future__ import annotations

import random

from infer_router.held import MOST_CHANGES, HeldBlocks, from_baggage, to_baggage
from infer_router.prefixes import MOST_BLOCKS


def test_blocks_travel_as_baggage_beside_other_entries() -> None:
    chain = tuple(random.Random(0).getrandbits(64) for _ in range(MOST_BLOCKS))
    assert from_baggage(to_baggage(chain)) == chain
    assert from_baggage("a=b;c=d, " + to_baggage(chain[:2]) + " ,e=f") == chain[:2]
    for strange in ("", "infer.prefix", "infer.prefix=", "infer.prefix=!!", "infer.prefix=AAAA", "x=" + "y" * 9000):
        assert from_baggage(strange) == ()
    assert from_baggage("infer.prefix=" + "A" * 11 * (MOST_BLOCKS + 9)) == ()


def test_what_was_used_longest_ago_is_forgotten_first_and_the_end_of_a_prompt_before_its_beginning() -> None:
    held = HeldBlocks(100, "a")
    held.used((1, 2), 40)
    held.used((3, 4), 40)
    held.used((1, 2), 40)  # used again: nothing new
    held.used((5,), 30)
    assert [block in held for block in (1, 2, 3, 4, 5)] == [True, True, True, False, True]
    held.used((6,), 20)
    assert [block in held for block in (1, 2, 3, 4, 5, 6)] == [True, True, False, False, True, True]


def test_an_ingress_that_asks_again_and_again_knows_what_is_held() -> None:
    held, rng = HeldBlocks(1000, "a"), random.Random(1)
    known: set[int] = set()
    version = ""
    for _ in range(300):
        for _ in range(rng.randrange(6)):
            start = rng.randrange(60) * 10
            held.used(tuple(range(start, start + rng.randrange(1, 9))), rng.randrange(20, 200))
        version, new, gone = held.since(version)
        known = (known | set(new)) - set(gone)
        assert not set(new) & set(gone)
        assert known == {block for block in range(700) if block in held}
    for other in ("", "b.3", "a.x", f"a.{10**9}", "a.-1"):
        _, new, gone = held.since(other)
        assert (set(new), gone) == (known, [])
    for i in range(MOST_CHANGES):
        held.used((10_000 + i,), 1)
    assert len(held.since(version)[1]) <= 1000
