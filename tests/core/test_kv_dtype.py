"""K and V in int8 as users ask for it: what is served, what the log says, and who refuses."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from tests.examples import slowly

from infer import LLM, SamplingParams, SettingsError, hookimpl
from infer.commands.cli import main
from infer.contracts.cache import CacheFactory, CacheRegistration
from infer.contracts.kernels import KernelsRegistration
from infer.contracts.registration import Registration
from infer.kernels.reference import ReferenceKernels
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer_cache_slotted import SlottedPool

PROMPT = "import os\n\n\nclass Reader:\n    def read(self, path: str) -> bytes:\n"


def serve(*plugins: object, **sections: Any) -> LLM:
    found = Plugins.discover(plugins)
    overrides = {"model": {"path": "demo"}, "engine": {"max_batch_size": 4}} | sections
    return LLM.from_settings(load_settings(found, env={}, overrides=overrides, read_file=False).settings, found)


@pytest.mark.parametrize("kernels", [*slowly("reference"), "cpu"])
@pytest.mark.parametrize("pool", ["paged", "slotted"])
def test_it_serves_exactly_and_says_how_much_fits(pool: str, kernels: str, caplog: pytest.LogCaptureFixture) -> None:
    """A position of the demo's: 5 layers, K and V, 2 heads of 64 codes and a scale. Answers are nearly the same."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    texts = {}
    for kv_dtype, how in (("auto", "2560 bytes (bfloat16)"), ("int8", "1360 bytes (int8)")):
        caplog.clear()
        sections = {"cache": {"backend": pool, "kv_dtype": kv_dtype}, "kernels": {"backend": kernels, "threads": 1}}
        with caplog.at_level(logging.INFO), serve(**sections) as llm:
            (answer,) = llm.generate([PROMPT], params)
        assert f"cache {pool}: 8192 positions of {how} = " in caplog.text
        assert "exact: true" in caplog.text
        texts[kv_dtype] = answer
    assert texts["int8"].token_ids == texts["auto"].token_ids
    assert texts["int8"].logprobs != texts["auto"].logprobs


class Ignorant:
    """A pool and kernels that were written before there was such a setting."""

    INFER_PLUGIN_API = 2

    @hookimpl
    def infer_cache_pools(self) -> list[Registration[CacheFactory]]:
        make = lambda context, settings: SlottedPool(context)  # noqa: E731
        return [Registration("old", make, "a pool"), CacheRegistration("older", make, "a pool")]

    @hookimpl
    def infer_kernels(self) -> list[KernelsRegistration]:
        return [KernelsRegistration("old", lambda device, settings: ReferenceKernels(), "kernels")]


@pytest.mark.parametrize(
    ("slot", "name"), [("cache", "old"), ("cache", "older"), ("kernels", "old")], ids=["cache", "cache2", "kernels"]
)
def test_who_does_not_know_it_is_refused(slot: str, name: str) -> None:
    sections: dict[str, Any] = {"cache": {"backend": "slotted"}, "kernels": {"backend": "reference"}}
    sections[slot]["backend"] = name
    with serve(Ignorant(), **sections) as llm:
        assert llm.generate([PROMPT], SamplingParams(max_tokens=1))
    sections["cache"]["kv_dtype"] = "int8"
    says = f"cache.kv_dtype is \"int8\", which {slot}.backend '{name}' of Ignorant does not know: "
    says += f'it has K and V in the model\'s dtype; use "auto", or another {slot}.backend.'
    with pytest.raises(SettingsError) as refused:
        serve(Ignorant(), **sections)
    assert str(refused.value) == says


def test_the_list_of_plugins_says_who_knows_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json"]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out)["parts"] if row["slot"] in ("cache", "kernels")]
    assert {row["name"] for row in rows if "; knows K/V in int8" in row["description"]} == {
        *("paged", "slotted"),
        *("reference", "cpu", "triton"),
    }
