"""Recorded decode passes take the same path and give the same bits. The recorder here runs the pass again to replay
it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from tests.support import (
    CONFIGS,
    CPU,
    Recorder,
    Replay,
    build_model,
    families,
    make_engine,
    paged_pool,
    slotted_pool,
)
from torch import Tensor

from infer.contracts.attention import KV, AttentionSpec, Ragged
from infer.contracts.kernels import RecorderProtocol
from infer.contracts.request import Request
from infer.contracts.scheduler import PENDING, Sequence
from infer.engine.batch import Batch, Draw, pack
from infer.engine.graphs import DecodeGraphs, batch_sizes
from infer.kernels.reference import ReferenceKernels

MAX_BATCH = 5


class TensorsOnly(ReferenceKernels):
    """Believes nothing that it is told on the host."""

    def extend_attention(self, q_THE: Tensor, k_cache: KV, v_cache: KV, ragged: Ragged, spec: AttentionSpec) -> Tensor:
        read = replace(
            ragged,
            starts=tuple(ragged.starts_B.tolist()),
            lens=tuple(ragged.offsets_B1.diff().tolist()),
            offsets=tuple(ragged.offsets_B1.tolist()),
        )
        return super().extend_attention(q_THE, k_cache, v_cache, read, spec)


class Unable:
    """A recorder that never can."""

    cheap = True

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, str]:
        return run(), "nobody can"


RECORDERS: Mapping[str, Callable[[], RecorderProtocol]] = {
    "dear": Recorder,
    "cheap": lambda: Recorder(cheap=True),
    "unable": Unable,
}


WAYS = [
    ("dear", 0, False, torch.bfloat16),
    ("dear", 1, True, torch.bfloat16),
    ("cheap", 0, True, torch.bfloat16),
    ("cheap", 1, False, torch.bfloat16),
]
"""Each two of recorder, lag and pool meet in one of them."""


@pytest.mark.parametrize(("kind", "lag", "paged", "dtype"), WAYS)
@families
def test_replayed_passes_answer_as_eager_ones(
    family: str, paged: bool, dtype: torch.dtype, lag: int, kind: str
) -> None:
    model = build_model(CONFIGS[family], dtype, TensorsOnly())
    recorder, answers = RECORDERS[kind](), []
    for recorded in (False, True):
        # 22 pages: some are preempted.
        pool = paged_pool(model, dtype, MAX_BATCH, num_blocks=22) if paged else slotted_pool(model, dtype, MAX_BATCH)
        pool.storage.kernels = TensorsOnly()
        room = pool.free_tokens()
        graphs = DecodeGraphs(model, pool, CPU, MAX_BATCH, recorder) if recorded else None
        assert pool.free_tokens() == room
        stepper = make_engine(model, dtype, pool=pool, lag=lag, graphs=graphs, max_batch_size=MAX_BATCH)
        answers.append(stepper.run_six())
    assert answers[0] == answers[1]
    if isinstance(recorder, Recorder):
        assert set(recorder.replayed) >= ({1} if recorder.cheap else {1, 2, 4, 5})


@pytest.mark.parametrize(("kind", "dtype"), [("unable", torch.bfloat16), ("dear", torch.float32)])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_passes_that_nobody_can_record_or_of_another_type(family: str, kind: str, dtype: torch.dtype) -> None:
    test_replayed_passes_answer_as_eager_ones(family, True, dtype, 1, kind)


@pytest.mark.parametrize("cheap", [False, True], ids=["dear", "cheap"])
def test_a_provider_that_reads_positions_on_the_host_is_not_replayed(
    cheap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_model(CONFIGS["llama"], torch.float32, ReferenceKernels())
    pool, recorder = slotted_pool(model, torch.float32, MAX_BATCH), Recorder(cheap)
    room = pool.free_tokens()
    eager = make_engine(model, torch.float32, max_batch_size=MAX_BATCH).run_six()
    graphs = DecodeGraphs(model, pool, CPU, MAX_BATCH, recorder)
    assert pool.free_tokens() == room
    assert make_engine(model, torch.float32, pool=pool, graphs=graphs, max_batch_size=MAX_BATCH).run_six() == eager
    assert not recorder.replayed
    who = "infer.kernels.reference.ReferenceKernels.extend_attention"
    says = f"decode passes of Decoder are run, not replayed: {who} reads"
    assert caplog.text.count(says) == 1


class Forgetful(Recorder):
    """Yields what it yielded the first time."""

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        out = run()
        return out, Replay(self, out.clone, out)


def test_a_recording_at_the_start_is_compared_with_a_pass(caplog: pytest.LogCaptureFixture) -> None:
    """Of another token, position and slot."""
    model = build_model(CONFIGS["llama"], torch.float32, TensorsOnly())
    pool, recorder = slotted_pool(model, torch.float32, MAX_BATCH), Forgetful()
    pool.storage.kernels = TensorsOnly()
    graphs = DecodeGraphs(model, pool, CPU, MAX_BATCH, recorder)
    assert recorder.replayed == [MAX_BATCH]
    assert not graphs.recordings
    assert "decode passes of Decoder are run, not replayed: a replay of 5 rows gave other bits" in caplog.text


class Failing(Forgetful):
    """Fails when it is told to."""

    def __init__(self, cheap: bool = False) -> None:
        super().__init__(cheap)
        self.recorded = 0
        self.fails = False

    def fail(self) -> None:
        if self.fails:
            raise MemoryError("no room")

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        self.recorded += 1
        self.fail()
        out = run()

        def replay() -> Tensor:
            self.fail()
            return out.clone()

        return out, Replay(self, replay, out)


class Decoding:
    """One sequence that is decoded in recorded passes."""

    def __init__(self) -> None:
        model = build_model(CONFIGS["llama"], torch.float32, TensorsOnly())
        self.pool, self.recorder = slotted_pool(model, torch.float32, MAX_BATCH), Failing(cheap=True)
        self.pool.storage.kernels = TensorsOnly()
        self.graphs = DecodeGraphs(model, self.pool, CPU, MAX_BATCH, self.recorder)
        place = self.pool.allocate([0] * 8, reuse=False)
        assert place is not None
        self.slot = place.slot

    @torch.inference_mode()
    def run(self, position: int) -> None:
        token = 5 + position
        self.graphs.token_ids.tensor.fill_(token)
        self.graphs.positions.tensor.fill_(position)
        self.graphs.run(1, self.pool.decode_view([self.slot], 1), ([token], [position], [self.slot]))

    def fails(self, position: int) -> None:
        self.recorder.fails = True
        with pytest.raises(MemoryError):
            self.run(position)
        self.recorder.fails = False


def test_a_replay_that_raised_has_not_been_compared() -> None:
    decoding = Decoding()
    decoding.run(0)
    decoding.run(1)
    decoding.fails(2)
    assert decoding.graphs.recordings
    decoding.run(2)
    assert not decoding.graphs.recordings, "it gives other bits"


def test_rows_whose_second_recording_raised_are_not_trusted() -> None:
    decoding = Decoding()
    decoding.run(0)
    decoding.fails(1)
    decoding.run(1)
    decoding.run(2)
    assert decoding.recorder.recorded == 4, "the first, one that raised, the first again, and a second"
    assert decoding.graphs.recordings


def test_sizes_reach_the_largest_batch_and_waste_little() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(5) == [1, 2, 4, 5]
    assert batch_sizes(256)[:8] == [1, 2, 4, 8, 16, 24, 32, 40]
    for largest in range(1, 300):
        sizes = batch_sizes(largest)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == largest


def decodes(tokens: list[list[int]]) -> Batch:
    works = []
    for slot, known in enumerate(tokens):
        sequence = Sequence(Request(tuple(known)), slot, 100)
        sequence.slot, sequence.num_computed, sequence.prefill_end = slot, len(known) - 1, len(known) - 1
        works.append(sequence.extend(1))
    return pack(works)


def test_a_batch_is_padded_with_its_last_row() -> None:
    padded = decodes([[1, 2, 3], [7, PENDING]]).pad(4)
    assert padded.token_ids_T.tolist() == [3, PENDING, PENDING, PENDING]
    assert padded.fed_rows.tolist() == [1, 2, 3]
    assert padded.fed_slots.tolist() == [1, 1, 1]
    assert padded.positions_T.tolist() == [2, 1, 1, 1]
    (draw,) = padded.readouts
    assert isinstance(draw, Draw)
    assert draw.slots_M.tolist() == [0, 1]
    assert decodes([[7, PENDING], [1, 2, 3]]).pad(3).fed_rows.tolist() == [0]
