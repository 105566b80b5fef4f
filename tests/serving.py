"""Servers on sockets: in the test's own event loop, or in a thread, for clients that do not use asyncio."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from safetensors.torch import load_file, save_file

import infer_demo
import infer_server.testing
from infer.assemble import assembly
from infer.assemble.assembly import start
from infer.assemble.served import Served
from infer.contracts.sections import Settings
from infer.engine.exactness import self_check
from infer.engine.loop import EngineLoop
from infer.engine.schedulers import ContinuousScheduler
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer_server import routing
from infer_server.app import make_app
from infer_server.http.body import Body as WireBody
from infer_server.http.sockets import bind, listen
from infer_server.messages import Message
from infer_server.openapi import Place, document
from infer_server.testing import Serving

Body = dict[str, Any]
HANG_S = 300.0
"""When a test that waits for an event gives up: no machine is so slow."""
TEMPLATE = """\
{%- if tools %}<|tools|>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write <tool_call>{"name": ..., "arguments": ...}</tool_call> to call one.
{% endif %}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool', 'developer'] %}
{{- raise_exception('Unknown role ' ~ message.role) }}
{%- endif %}
{%- if message.content is string and '</think>' in message.content %}
{%- set text = message.content.split('</think>')[-1] %}
{%- else %}{% set text = message.content %}{% endif %}
{{- '# ' ~ message.role ~ ': ' ~ text }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '# assistant: ' }}{% if enable_thinking %}<think>{% endif %}{% endif %}
"""
"""A small chat template with the parts of Qwen3's: tools, reasoning, and an error for roles that it does not know."""


CHECKED: dict[str, list[str]] = {}
"""What the check at the start found, by what it depends on."""
STARTING = threading.Lock()


def start_checked_once(settings: Settings, plugins: Plugins) -> tuple[EngineLoop, Served]:
    """``start``, but models of one configuration are checked once with the same kernels, cache and sizes: the check
    takes nine tenths of the demo model's start."""
    config = Path(str(settings.model.path), "config.json")
    shapes = config.read_text() if config.is_file() else str(settings.model.path)
    kind = shapes, settings.model.dtype, settings.model.quantization, settings.cache, settings.kernels

    def checked(*parts: object, **sizes: Any) -> list[str]:
        key = repr((kind, [type(part) for part in parts], sizes))
        if key not in CHECKED:
            CHECKED[key] = self_check(*cast(Any, parts), **sizes)
        return CHECKED[key]

    with STARTING, pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "self_check", checked)
        return start(settings, plugins)


DESCRIBED: list[list[object]] = []
"""The routes whose description has been tried."""


def describe_once(places: Sequence[Place], server_name: str) -> None:
    """``document``, but what the same routes take and answer is described once: that takes half of what is left of the
    demo model's start."""
    routes = [route for place in places for route in place]
    shapes: list[object] = [(route.method, route.path, route.body, route.answer, route.chunk) for route in routes]
    if shapes not in DESCRIBED:
        document(places, server_name)
        DESCRIBED.append(shapes)


def make_app_described_once(
    engine_loop: EngineLoop, served: Served, plugins: Plugins, settings: Settings
) -> web.Application:
    """``make_app``, but with ``describe_once``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "document", describe_once)
        return make_app(engine_loop, served, plugins, settings)


class _Server:
    """Serves the demo model on one thread, unless ``sections`` of the settings say otherwise. ``plugins`` are added to
    the installed ones."""

    def __init__(self, plugins: Sequence[object] = (), **sections: Any) -> None:
        overrides = {"model": {"path": "demo"}, "kernels": {"threads": 1}, "server": {"access_log": False}} | sections
        found = Plugins.discover(plugins)
        self._settings = load_settings(found, env={}, overrides=overrides, read_file=False).settings
        self._plugins = found
        self.engine_loop, self._served = start_checked_once(self._settings, found)

    def app(self) -> web.Application:
        return make_app_described_once(self.engine_loop, self._served, self._plugins, self._settings)


class Running:
    """A server and a client session."""

    def __init__(self, session: aiohttp.ClientSession, url: str, engine_loop: Any) -> None:
        self.session, self.url, self.engine_loop = session, url, engine_loop

    async def post(self, body: object, path: str = "/v1/completions") -> tuple[int, Any, Any]:
        data = body if isinstance(body, (bytes, str)) else json.dumps(body)
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, await response.json(), response.headers

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path, headers=headers) as response:
            return response.status, await response.json()

    async def stream(self, body: Body, path: str = "/v1/completions") -> list[Any]:
        """The data of each event, parsed; "[DONE]" is left as it is."""
        async with self.session.post(self.url + path, json=body | {"stream": True}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            text = (await response.read()).decode()
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    async def idle(self) -> None:
        """Wait until no request is open. Raises TimeoutError."""
        await until(lambda: not self.engine_loop.num_open)


@contextmanager
def holding(steps: int) -> Iterator[threading.Event]:
    """The engines of this process make so many steps together, and no other before the end of the block. The event is
    set once one has begun its next step. A step without a request to schedule does not count: it may still settle
    an earlier request's last pass."""
    made, go, schedule = itertools.count(), threading.Event(), ContinuousScheduler.schedule
    reached = threading.Event()

    def held(scheduler: ContinuousScheduler) -> Any:
        if scheduler.has_work() and next(made) >= steps:
            reached.set()
            assert go.wait(HANG_S)
        return schedule(scheduler)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContinuousScheduler, "schedule", held)
        try:
            yield reached
        finally:
            go.set()


@contextmanager
def working() -> Iterator[list[object]]:
    """What this process makes until the end of the block: bodies unpickled, messages shown to templates, and values
    written to JSON."""
    worked: list[object] = []

    def noted(function: Any) -> Any:
        def note(first: object, *more: Any, **how: Any) -> Any:
            worked.append(first)
            return function(first, *more, **how)

        return note

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Message, "plain"), (WireBody, "__setstate__"), (json, "dumps")):
            patch.setattr(owner, name, noted(getattr(owner, name)))
        yield worked


async def until(reached: Callable[[], bool]) -> None:
    """Give the other tasks of this event loop turns until they have come to this. Raises TimeoutError."""
    async with asyncio.timeout(HANG_S):
        while not reached():
            await asyncio.sleep(0)


@asynccontextmanager
async def running(plugins: Sequence[object] = (), **sections: Any) -> AsyncIterator[Running]:
    served = await asyncio.to_thread(_Server, plugins, **sections)
    engine_loop = served.engine_loop
    try:
        async with listen(served.app(), bind("127.0.0.1", 0)) as url, aiohttp.ClientSession() as session:
            yield Running(session, url, engine_loop)
    finally:
        engine_loop.close()


@contextmanager
def serving(**sections: Any) -> Iterator[Serving]:
    """A server of the demo model in a thread, unless ``sections`` of the settings say otherwise."""
    model = {"path": "demo"} | sections.pop("model", {})
    with infer_server.testing.serving(model["path"], model=model, **{"kernels": {"threads": 1}} | sections) as server:
        yield server


def chatty(folder: Path, **model: Any) -> Body:
    """The section ``model`` of a server that can chat. The template is written to ``folder``."""
    (folder / "template.jinja").write_text(TEMPLATE)
    return {"path": "demo", "chat_template": str(folder / "template.jinja")} | model


def retokened(folder: Path, *tokens: str, special: bool = False) -> dict[str, int]:
    """Copy the demo's checkpoint to ``folder``, with added tokens in place of its last ones. Returns their ids."""
    source = Path(infer_demo.__file__).parent / "checkpoint"
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        shutil.copy(source / name, folder)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for _ in tokens:
        last = max(vocabulary, key=vocabulary.get)
        del vocabulary[last]
        assert "".join(tokenizer["model"]["merges"].pop()) == last
    ids = {token: len(vocabulary) + i for i, token in enumerate(tokens)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": special}
    tokenizer["added_tokens"] += [{"id": id, "content": token} | flags for token, id in ids.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return ids


def thinker(folder: Path) -> Body:
    """The section ``model`` of a server whose demo model ends its reasoning: its token for ``</think>`` is a bit
    likelier than a closing parenthesis. With ``{"enable_thinking": true}`` the template opens the reasoning; it also
    shows the reasoning in messages."""
    end = retokened(folder, "</think>")["</think>"]
    weights = load_file(folder / "model.safetensors")
    rows = weights["model.embed_tokens.weight"]
    rows[end] = rows[json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"][")"]] * 1.02
    save_file(weights, folder / "model.safetensors")
    made = chatty(folder, path=str(folder))
    line = "{{- '# ' ~ message.role ~ ': ' ~ text }}"
    thought = "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    assert line in TEMPLATE
    shown = "{{- '# ' ~ message.role ~ ': ' }}" + thought + "{{ text }}"
    (folder / "template.jinja").write_text(TEMPLATE.replace(line, shown))
    return made
