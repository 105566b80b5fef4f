"""Adapters that come and go while others are served."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.adapters.checkpoints import write_adapter
from tests.models.checkpoints import write_checkpoint
from tests.serving import TEMPLATE

from infer import LLM, PLUGIN_API, hookimpl
from infer.assemble import adapters as assembled
from infer.assemble.adapters import LoadedAdapters
from infer.contracts.adapters import Adapter
from infer.contracts.params import SamplingParams
from infer.contracts.request import Request
from infer.engine.adapters import AdapterSlots
from infer.engine.engine import Engine
from infer.errors import RequestError
from infer_server.testing import Serving, serving
from infer_testing import tiny_checkpoint

PROMPT = [*range(5, 60)]
WAIT_S = 300.0
LOAD_S = 20.0
"""No step in so long means that the engine is held up."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    base = write_checkpoint(folder / "base", "qwen3")
    for seed, name in enumerate("ab"):
        write_adapter(base, folder / "all" / name, seed=seed)
    return folder


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder / "base"), adapters={"folder": str(folder / "all"), "max_loaded": 1}) as llm:
        yield llm


def adapters(llm: LLM) -> LoadedAdapters:
    assert llm.served.adapters is not None
    return llm.served.adapters


def text(llm: LLM, adapter: str | None, tokens: int = 12) -> list[int]:
    return llm.generate([PROMPT], SamplingParams(max_tokens=tokens, temperature=0), adapter=adapter)[0].token_ids


def test_an_adapter_in_use_stays_until_its_last_request_ends(llm: LLM, folder: Path) -> None:
    """Held up between two steps, the engine has the request open while the adapter is let go."""
    loaded = adapters(llm)
    loaded.load("a", folder / "all" / "a")
    alone = text(llm, "a")
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert go.wait(WAIT_S)

    llm.loop.between_steps(hold)
    assert held.wait(WAIT_S)
    handle = llm.submit(PROMPT, SamplingParams(max_tokens=12, temperature=0), adapter="a")
    late = llm.request(PROMPT, adapter="a")
    assert loaded.unload("a") is not None
    assert loaded.unload("a") is None
    with pytest.raises(RequestError, match="There is no adapter 'a'"):
        llm.request(PROMPT, adapter="a")
    with pytest.raises(RequestError, match="The adapter 'a' has been unloaded"):
        llm.loop.submit(late, lambda events: None)
    with pytest.raises(RequestError, match="All 1 slots of adapters are taken"):
        loaded.load("b", folder / "all" / "b")
    go.set()
    assert [token for event in handle.events() for token in event.token_ids] == alone
    llm.loop.between_steps(lambda: None).result(WAIT_S)  # behind that which frees the slot
    llm.loop.between_steps(lambda: None).result(WAIT_S)
    loaded.load("b", folder / "all" / "b")
    assert text(llm, "b") != alone


def test_prefixes_are_those_of_the_content(llm: LLM, folder: Path) -> None:
    """Another adapter in the same slot, and by the same name, finds nothing of the first one's; the first finds it
    again, by another name."""
    loaded, params = adapters(llm), SamplingParams(max_tokens=12, temperature=0)

    def ask(name: str | None, path: str, salt: str | None = None) -> tuple[list[int], int]:
        if name is not None:
            loaded.load(name, folder / "all" / path)
        events = [*llm.submit(PROMPT, params, adapter=name, cache_salt=salt).events()]
        if name is not None:
            loaded.unload(name)
            llm.loop.between_steps(lambda: None).result(WAIT_S)
            llm.loop.between_steps(lambda: None).result(WAIT_S)
        return [token for event in events for token in event.token_ids], max(event.num_cached for event in events)

    loaded.load("a", folder / "all" / "a")
    adapter = loaded.find("a")
    assert adapter is not None
    loaded.unload("a")
    llm.loop.between_steps(lambda: None).result(WAIT_S)
    first, cached = ask("a", "a")
    assert cached == 0
    base, cached = ask(None, "")
    assert cached == 0
    assert ask(None, "", f"\0{adapter.digest}\0") == (base, 0)
    other, cached = ask("a", "b")
    assert cached == 0
    assert len({tuple(first), tuple(base), tuple(other)}) == 3
    again, cached = ask("c", "a")
    assert (again, cached > 0) == (first, True)


def test_what_is_done_between_steps_ends_with_the_engine(folder: Path) -> None:
    with LLM(str(folder / "base")) as llm:
        with pytest.raises(ZeroDivisionError):
            llm.loop.between_steps(lambda: 1 / 0).result(WAIT_S)  # type: ignore[arg-type]
        assert llm.loop.healthy
    with pytest.raises(Exception, match="The engine has stopped"):
        llm.loop.between_steps(lambda: None).result(WAIT_S)


@pytest.mark.parametrize(
    ("named", "warned"),
    [("org/other", True), ("org/Base", False), ("/elsewhere/base/", False), (None, False), ("", False)],
)
def test_an_adapter_that_names_another_base_is_loaded_with_a_warning(
    named: str | None, warned: bool, llm: LLM, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = shutil.copytree(folder / "all" / "a", tmp_path / "named")
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": named}))
    adapters(llm).load("a", path)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([text for text in warnings if "was made for 'org/other' by its own account" in text]) == warned
    assert len([text for text in warnings if "by its own account" in text]) == warned


def test_loading_an_adapter_holds_up_no_stream(llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading and preparing it wait for steps of a running answer, and the steps wait until one of both does: otherwise
    the answer might have ended before."""
    loaded, model = adapters(llm), adapters(llm)._model
    steps, on, looking, over = 0, threading.Condition(), False, False
    missed = list[str]()
    step, read, prepare = Engine.step, assembled._read, model.prepare

    def counted(self: Engine, *given: Any) -> None:
        nonlocal steps
        step(self, *given)
        with on:
            steps += 1
            on.notify_all()
            if steps >= 2:
                on.wait_for(lambda: looking or over, LOAD_S)

    def waits(what: str, last: bool = False) -> None:
        nonlocal looking, over
        with on:
            least, looking = steps + 4, True
            on.notify_all()
            if not on.wait_for(lambda: steps >= least, 0.0 if missed else LOAD_S):
                missed.append(what)
            looking, over = False, last
            on.notify_all()

    def reading(*given: Any) -> Any:
        waits("read")
        return read(*given)

    def preparing(changes: Any) -> Any:
        waits("prepared", last=True)
        return prepare(changes)

    monkeypatch.setattr(Engine, "step", counted)
    monkeypatch.setattr(assembled, "_read", reading)
    monkeypatch.setattr(model, "prepare", preparing)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    handle = llm.submit(PROMPT, params)
    loaded.load("a", folder / "all" / "a")
    assert len([token for event in handle.events() for token in event.token_ids]) == 40
    assert not missed
    assert loaded.find("a") is not None


def test_slots_are_counted() -> None:
    slots, freed = AdapterSlots(1), list[int]()
    slot = slots.reserve("x")
    slots.give_up("x", slot)
    adapter = Adapter("x", slots.reserve("x"), "", "")
    slots.open(adapter)
    mine = [Request((1,), adapter=adapter), Request((2,)), Request((3,), adapter=adapter)]
    slots.take(mine)
    assert slots.let_go("x", freed.append) is adapter
    for request in mine:
        assert freed == []
        slots.end(request.adapter)
    assert freed == [adapter.slot]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    with serving(
        str(folder / "base"),
        server={"served_model_name": "base", "aliases": ["other"], "api_keys": ["secret"]},
        adapters={"folder": str(folder / "all"), "load": [f"first={folder / 'all' / 'a'}"]},
    ) as server:
        yield server


def post(server: Serving, path: str, key: str = "secret", **body: Any) -> tuple[int, str]:
    answer = httpx.post(f"{server.url}/v1/{path}", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)
    return answer.status_code, answer.text


def test_routes(server: Serving, folder: Path) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret")

    def complete(model: str) -> Any:
        return client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=1)

    assert post(server, "load_lora_adapter", "wrong", lora_name="b", lora_path="b")[0] == 401
    assert post(server, "unload_lora_adapter", "wrong", lora_name="first")[0] == 401
    done = post(server, "load_lora_adapter", lora_name="b", lora_path="b")
    assert done == (200, "Success: LoRA adapter 'b' added successfully.")
    assert "is loaded already" in post(server, "load_lora_adapter", lora_name="b", lora_path="b")[1]
    models = {model.id: model for model in client.models.list()}
    assert sorted(models) == ["b", "base", "first", "other"]
    about: Any = models["b"]
    assert (about.parent, about.root) == ("base", str(folder / "all" / "b"))
    assert not hasattr(models["base"], "parent")
    assert client.models.retrieve("base:b").id == "b"
    answers = {model: complete(model) for model in ("base", "other", "first", "base:first", "b", "other:b")}
    texts = [answer.choices[0].logprobs.token_logprobs for answer in answers.values()]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert texts[4] == texts[5]
    assert len({str(each) for each in texts}) == 3
    assert [answer.model for answer in answers.values()] == ["base", "base", "first", "first", "b", "b"]
    chat = client.chat.completions
    for name in ("stranger", "base:stranger", "stranger:b"):
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            complete(name)
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            chat.create(model=name, messages=[{"role": "user", "content": "x"}])
    done = post(server, "unload_lora_adapter", lora_name="b")
    assert done == (200, "Success: LoRA adapter 'b' removed successfully.")
    assert post(server, "unload_lora_adapter", lora_name="b")[0] == 404
    with pytest.raises(openai.NotFoundError):
        complete("b")


@pytest.mark.parametrize("path", ["../base", "/", ".", "b/../../base", "\0", "link"])
def test_paths_outside_the_folder(path: str, server: Serving, folder: Path) -> None:
    if not (link := folder / "all" / "link").exists():
        link.symlink_to(folder / "base")
    status, said = post(server, "load_lora_adapter", lora_name="x", lora_path=path)
    assert (status, "is not within adapters.folder" in said) == (400, True)


def test_what_is_damaged_is_a_bad_request(server: Serving) -> None:
    status, said = post(server, "load_lora_adapter", lora_name="x", lora_path="nowhere")
    assert (status, "There is no adapter at" in said) == (400, True)


def test_servers_that_load_none(folder: Path) -> None:
    with serving(str(folder / "base")) as plain:
        status, said = post(plain, "load_lora_adapter", lora_name="x", lora_path="b")
        assert (status, "This server has no adapters" in said) == (400, True)
    with serving(str(folder / "base"), adapters={"load": [f"first={folder / 'all' / 'a'}"]}) as closed:
        status, said = post(closed, "load_lora_adapter", lora_name="x", lora_path="b")
        assert (status, "loads adapters at its start only" in said) == (400, True)
        assert post(closed, "unload_lora_adapter", lora_name="first")[0] == 200


TEXT = "how many of them are left"
CHAT = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 9, "temperature": 0}
OPTIONS = {"num_predict": 9, "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": TEXT, "max_output_tokens": 9, "temperature": 0},
    "/v1/embeddings": {"input": [TEXT] * 3},
    "/v1/rerank": {"query": "left", "documents": [TEXT] * 3},
    "/v1/score": {"text_1": "left", "text_2": [TEXT] * 3},
    "/v1/decisions": {"input": TEXT, "questions": [{"type": "predicate", "instructions": "left?"}] * 3},
    "/api/chat": {"messages": CHAT["messages"], "stream": False, "options": OPTIONS},
    "/api/generate": {"prompt": TEXT, "raw": True, "stream": False, "options": OPTIONS},
    "/api/embed": {"input": TEXT},
    "/api/embeddings": {"prompt": TEXT},
}
VARIES = {"id", "created", "created_at", "completed_at", "model", "usage", "store"}


@pytest.fixture(scope="module")
def talking(folder: Path) -> Iterator[Serving]:
    """With a tokenizer and a chat template."""
    base = tiny_checkpoint("Qwen3ForCausalLM", folder / "talking", model_type="qwen3", max_position_embeddings=4096)
    (base / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    write_adapter(base, folder / "polite")
    with serving(
        str(base), server={"served_model_name": "base"}, adapters={"load": [f"polite={folder / 'polite'}"]}
    ) as server:
        yield server


@pytest.mark.parametrize("path", BODIES)
def test_every_route_answers_by_the_adapter_that_is_asked_for(path: str, talking: Serving) -> None:
    def ask(model: str) -> tuple[str, dict[str, Any]]:
        answer = httpx.post(f"{talking.url}{path}", json=BODIES[path] | {"model": model}, timeout=60)
        assert answer.status_code == 200, answer.text
        said = answer.json()
        plain = {key: value for key, value in said.items() if key not in VARIES and not key.endswith("_duration")}
        return said.get("model", model), plain

    (base, plain), (named, adapted), (_, again) = ask("base"), ask("polite"), ask("base:polite")
    assert (base, named) == ("base", "polite")
    assert str(adapted) != str(plain)
    if path.startswith("/api"):
        assert ask("polite:latest")[1] == again == adapted


def test_ollama_lists_adapters(talking: Serving) -> None:
    listed = httpx.get(f"{talking.url}/api/tags", timeout=60).json()["models"]
    assert [model["name"] for model in listed] == ["base:latest", "polite:latest"]


class Unloads:
    """A plugin whose observer unloads an adapter as soon as a request has ended."""

    INFER_PLUGIN_API = PLUGIN_API
    url = ""

    @hookimpl
    def infer_request_finished(self, record: object) -> None:
        httpx.post(f"{self.url}/v1/unload_lora_adapter", json={"lora_name": "first"}, timeout=60)


def test_an_adapter_that_goes_while_a_body_is_answered_is_not_replaced_by_the_base(folder: Path) -> None:
    """The body's second text is embedded once its first is."""
    plugin = Unloads()
    with serving(
        str(folder / "base"),
        plugins=[plugin],
        engine={"max_batch_size": 1, "max_waiting_requests": 0},
        server={"served_model_name": "base"},
        adapters={"load": [f"first={folder / 'all' / 'a'}"]},
    ) as server:
        plugin.url = server.url
        status, said = post(server, "embeddings", model="first", input=[PROMPT, PROMPT[1:]])
        assert (status, "has been unloaded" in said) == (404, True)


def test_prefixes_of_adapters_outlive_the_process(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is compared at the next start is not what an adapter computed."""
    sections: Any = {
        "adapters": {"load": [f"a={folder / 'all' / 'a'}"]},
        "cache": {"paged": {"disk": str(tmp_path / "kept")}},
    }

    def ask() -> tuple[list[int], int]:
        with LLM(str(folder / "base"), **sections) as llm:
            events = [*llm.submit(PROMPT, SamplingParams(max_tokens=9, temperature=0), adapter="a").events()]
        return [token for event in events for token in event.token_ids], max(event.num_cached for event in events)

    (first, cold), (again, warm) = ask(), ask()
    assert (again, cold, warm) == (first, 0, 48)
    assert not [record for record in caplog.records if "disk" in record.message and record.levelname == "WARNING"]
