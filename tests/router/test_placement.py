"""Who leaves for whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infer_router.placement import Held, place

HELD = st.lists(
    st.builds(
        Held,
        st.text("abcdefgh", min_size=1, max_size=3),
        st.integers(1, 10),
        st.integers(0, 5).map(float),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    unique_by=lambda each: each.name,
    max_size=8,
)


@given(st.integers(1, 20), st.integers(1, 40), HELD)
def test_there_is_room_once_the_evicted_have_left_and_none_leaves_in_vain(
    nbytes: int, memory: int, held: list[Held]
) -> None:
    placement = place(nbytes, memory, held)
    by_name = {each.name: each for each in held}
    evicted = [by_name[name] for name in placement.evicted]
    assert all(each.may_leave and not each.leaving for each in evicted)
    taken = sum(each.nbytes for each in held)
    left = taken - sum(each.nbytes for each in held if each.leaving)
    movable = sum(each.nbytes for each in held if each.may_leave and not each.leaving)
    if taken + nbytes <= memory:
        assert (placement.answer, evicted) == ("load", [])
    elif left - movable + nbytes > memory:
        assert (placement.answer, evicted) == ("full", [])
    else:
        assert placement.answer == "wait"
        rest = left - sum(each.nbytes for each in evicted)
        assert rest + nbytes <= memory
        for each in evicted:
            assert rest + each.nbytes + nbytes > memory


def test_idle_ones_leave_first_and_of_these_the_least_recently_used() -> None:
    held = [Held("a", 2, 1.0, busy=True), Held("b", 2, 3.0), Held("c", 2, 2.0), Held("d", 2, 0.0, may_leave=False)]
    assert place(2, 8, held).evicted == ("c",)
    assert place(4, 8, held).evicted == ("c", "b")
    assert place(6, 8, held).evicted == ("c", "b", "a")
    assert place(8, 8, held).answer == "full"
