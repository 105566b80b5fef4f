"""A machine that does what schedulers do with a pool, and knows what has to be in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infer.contracts.attention import AttentionSpec, Rotary
from infer.contracts.cache import Allocation, CacheContext, CachePoolProtocol, KVCacheView, LastingPool
from infer.kernels.reference import ReferenceKernels
from infer_testing.states import States
from infer_testing.suite import Violation

SIZE = 32
"""Of a head: two random keys of +1 and -1 are far from equal."""
SHARP = 2.0
"""What the key of the wanted position is multiplied by: all other scores are lower by 30 or so."""
LONGEST = 96
"""``max_seq_len`` of the pools."""
DRAFTS = 8
"""The most positions that are taken back at once."""
PLAIN = [AttentionSpec(4, 2, SIZE, 1.0)] * 2
WINDOWED = [AttentionSpec(4, 2, SIZE, 1.0, window=window) for window in (20, 20, None)]
MIXED = [*WINDOWED[:2], AttentionSpec(4, 1, 4 * SIZE, 1.0), *WINDOWED[:1]]
MakePool = Callable[[CacheContext], CachePoolProtocol]


@dataclass
class Pools:
    """What makes the pool that is tried."""

    make: MakePool
    kv_dtypes: Sequence[str] = ()
    states: bool = False

    def pool(self, draw: random.Random, **keys: Any) -> tuple[CachePoolProtocol, CacheContext]:
        given: dict[str, Any] = {"layers": PLAIN, "max_batch_size": draw.randint(2, 5), "kernels": ReferenceKernels()}
        cpu = torch.device("cpu")
        context = CacheContext(max_seq_len=LONGEST, dtype=torch.float32, device=cpu, **given | keys)
        return self.make(context), context


@dataclass(eq=False)
class Life:
    """A sequence in the pool, as it should be."""

    name: str
    tokens: list[int]
    salt: int
    slot: int
    length: int
    """How many positions the cache holds."""
    committed: int
    keys: list[int] = field(default_factory=list)
    """Per position, what stands for the salt and the tokens up to it."""

    def key(self, position: int) -> int:
        del self.keys[len(self.tokens) :]
        while len(self.keys) <= position:
            before = self.keys[-1] if self.keys else self.salt
            self.keys.append(hash((before, self.tokens[len(self.keys)])))
        return self.keys[position]


class Machine:
    """Sequences come, grow, are computed, take positions back and go, in a pool that is watched."""

    def __init__(self, pools: Pools, draw: random.Random, **keys: Any) -> None:
        self.draw = draw
        self.pool, self.context = pools.pool(draw, **keys)
        self.truncate: Callable[[int, int], None] | None = getattr(self.pool, "truncate", None)
        self.room = self.pool.free_tokens()
        self.lives: list[Life] = []
        self.codes: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.wrote: dict[tuple[int, int], tuple[str, int]] = {}
        """Who wrote something last, and where, by layer and key."""
        self.states = States(self.context.states)
        self.committed: set[int] = set()
        self.found = 0
        """The most tokens that an allocation has found."""
        self.count = 0
        stems = [[draw.randrange(3) for _ in range(LONGEST)] for _ in range(2)]
        self.stems = [stems[0], stems[0][:20] + stems[1][20:]]

    def run(self, steps: int) -> None:
        acts: list[Callable[[], object]]
        acts = [self.allocate, self.allocate, self.extend, self.extend, self.decode, self.commit, self.leave]
        if self.truncate is not None:
            acts.append(self.verify)
        if isinstance(self.pool, LastingPool):
            acts.append(self.pool.rest)
        for _ in range(steps):
            self.draw.choice(acts)()
            self.watch()
        self.finish()

    def finish(self) -> None:
        while self.lives:
            self.end(self.lives[0])
            self.watch()
        if (left := self.pool.free_tokens()) != self.room:
            raise Violation(f"free_tokens() is {left} once all slots are free; it was {self.room} at the start")

    def watch(self) -> None:
        for life in self.lives:
            if (length := self.pool.length(life.slot)) != life.length:
                raise Violation(
                    f"length({life.slot}) is {length}, but {life.length} positions of {life.name} have been handed to "
                    "views or found at allocation"
                )
        if not 0 <= self.pool.free_tokens() <= self.room:
            raise Violation(f"free_tokens() is {self.pool.free_tokens()}; it was {self.room} when the pool was empty")

    # What happens

    def allocate(self, length: int | None = None, reuse: bool | None = None) -> Life | None:
        draw = self.draw
        if length is None:
            length = draw.choice([1, draw.randint(1, 40), draw.randint(16, LONGEST - 10)])
        own = min(length, draw.randint(0, 3))
        tokens = draw.choice(self.stems)[: length - own] + [draw.randrange(3) for _ in range(own)]
        salt, reuse = draw.choice(("x", "x", "x", "y")), draw.random() < 0.85 if reuse is None else reuse
        before = self.pool.free_tokens()
        place = self.pool.allocate(tokens, reuse=reuse, salt=salt)
        while place is None and isinstance(self.pool, LastingPool) and self.pool.loading:
            place = self.pool.allocate(tokens, reuse=reuse, salt=salt)
        what = f"allocate of {length} tokens"
        if place is None:
            if len(self.lives) < self.context.max_batch_size and before >= LONGEST:
                raise Violation(f"{what} gives None, though a slot is free and free_tokens() is {before}")
            if (after := self.pool.free_tokens()) != before:
                raise Violation(f"{what} gives None, but free_tokens() went from {before} to {after}")
            return None
        return self.begin(tokens, salt, reuse, place, what)

    def begin(self, tokens: list[int], salt: str, reuse: bool, place: Allocation, what: str) -> Life:
        self.count += 1
        life = Life(f"s{self.count}", tokens, ord(salt), place.slot, place.num_cached, place.num_cached)
        if not 0 <= life.slot < self.context.max_batch_size:
            raise Violation(f"{what} gives slot {life.slot}; slots are 0 to {self.context.max_batch_size - 1}")
        if other := next((other for other in self.lives if other.slot == life.slot), None):
            raise Violation(f"{what} gives slot {life.slot}, which {other.name} has")
        if not 0 <= place.num_cached < len(tokens):
            raise Violation(f"{what} gives num_cached = {place.num_cached}; it is always fewer than the tokens")
        if place.num_cached and not reuse:
            raise Violation(f"{what} with reuse=False gives num_cached = {place.num_cached}")
        known = next((p for p in range(place.num_cached) if life.key(p) not in self.committed), place.num_cached)
        if known < place.num_cached:
            raise Violation(
                f"{what} gives num_cached = {place.num_cached}, but only the first {known} of these tokens have been "
                "committed by a sequence of equal salt"
            )
        self.found = max(self.found, place.num_cached)
        self.lives.append(life)
        return life

    def extend(self, lives: Sequence[Life] | None = None, most: int | None = None) -> None:
        """A chunk for several sequences whose prompts are not computed."""
        draw = self.draw
        if lives is None:
            lives = [life for life in self.lives if life.length < len(life.tokens)]
            lives = draw.sample(lives, draw.randint(0, len(lives)))
        if not lives:
            return
        longest = min(most or LONGEST, self.context.max_chunk or LONGEST)
        lens = [draw.choice([1, min(16, longest), longest]) for _ in lives] if most is None else [longest] * len(lives)
        lens = [min(n, len(life.tokens) - life.length) for n, life in zip(lens, lives, strict=True)]
        slots, starts = [life.slot for life in lives], [life.length for life in lives]
        view = self.pool.batched_chunked_prefill_view(slots, starts, lens)
        self.attend(view, [(life, at, n) for life, at, n in zip(lives, starts, lens, strict=True)])

    def decode(self) -> None:
        """One new token for several sequences."""
        ready = [life for life in self.lives if life.length == len(life.tokens)]
        chosen = self.draw.sample(ready, self.draw.randint(0, len(ready)))
        grown = [life for life in chosen if life in self.lives and self.grow(life, 1)]
        # One that has grown may have left since, so that a later one finds room.
        if lives := [life for life in grown if life in self.lives]:
            for life in lives:
                life.tokens.append(self.draw.randrange(3))
            rows = self.draw.choice([None, None, self.context.max_batch_size])
            view = self.pool.decode_view([life.slot for life in lives], rows)
            parts = [(life, life.length, 1) for life in lives]
            self.attend(view, parts, padding=(rows or len(lives)) - len(lives))

    def grow(self, life: Life, more: int) -> bool:
        """False if the sequence cannot get longer, or the pool is full; the youngest then leaves."""
        wanted = len(life.tokens) + more
        if wanted > LONGEST:
            return False
        if self.pool.grow(life.slot, wanted):
            return True
        if len(self.lives) == 1:
            raise Violation(
                f"grow(slot, {wanted}) is False for the only sequence there is; a pool has room for one of max_seq_len "
                f"= {LONGEST}"
            )
        self.end(self.lives[-1])
        return False

    def commit(self) -> None:
        if self.lives:
            self.commit_computed(self.draw.choice(self.lives))

    def commit_computed(self, life: Life) -> None:
        """Commit all that is computed."""
        known = min(life.length, len(life.tokens))
        self.pool.commit(life.slot, life.tokens, known)
        life.committed = max(life.committed, known)
        self.committed |= {life.key(p) for p in range(known)}

    def verify(self) -> None:
        """Drafts are computed, and all but some are taken back."""
        ready = [life for life in self.lives if life.length == len(life.tokens)]
        drafts = self.draw.randint(1, min(DRAFTS, (self.context.max_chunk or LONGEST) - 1))
        if not ready or self.truncate is None:
            return
        life = self.draw.choice(ready)
        self.commit_computed(life)
        if self.grow(life, 1 + drafts):
            before = len(life.tokens)
            life.tokens += [self.draw.randrange(3) for _ in range(1 + drafts)]
            self.extend([life], 1 + drafts)
            kept = before + 1 + self.draw.randint(0, drafts)
            try:
                self.truncate(life.slot, kept)
            except ValueError as error:
                raise Violation(
                    f"truncate({life.slot}, {kept}) is refused ({error}), though {life.name} holds {life.length} "
                    f"positions, of which {life.committed} have been committed"
                ) from None
            life.length = kept
            del life.tokens[kept:]
            del life.keys[kept:]

    def leave(self) -> None:
        if self.lives and self.draw.random() < 0.6:
            life = self.draw.choice(self.lives)
            if self.draw.random() < 0.5:
                self.commit_computed(life)
            self.end(life)

    def end(self, life: Life) -> None:
        self.lives.remove(life)
        self.pool.free(life.slot)

    # What is written and read

    def code(self, layer: int, key: int) -> tuple[Tensor, Tensor]:
        """K and V, [K, E] each."""
        if (found := self.codes.get((layer, key))) is None:
            generator = np.random.default_rng([layer, key & (1 << 62) - 1])
            spec = self.context.layers[layer]
            bits = generator.integers(0, 2, (2, spec.num_kv_heads, spec.head_size))
            k, v = torch.from_numpy(2.0 * bits - 1).float()
            found = self.codes[layer, key] = (k, v)
        return found

    def attend(self, view: KVCacheView, parts: list[tuple[Life, int, int]], padding: int = 0) -> None:
        """Each part is a sequence that is extended by positions [start, start + n). With ``padding``, the view has as
        many rows more, which compute the same as the last one, or, beside states, what nobody is to see."""
        seen = sum(n for _, _, n in parts) if self.context.states else None
        parts = [*parts, *parts[-1:] * padding]
        for life, start, n in dict.fromkeys(parts):
            life.length = start + n
        self.states.carry(view, parts, rehearsed=self.draw.random() < 0.1)
        rows = [(life, position) for life, start, n in parts for position in range(start, start + n)]
        for layer, spec in enumerate(self.context.layers):
            for life, position in rows:
                self.wrote[layer, life.key(position)] = life.name, position
            group = spec.num_heads // spec.num_kv_heads
            asked = [[self.wanted(position, spec.window) for _ in range(spec.num_heads)] for _, position in rows]
            heads = range(spec.num_heads)
            coded = [self.code(layer, life.key(position)) for life, position in rows]
            k, v = (torch.stack([one[i] for one in coded]) for i in (0, 1))
            both = [[self.code(layer, life.key(asked[t][h])) for h in heads] for t, (life, _) in enumerate(rows)]
            q = SHARP * torch.stack([torch.stack([both[t][h][0][h // group] for h in heads]) for t in range(len(rows))])
            expected = torch.stack([torch.stack([both[t][h][1][h // group] for h in heads]) for t in range(len(rows))])
            rotary = self.rotary(len(rows), spec.head_size)
            if rotary is not None:
                back = Rotary(rotary.cos, -rotary.sin)
                q, k = self.context.kernels.rope(q, k, back)
            found = view.attend(layer, q, k, v, rotary)
            again = view.attend(layer, q, None, None, rotary)
            if not torch.equal(found, again):
                raise Violation(
                    f"in layer {layer}, attend without K and V differs from the attend before it, which has written "
                    "them: layers that share K and V read what is there, and write nothing"
                )
            if found.shape != expected.shape:
                raise Violation(f"attend gives {list(found.shape)}, not {list(expected.shape)}")
            wrong = (found - expected)[:seen].abs().amax(-1).nan_to_num(9.0) > 0.2
            if wrong.any():
                t, h = wrong.nonzero()[0].tolist()
                life, position = rows[t]
                raise Violation(
                    f"in layer {layer}, the query at position {position} of {life.name} (slot {life.slot}) reads, at "
                    f"position {asked[t][h]}, {self.whose(layer, found[t, h], h // group)}"
                )

    def wanted(self, position: int, window: int | None) -> int:
        first = 0 if window is None else max(0, position - window + 1)
        return self.draw.choice(
            [first, position, self.draw.randint(first, position), self.draw.randint(first, position)]
        )

    def rotary(self, rows: int, size: int) -> Rotary | None:
        if self.draw.random() < 0.6:
            return None
        generator = torch.Generator().manual_seed(self.draw.randrange(1 << 30))
        angles = torch.randn(rows, size // 2, generator=generator) * 3
        return Rotary(angles.cos(), angles.sin())

    def whose(self, layer: int, found_E: Tensor, kv_head: int) -> str:
        """What a query has read instead of what it asked for."""
        if not found_E.isfinite().all():
            return "what is not a number: a place that nobody has written"
        for (other, key), (name, position) in self.wrote.items():
            value = self.codes[other, key][1]
            if other == layer and (found_E - value[kv_head]).abs().amax() < 0.2:
                return f"what {name} has written at position {position}"
        if found_E.abs().amax() < 0.01:
            return "zeros: a place that nobody has written"
        return "what nobody has written in this layer"
