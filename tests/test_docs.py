"""What the documentation shows is what the code does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support import make_engine, paged_pool, random_prompt, tiny_model

from infer.engine.batch import Batch, Draw

SCHEDULING = Path(__file__).parents[1] / "docs/design/scheduling.md"


def shown(values: Any) -> str:
    """Numbers, with runs written as first..last."""
    parts: list[list[int]] = []
    for value in np.asarray(values).tolist():
        if parts and len(parts[-1]) and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return " ".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in parts)


def test_the_worked_step() -> None:
    model = tiny_model("llama")
    pool = paged_pool(model, torch.float32, 4, num_blocks=24, block_size=16)
    limits: dict[str, Any] = {"max_tokens_per_step": 64, "prefill_chunk_size": 32, "mixed_batches": True}
    stepper = make_engine(model, torch.float32, pool=pool, **limits)
    batches: list[Batch] = []
    views: list[Any] = []
    runner = stepper.engine._runner
    launch, view = runner.launch, pool.storage.view

    def see_batch(batch: Batch) -> Any:
        batches.append(batch)
        return launch(batch)

    def see_view(*args: Any) -> Any:
        views.append(view(*args))
        return views[-1]

    runner.launch = see_batch  # type: ignore[method-assign]
    pool.storage.view = see_view  # type: ignore[assignment, method-assign]
    for name, length in (("a", 7), ("b", 10), ("c", 20)):
        stepper.submit(random_prompt(length), name, temperature=0, max_tokens=20, ignore_eos=True)
    stepper.engine.step()
    stepper.submit(random_prompt(150, seed=1), "d", temperature=0, max_tokens=20, ignore_eos=True)
    lines = []
    for number in range(1, 7):
        batches.clear()
        views.clear()
        stepper.engine.step()
        record, (batch,), (made,) = stepper.steps[-1], batches, views
        works = [f"{work.request_id} [{work.start}, {work.start + work.length})" for work in record.work]
        lines.append(f"step {number}: {len(batch.token_ids_T)} tokens: {', '.join(works)}")
        if number in (1, 5):
            (draw,) = batch.readouts
            assert isinstance(draw, Draw)
            ragged = made.ragged
            rows = [f"[{shown(row)}]" for row in ragged.block_table_BP]
            lines += [
                f"    slots      {shown(batch.slots)}",
                f"    starts     {shown(batch.starts)}",
                f"    lens       {shown(batch.lens)}",
                f"    positions  {shown(batch.positions_T)}",
                f"    rows_N     {shown(batch.rows_N)}",
                f"    draw       of sequences {shown(list(draw.of))}, for positions {shown(draw.positions_N)}",
                f"    offsets    {shown(ragged.offsets_B1)}",
                f"    blocks     {' '.join(rows)}",
                f"    flat_T     {shown(ragged.flat_T)}",
            ]
    text = "\n".join(lines)
    assert text in SCHEDULING.read_text(), text
