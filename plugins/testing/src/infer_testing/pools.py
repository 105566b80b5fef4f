"""What ``CachePoolProtocol`` promises, tried on one pool: random lives of sequences, whose K and V tell them apart.

What a token writes depends on its sequence's tokens up to it and on the salt, as in a model, so that sequences that
share a prefix write the same. Every query asks for one position: its score with that position's key is far above all
others, so that its result has to be that position's value, and any other value says whose it is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor

from infer.contracts.attention import KV, AttentionSpec, Ragged
from infer.contracts.cache import KVCacheView, SharingPool
from infer.engine.graphs import Recording
from infer.kernels.reference import ReferenceKernels
from infer_testing.pool_machine import DRAFTS, LONGEST, MIXED, PLAIN, SIZE, WINDOWED, Life, Machine, MakePool, Pools
from infer_testing.states import SPECS
from infer_testing.suite import Skipped, Suite, Violation

SUITE: Suite[Pools] = Suite("check_pool")
check = SUITE.check


def check_pool(
    make: MakePool,
    *,
    kv_dtypes: Sequence[str] = (),
    states: bool = False,
    only: Sequence[str] = (),
    seed: int = 0,
    case: int | None = None,
) -> None:
    """Try everything that ``CachePoolProtocol`` promises on the pools that ``make`` makes. ``kv_dtypes`` and
    ``states`` are those of their registration. ``only`` names checks, ``case`` one case of each. Raises
    ConformanceError."""
    SUITE.enforce(Pools(make, kv_dtypes, states), only=only, seed=seed, case=case)


@check(
    "What a query reads is what its own sequence wrote, or one that shares the prefix, whatever has happened since", 20
)
def sequences(pools: Pools, draw: random.Random) -> None:
    Machine(pools, draw, num_tokens=draw.choice([None, None, 3 * LONGEST])).run(60)


@check("The same in a pool that is nearly always full, where sequences have to leave for others", 12)
def little_room(pools: Pools, draw: random.Random) -> None:
    Machine(pools, draw, num_tokens=LONGEST + draw.randrange(40), max_batch_size=4).run(60)


@check("The same for a model with layers that have a window, whose chunks are at most max_chunk long", 12)
def windows(pools: Pools, draw: random.Random) -> None:
    Machine(pools, draw, layers=WINDOWED, max_chunk=draw.choice([None, 9, 16, 33])).run(60)


@check("The same for a model whose layers with a window have smaller heads than the others", 8)
def mixed(pools: Pools, draw: random.Random) -> None:
    kv_dtype = draw.choice(("auto", *pools.kv_dtypes))
    Machine(pools, draw, layers=MIXED, max_chunk=draw.choice([9, 16, 33]), kv_dtype=kv_dtype).run(60)


@check("The same with K and V in int8", 4)
def quantized(pools: Pools, draw: random.Random) -> None:
    if "int8" not in pools.kv_dtypes:
        raise Skipped("the registration's kv_dtypes do not name int8")
    Machine(pools, draw, kv_dtype="int8").run(40)


@check(
    "A sequence finds the state that its own tokens have left, or the same tokens of another, and no rehearsal's", 20
)
def states(pools: Pools, draw: random.Random) -> None:
    if not pools.states:
        raise Skipped("the registration's states is not True")
    keys = {"states": SPECS[: draw.randint(1, 2)], "max_drafts": draw.choice([0, DRAFTS])}
    Machine(pools, draw, num_tokens=draw.choice([None, 2 * LONGEST]), **keys).run(80)


@check("There are max_batch_size slots; a slot that is freed begins anew at length 0, and shows nothing of before", 4)
def slots(pools: Pools, draw: random.Random) -> None:
    machine = Machine(pools, draw, num_tokens=None)
    for _ in range(3):
        for count in range(machine.context.max_batch_size):
            life = machine.allocate(3, reuse=False)
            if life is None:
                raise Violation(f"allocate gives None with {count} of {machine.context.max_batch_size} slots in use")
            machine.watch()
        if machine.pool.allocate([1, 2, 3]) is not None:
            raise Violation(f"more than max_batch_size = {machine.context.max_batch_size} slots are allocated")
        machine.extend(machine.lives, 3)
        machine.watch()
        machine.finish()


@check("A pool has room for one sequence of max_seq_len positions, and for no longer one", 2)
def full_length(pools: Pools, draw: random.Random) -> None:
    machine = Machine(pools, draw, num_tokens=LONGEST)
    life = machine.allocate(draw.choice([1, LONGEST - 20, LONGEST]), reuse=False)
    if life is None:
        raise Violation("allocate gives None in an empty pool for a prompt that is not longer than max_seq_len")
    while life.length < len(life.tokens):
        machine.extend([life], 33)
    while life.length < LONGEST:
        machine.decode()
        machine.watch()
    if machine.pool.grow(life.slot, LONGEST + 1):
        raise Violation(f"grow gives a sequence room for more than max_seq_len = {LONGEST} positions")
    machine.finish()
    if machine.pool.allocate([1] * (LONGEST + 1)) is not None:
        raise Violation(f"allocate gives a slot to more than max_seq_len = {LONGEST} tokens")


@check("free_tokens() falls with each sequence of full length by as much, until none fits", 2)
def free_tokens(pools: Pools, draw: random.Random) -> None:
    machine = Machine(pools, draw, num_tokens=draw.choice([None, 2 * LONGEST]))
    if machine.room < LONGEST:
        raise Violation(f"free_tokens() is {machine.room} in an empty pool; one of max_seq_len = {LONGEST} has to fit")
    before = machine.room
    while machine.allocate(LONGEST, reuse=False) is not None:
        if (after := machine.pool.free_tokens()) > before - LONGEST:
            raise Violation(
                f"free_tokens() was {before} and is {after} after a sequence of {LONGEST} positions was allocated"
            )
        before = after
    machine.finish()


@check("A view whose start is not the slot's length is refused with a ValueError, and nothing is booked", 4)
def wrong_starts(pools: Pools, draw: random.Random) -> None:
    machine = Machine(pools, draw, num_tokens=None)
    first, second = machine.allocate(30, reuse=False), machine.allocate(30, reuse=False)
    assert first is not None
    assert second is not None
    machine.extend([first, second], 9)
    for start in (8, 10, 0):
        try:
            machine.pool.batched_chunked_prefill_view([second.slot, first.slot], [9, start], [3, 3])
        except ValueError:
            machine.watch()
        else:
            raise Violation(f"a view extends slot {first.slot} from position {start} on, though it holds 9 positions")
    machine.extend([first, second], 21)
    machine.watch()


class Replayed(ReferenceKernels):
    """They read a view's tensors only, as kernels do that have a recorder: ``starts`` are those of the first view."""

    def extend_attention(self, q_THE: Tensor, k_cache: KV, v_cache: KV, ragged: Ragged, spec: AttentionSpec) -> Tensor:
        tensors = ragged.starts_B, ragged.offsets_B1, ragged.block_table_BP, ragged.flat_T
        now = Ragged(tuple(ragged.starts_B.tolist()), ragged.lens, ragged.offsets, *tensors)
        return super().extend_attention(q_THE, k_cache, v_cache, now, spec)


class Storing(ReferenceKernels):
    """They note how many bytes what they store into has, by its address."""

    def __init__(self) -> None:
        self.found: dict[int, int] = {}

    def store_kv(self, k_TKE: Tensor, v_TKE: Tensor, k_cache: KV, v_cache: KV, flat_T: Tensor) -> None:
        for cache in (k_cache, v_cache):
            for x in (cache,) if isinstance(cache, Tensor) else (cache.codes, cache.scales):
                memory = x.untyped_storage()
                self.found[memory.data_ptr()] = memory.nbytes()
        super().store_kv(k_TKE, v_TKE, k_cache, v_cache, flat_T)


@check("nbytes says how much memory K and V of all positions take", 4)
def size(pools: Pools, draw: random.Random) -> None:
    kernels, kv_dtype = Storing(), draw.choice(["auto", *pools.kv_dtypes])
    machine = Machine(pools, draw, num_tokens=draw.choice([None, 3 * LONGEST]), kernels=kernels, kv_dtype=kv_dtype)
    if (life := machine.allocate(9, reuse=False)) is None:
        raise Violation("allocate gives None in an empty pool")
    machine.extend([life], 9)
    head = SIZE + 4 if kv_dtype == "int8" else SIZE * machine.context.dtype.itemsize
    least = machine.room * sum(2 * spec.num_kv_heads * head for spec in machine.context.layers)
    # Where the pool stores K and V by itself, nobody sees its tensors; a pool that needs more than twice would be odd.
    most = sum(kernels.found.values()) or 2 * least
    if not least <= machine.pool.nbytes <= most:
        raise Violation(
            f"nbytes is {machine.pool.nbytes} with kv_dtype {kv_dtype}; the {machine.room} positions need {least} "
            f"bytes, and the tensors that K and V are stored in have {most if kernels.found else 'not been seen'}"
        )


@check("With rows, a decode view keeps its tensors, and an earlier one then serves the sequences of the latest", 8)
def recorded_views(pools: Pools, draw: random.Random) -> None:
    layers = draw.choice([PLAIN, WINDOWED])
    machine = Machine(pools, draw, num_tokens=None, max_batch_size=4, layers=layers, kernels=Replayed())
    for _ in range(4):
        if machine.allocate(draw.randint(1, 50)) is None:
            raise Violation("allocate gives None in a pool with room for all")
        machine.extend([machine.lives[-1]], LONGEST)
    first: KVCacheView | None = None
    for _ in range(6):
        lives = draw.sample(machine.lives, draw.randint(1, 4))
        for life in lives:
            machine.pool.grow(life.slot, len(life.tokens) + 1)
            life.tokens.append(draw.randrange(3))
        view = machine.pool.decode_view([life.slot for life in lives], 4)
        parts = [(life, life.length, 1) for life in lives]
        if first is None:
            first = view
        elif moved := Recording(lambda: "", first, ()).moved(view):
            raise Violation(
                f"decode_view(slots, rows) gives a view whose {moved} is not where that of the first one is"
            )
        machine.attend(first, parts, padding=4 - len(parts))
        machine.watch()


@check("A pool whose shares is True finds the prefix of a prompt that has been committed", 2)
def sharing(pools: Pools, draw: random.Random) -> None:
    machine = Machine(pools, draw, num_tokens=None, max_batch_size=3)  # two stay
    if not (isinstance(machine.pool, SharingPool) and machine.pool.shares):
        raise Skipped("this pool has no `shares = True`: its sequences share no K/V")
    tokens = machine.stems[0][:80]
    for leaves in (False, True, False):
        place = machine.pool.allocate(tokens)
        assert place is not None
        life = Life("s", tokens.copy(), 0, place.slot, place.num_cached, place.num_cached)
        machine.lives.append(life)
        machine.extend([life], LONGEST)
        machine.commit_computed(life)
        if leaves:
            machine.end(life)
    again = machine.pool.allocate([*tokens, 1, 2])
    if again is None or again.num_cached == 0:
        raise Violation("shares is True, but allocate does not find any of 80 tokens that have just been committed")
