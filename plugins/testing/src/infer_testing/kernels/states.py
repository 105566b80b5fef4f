"""Recurrent layers and their states."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infer.contracts.states import StateRows
from infer.device import same_bits
from infer_testing.kernels.provider import EXACT, Provider, check, wide
from infer_testing.numbers import compare, unchanged
from infer_testing.recurrent import Layer, random_layer, sliced, state_rows
from infer_testing.suite import Violation

RECURRENT = ("causal_conv", "gated_delta_rule", "state_space")
"""The kernels that keep a state of each sequence."""
GROUPS = ((16, 16, 16), (64, 16, 16), (96, 48, 96), (60, 20, 10), (45, 15, 45), (256, 128, 128))
"""Sizes of rows, of the groups that are normalized, and of weights."""


@dataclass
class Pass:
    """Sequences of one pass, their tokens and the rows of their states."""

    layer: Layer
    dtype: torch.dtype
    inputs: list[Tensor]
    states: Tensor
    rows: StateRows
    ends: list[int]

    @classmethod
    def make(cls, p: Provider, kind: str, draw: random.Random) -> Pass:
        """Some sequences leave their states where they find them, some have checkpoints on the way, and some begin
        with the same one. The layer is a random one of that kind."""
        dtype, layer = p.dtype(draw), random_layer(kind, draw)
        lens = [draw.choice([1, 1, 2, 5, 17, 40]) for _ in range(draw.randint(1, 5))]
        lens.insert(draw.randint(0, len(lens)), 0)
        ends = np.cumsum(lens).tolist()
        free = list(range(2, sum(lens) + len(lens) + 4))  # nobody saves rows 0 and 1
        draw.shuffle(free)
        read: list[int] = []
        save: dict[int, int] = {}
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            save |= {t: free.pop() for t in range(begin, end - 1) if draw.random() < 0.2}
            read.append(free.pop() if draw.random() < 0.5 else draw.randrange(2))
            if end > begin:
                save[end - 1] = read[-1] if read[-1] > 1 else free.pop()
        inputs = [p.tensor(sum(lens), n, dtype=dtype, draw=draw) for n in layer.widths]
        states = p.tensor(sum(lens) + len(lens) + 4, *layer.shape, dtype=layer.state_dtype(dtype), draw=draw)
        layer = layer.to(p.device, dtype)
        return cls(layer, dtype, sliced(inputs), states, state_rows(lens, read, save, p.device), ends)

    def check(self, p: Provider) -> None:
        layer, name, cpu, before = self.layer, self.layer.name, torch.device("cpu"), self.states.clone()
        exact_states = wide(before).clone()
        exact_rows = StateRows(*(x.cpu() for x in self.rows))
        exact = layer.to(cpu, torch.float32).run(EXACT, [wide(x) for x in self.inputs], exact_states, exact_rows)
        with unchanged(name, **{f"number {i + 1}": x for i, x in enumerate(self.inputs)}):
            found = layer.run(p.kernels, self.inputs, self.states, self.rows)
        compare(f"{name} with a state {list(layer.shape)}", found, exact, self.dtype, "token")
        saved = self.rows.save_T.tolist()
        for row in range(len(before)):
            if row not in saved:
                if not same_bits(self.states[row], before[row]):
                    raise Violation(f"{name} changes the state in row {row}, which no token saves")
                continue
            what = f"the state that {name} saves after token {saved.index(row)}"
            if saved.index(row) + 1 not in self.ends:
                what += ", in the middle of a sequence,"
            compare(what, self.states[row], exact_states[row], before.dtype, "part")


@check("causal_conv sums the last inputs of each channel times its weights, and keeps the last W - 1", 12)
def causal_conv(p: Provider, draw: random.Random) -> None:
    Pass.make(p, "causal_conv", draw).check(p)


@check("gated_delta_rule lets the state decay, moves it toward k v^T, and reads it by q", 12)
def gated_delta_rule(p: Provider, draw: random.Random) -> None:
    Pass.make(p, "gated_delta_rule", draw).check(p)


@check("state_space lets the state decay, adds B (dt x)^T, and reads it by C", 12)
def state_space(p: Provider, draw: random.Random) -> None:
    Pass.make(p, "state_space", draw).check(p)


@check("gated_rms_norm normalizes each group of a row, and multiplies by the weight and by SiLU of the gate", 12)
def gated_rms_norm(p: Provider, draw: random.Random) -> None:
    (size, group, width), dtype, gate_first = draw.choice(GROUPS), p.dtype(draw), draw.random() < 0.5
    rows = draw.choice([1, 3, 40])
    x, gate = (p.tensor(rows, size, dtype=dtype, draw=draw) for _ in range(2))
    (gate,), weight = sliced([2 * gate]), p.tensor(width, dtype=dtype, draw=draw)
    with unchanged("gated_rms_norm", x=x, gate=gate, weight=weight):
        found = p.kernels.gated_rms_norm(x, gate, weight, 1e-3, group, gate_first)
    exact = EXACT.gated_rms_norm(wide(x), wide(gate), wide(weight), 1e-3, group, gate_first)
    what = f"gated_rms_norm of {[rows, size]} in groups of {group}, the gate {'first' if gate_first else 'last'},"
    compare(what, found, exact, dtype)


@check("A token's result and the state after it depend neither on how its sequence is cut nor on other sequences", 18)
def states_are_exact(p: Provider, draw: random.Random) -> None:
    dtype, layer, length = p.dtype(draw), random_layer(draw.choice(RECURRENT), draw), draw.choice([2, 7, 37, 64, 100])
    layer = layer.to(p.device, dtype)
    kind, name = layer.state_dtype(dtype), layer.name
    inputs = [p.tensor(length, n, dtype=dtype, draw=draw) for n in layer.widths]
    state, mark = p.tensor(1, *layer.shape, dtype=kind, draw=draw), draw.randrange(length - 1)
    whole = torch.cat((state, torch.zeros_like(state), torch.zeros_like(state)))
    last = length - 1
    expected = layer.run(p.kernels, inputs, whole, state_rows([length], [0], {mark: 1, last: 2}, p.device))
    ours, checkpoint = state, None
    begin = 0
    while begin < length:
        end = draw.choice([begin + 1, draw.randint(begin + 1, length), length])
        lens = [draw.choice([0, 1, 3, 20]) for _ in range(draw.choice([0, 0, 2, 9]))]
        place, others = draw.randint(0, len(lens)), len(lens)
        lens.insert(place, end - begin)
        first = sum(lens[:place])
        ends = np.cumsum(lens).tolist()
        in_place = draw.random() < 0.5
        save = {e - 1: 3 + b for b, (e, n) in enumerate(zip(ends, lens, strict=True)) if n}
        save[first + end - begin - 1] = 0 if in_place else 1
        if begin <= mark < end - 1:
            save[first + mark - begin] = 2
        states = p.tensor(3 + len(lens), *layer.shape, dtype=kind, draw=draw)
        states[:1] = ours
        read = [0 if b == place else 3 + b for b in range(len(lens))]
        beside = [p.tensor(sum(lens), n, dtype=dtype, draw=draw) for n in layer.widths]
        for x, own in zip(beside, inputs, strict=True):
            x[first : first + end - begin] = own[begin:end]
        found = layer.run(p.kernels, sliced(beside), states, state_rows(lens, read, save, p.device))
        found = found[first : first + end - begin]
        ours = states[:1] if in_place else states[1:2]
        if begin <= mark < end:
            checkpoint = states[2:3] if mark < end - 1 else ours
        chunk = f"in a chunk [{begin}, {end}) beside {others} other sequences than in one chunk of {length} alone"
        if not same_bits(found, expected[begin:end]):
            at = begin + int((found != expected[begin:end]).flatten(1).any(1).nonzero()[0])
            raise Violation(f"{name} gives the token at position {at} other bits {chunk}")
        for position, one, other in ((mark, checkpoint, whole[1:2]), (last, ours, whole[2:])):
            if begin <= position < end and one is not None and not same_bits(one, other):
                raise Violation(f"{name} leaves a state of other bits after position {position} {chunk}")
        begin = end


@check("A NaN in a token or in a state reaches its own sequence, and no other", 6)
def states_of_nan(p: Provider, draw: random.Random) -> None:
    dtype, layer = p.dtype(draw), random_layer(draw.choice(RECURRENT), draw).to(p.device, torch.float32)
    layer = layer.to(p.device, dtype)
    inputs = [p.tensor(9, n, dtype=dtype, draw=draw) for n in layer.widths]
    states = p.tensor(6, *layer.shape, dtype=layer.state_dtype(dtype), draw=draw)
    in_state = draw.random() < 0.5
    if in_state:
        states[1] = torch.nan
    else:
        draw.choice(inputs)[4] = torch.nan  # of tokens 3 to 6, which are sequence 1
    found = layer.run(p.kernels, inputs, states, state_rows([3, 4, 2], [0, 1, 2], {2: 0, 6: 4, 8: 5}, p.device))
    where = f"a NaN in {'the state' if in_state else 'a token'} of sequence 1"
    if not found[3 if in_state else 4].isnan().any():
        raise Violation(f"{where} does not reach the result of {layer.name}")
    if not (found[:3].isfinite().all() and found[7:].isfinite().all()):
        raise Violation(f"{where} reaches another sequence's results of {layer.name}")
    if not (states[[0, 5]].isfinite().all()):
        raise Violation(f"{where} reaches another sequence's state of {layer.name}")
