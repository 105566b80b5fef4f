"""Draft heads that llama.cpp keeps as layers behind the last one are those of the folder that a file is made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tests import support
from tests.core.test_speculation import SMALL, Watch, successors
from tests.formats.gguf.files import write_gguf
from tests.models.checkpoints import VOCAB, Family, edit_tensors, with_head, write_checkpoint
from tests.models.test_mtp import loaded
from tests.support import Always
from torch import Tensor

from infer import LLM, SamplingParams
from infer.assemble import drafts as assembled
from infer.contracts.cache import CacheContext
from infer.contracts.model import Pass
from infer.errors import SettingsError
from infer_cache_slotted import SlottedPool

FAMILIES: tuple[Family, ...] = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
DRAFTS = 6


@torch.inference_mode()
def drafts(path: Path) -> tuple[Tensor, list[int]]:
    """A head's hidden states of a random text, and the tokens that it then drafts one after the other."""
    head = loaded(path)[0].draft_head
    generator = torch.Generator().manual_seed(1)
    token_ids_T = torch.randint(VOCAB, (23,), generator=generator)
    hidden_TD = torch.randn(23, head.hidden_size, generator=generator)
    pool = SlottedPool(CacheContext(head.attention, 1, 128, torch.float32, support.CPU, support.KERNELS))
    pool.allocate(token_ids_T.tolist())
    view = pool.batched_chunked_prefill_view([0], [0], [23])
    hidden_TD = head.forward(Pass(token_ids_T, torch.arange(23), view, None, hidden_TD))
    last_1D, tokens = hidden_TD[-1:], list[int]()
    for position in range(23, 23 + DRAFTS):
        tokens.append(int(head.logits(last_1D).argmax()))
        assert pool.grow(0, position + 1)
        given = torch.tensor(tokens[-1:]), torch.tensor([position]), pool.decode_view([0])
        last_1D = head.forward(Pass(*given, None, last_1D))
    return hidden_TD, tokens


@pytest.mark.parametrize(("family", "fused"), [*((family, False) for family in FAMILIES), ("qwen3_5_moe", True)])
def test_a_head_is_that_of_the_folder(family: Family, fused: bool, tmp_path: Path) -> None:
    folder, file = with_head(tmp_path / "hub", family, tied=False), tmp_path / "model.gguf"
    held = write_gguf(folder, file, fused=fused)
    assert "mtp.fc.weight" in held
    (hidden_TD, tokens), (found_TD, found) = drafts(folder), drafts(file)
    torch.testing.assert_close(found_TD, hidden_TD, atol=1e-5, rtol=1e-5)
    assert found == tokens
    assert len(set(tokens)) > 2, "a constant answer shows little"


def test_it_drafts_as_the_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembled, "Payoff", lambda costs, waits: Always())
    folder, file = with_head(tmp_path / "hub", "qwen3_5_moe", tied=False), tmp_path / "model.gguf"
    edit_tensors(folder, successors)
    write_gguf(folder, file)

    def answers(path: Path) -> tuple[Any, Any]:
        watch, engine = Watch(), {"speculation": "mtp", "max_draft_tokens": 5, "max_batch_size": 2, "max_seq_len": 64}
        with LLM(str(path), plugins=[watch], engine=engine, kernels={"threads": 1}) as llm:
            outputs = llm.generate(["kettle", "a"], SamplingParams(temperature=0, max_tokens=25))
        return [out.token_ids for out in outputs], [(each.proposed, each.accepted) for each in watch.records]

    found = answers(file)
    assert found == answers(folder)
    assert found[1] == [(20, 20)] * 2


def test_a_file_that_counts_a_head_but_has_none(tmp_path: Path) -> None:
    """As converters wrote it that knew no draft heads."""
    folder = write_checkpoint(tmp_path / "hub", "qwen3_5")

    def edit(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
        writer.kv_data[0].pop("qwen35.block_count")
        writer.add_block_count(config["num_hidden_layers"] + 1)
        writer.add_nextn_predict_layers(1)

    write_gguf(folder, tmp_path / "model.gguf", edit=edit)
    with pytest.raises(SettingsError, match=r"no draft head .* \(no tensor mtp\.pre_fc"):
        LLM(str(tmp_path / "model.gguf"), engine={"speculation": "mtp", "max_seq_len": 64}, **SMALL)
