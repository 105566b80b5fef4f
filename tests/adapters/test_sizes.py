"""What adapters take of memory is known, and what is wrong with them is said, before anything is loaded."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.adapters.checkpoints import write_adapter
from tests.core.commands.test_doctor import PLUGINS, examined, problems
from tests.models.checkpoints import write_checkpoint

from infer import LLM
from infer.assemble.adapters import PreparedAdapter, prepare_adapter
from infer.assemble.blueprint import Blueprint
from infer_formats.peft import WEIGHTS

ENOUGH = 1 << 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    base = write_checkpoint(folder / "base", "qwen3")
    write_adapter(base, folder / "small")
    write_adapter(base, folder / "large", r=16)
    write_adapter(write_checkpoint(folder / "wide", "qwen3", hidden_size=96), folder / "of another base")
    return folder


def loading(folder: Path, *names: str) -> dict[str, Any]:
    return {"load": [f"{name}={folder / name}" for name in names]}


def stored(folder: Path) -> int:
    return sum(x.nbytes for x in load_file(folder / WEIGHTS).values())


def test_doctor_counts_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is in float32, as the files are. A pool that does not ask how much memory there is leaves it to the
    doctor to say that there is too little."""
    slotted: Any = {"cache": {"backend": "slotted"}, "engine": {"max_batch_size": 2}}

    def with_memory(nbytes: int, *names: str) -> Any:
        monkeypatch.setattr("infer.device.free_memory", lambda device: nbytes)
        return examined(folder / "base", adapters=loading(folder, *names), **slotted)[0]

    report = with_memory(ENOUGH, "small", "large")
    assert report.data["adapters"]["bytes"] == {name: stored(folder / name) for name in ("small", "large")}
    assert "adapters" not in with_memory(ENOUGH).data
    needed = report.data["weights"]["bytes"] + report.data["cache"]["bytes"]
    least = needed + stored(folder / "small")
    assert not with_memory(least, "small").problems
    assert "Weights, adapters and cache take" in problems(with_memory(least - 1, "small"))


def test_the_arithmetic_of_several_models_counts_them(folder: Path) -> None:
    def taken(*names: str) -> int:
        _, settings = examined(folder / "base", adapters=loading(folder, *names) | {"folder": str(folder)})
        return Blueprint(settings, PLUGINS).taken(ENOUGH).nbytes

    assert taken("small", "large") - taken() == stored(folder / "small") + stored(folder / "large")


def test_a_cache_leaves_room_for_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes what is free."""
    monkeypatch.setattr("infer.device.free_memory", lambda device: 1 << 22)
    paged: Any = {"cache": {"paged": {"memory_fraction": 1.0}}, "engine": {"max_batch_size": 64}}
    sizes = [
        examined(folder / "base", adapters=loading(folder, *names), **paged)[0].data["cache"]
        for names in ((), ("large",))
    ]
    given_up = sizes[0]["bytes"] - sizes[1]["bytes"]
    page = 16 * sizes[0]["bytes_per_token"]
    assert abs(given_up - stored(folder / "large")) < page < given_up


@pytest.mark.parametrize(
    ("name", "said"), [("of another base", "it was made for another base"), ("nowhere", "There is no adapter at")]
)
def test_what_is_wrong_with_them_is_said_before(name: str, said: str, folder: Path) -> None:
    report, _ = examined(folder / "base", adapters=loading(folder, name))
    (problem,) = report.problems
    assert problem.startswith(f"adapters.load has '{name}={folder / name}': ")
    assert said in problem


@pytest.mark.parametrize("speculation", [None, "ngram"])
def test_each_is_read_once_and_kept_until_it_is_unloaded(
    speculation: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[weakref.ref[PreparedAdapter]] = []

    def prepare(*args: Any) -> PreparedAdapter:
        prepared = prepare_adapter(*args)
        read.append(weakref.ref(prepared))
        return prepared

    monkeypatch.setattr("infer.assemble.adapters.prepare_adapter", prepare)
    engine = {"speculation": speculation}
    with LLM(str(folder / "base"), adapters=loading(folder, "small", "large"), engine=engine) as llm:
        assert llm.served.adapters is not None
        assert [adapter.name for adapter in llm.served.adapters.loaded()] == ["large", "small"]
        assert len(read) == 2
        for name in ("small", "large"):
            llm.served.adapters.unload(name)
        llm.loop.between_steps(lambda: None).result()
        gc.collect()
        assert [reference() for reference in read] == [None, None]
