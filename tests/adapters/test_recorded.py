"""Decode passes with adapters are replayed from recordings, unless kernels read on the host which rows have which."""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.adapters.checkpoints import write_adapter
from tests.models.checkpoints import write_checkpoint
from torch import Tensor

from infer import LLM
from infer.contracts.adapters import AdapterRows
from infer.contracts.params import SamplingParams
from infer.contracts.request import Event
from infer.kernels.reference import ReferenceKernels
from infer.llm import Completion
from infer_kernels_cpu.provider import CpuKernels

NAMES = [None, "a", "b"]
ADDED = CpuKernels.add_adapters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    base = write_checkpoint(folder / "base", "qwen3", dtype=torch.bfloat16)
    for seed, name in enumerate("abc"):
        write_adapter(base, folder / name, seed=seed)
    return folder


def opened(folder: Path, graphs: str = "auto") -> LLM:
    load = {"load": [f"{name}={folder / name}" for name in "ab"]}
    return LLM(str(folder / "base"), adapters=load, engine={"max_seq_len": 160, "graphs": graphs})


def answered(llm: LLM, names: Sequence[str | None] = NAMES) -> list[object]:
    """The answers to a request for each of these adapters, which are computed together from the first step on."""
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True, logprobs=2)
    asked = [llm.request([5, 6, 7, 8 + i], params, adapter=name) for i, name in enumerate(names)]
    mailbox: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
    assert llm.loop.submit_all(asked, mailbox.put) == len(asked)
    answers = {request.id: Completion(request.prompt_token_ids) for request in asked}
    while not all(answer.finish_reason for answer in answers.values()):
        for event in mailbox.get():
            answers[event.request_id].add(event)
    return [(answer.token_ids, answer.logprobs) for answer in answers.values()]


def test_replays_have_the_bits_of_passes_that_are_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of = list[int]()

    def counted(self: CpuKernels, product_TN: Tensor, x_TK: Tensor, rows: AdapterRows, table: Any) -> None:
        rows_of.append(len(x_TK))
        ADDED(self, product_TN, x_TK, rows, table)

    monkeypatch.setattr(CpuKernels, "add_adapters", counted)
    with opened(folder) as llm, opened(folder, "off") as run:
        assert answered(llm) == answered(run)
        answered(llm, ["b", None, "a"])  # each row has had another adapter
        rows_of.clear()
        assert answered(llm) == (expected := answered(run))
        assert 3 in rows_of, "what is not recorded calls the kernels from Python"
        rows_of.clear()
        assert answered(llm) == expected
        assert answered(llm, ["a", "b", "b"]) != expected
        assert set(rows_of) == {12}, "only the prompts' passes do"
        for one in (llm, run):  # another adapter takes the place
            assert one.served.adapters is not None
            one.served.adapters.unload("a")
            one.served.adapters.load("a", folder / "c")
        assert answered(llm) == answered(run) != expected


def in_torch(patch: pytest.MonkeyPatch) -> None:
    for name in ("pack_adapter", "adapter_table", "set_adapter", "add_adapters"):
        patch.setattr(CpuKernels, name, getattr(ReferenceKernels, name))


def by_number(patch: pytest.MonkeyPatch) -> None:
    """What is called depends on how many adapters the rows have."""

    def add(self: CpuKernels, product_TN: Tensor, x_TK: Tensor, rows: AdapterRows, table: Any) -> None:
        ADDED(self, product_TN, x_TK, rows, table)
        for _ in set((ctypes.c_int32 * len(x_TK)).from_address(rows.slots_T.data_ptr())):
            self.rms_norm(x_TK, x_TK[0], 1e-6)

    patch.setattr(CpuKernels, "add_adapters", add)


MISFITS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "groups": (in_torch, "infer.kernels.reference.ReferenceKernels.add_adapters reads AdapterRows.groups"),
    "slots": (by_number, "a pass does not do the same for every token, position, slot and adapter"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_kernels_that_read_on_the_host_which_rows_have_which_are_run(
    misfit: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    patch, says = MISFITS[misfit]
    patch(monkeypatch)
    with opened(folder) as llm, opened(folder, "off") as run:
        for names in (NAMES, NAMES, ["b", "b", "b"], NAMES):
            assert answered(llm, names) == answered(run, names)
    (warning,) = [record.message for record in caplog.records if "run, not replayed" in record.message]
    assert says in warning
