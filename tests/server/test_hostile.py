"""Hostile requests: none of them holds up other requests, and each is answered with one sentence."""

from __future__ import annotations

import asyncio
import gzip
import importlib
import json
import os
import platform
import resource
import socket
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import psutil
import pytest
from prometheus_client import generate_latest
from pydantic import ValidationError
from tests import serving
from tests.examples import slowly
from tests.serving import HANG_S, Body, running, working

from infer.errors import RequestError
from infer.text.encoding import Encoder
from infer_llguidance.backend import LLGuidance
from infer_server import compiling, events, messages, service, tokens
from infer_server.endpoints import completions, metrics
from infer_server.http import bodies, parsing, sockets, streams
from infer_server.http.body import Body as WireBody
from infer_server.http.body import Many
from infer_server.http.children import Child, ChildError, KilledError
from infer_server.http.errors import Protocol
from infer_server.testing import serving as serving_in_process

ENGINE = {"max_batch_size": 4, "max_seq_len": 512}
SIZE = 1_000_000
EXPONENTIAL: Body = {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(40)]}
AMBIGUOUS = 'start: s\ns: s s | s s s | s s s s | "a" | "b" | "c"'


def many(item: bytes) -> bytes:
    return item * (SIZE // len(item))


MESSAGE = b'{"role":"user","content":"a"}'
TOOL = b'{"type":"function","function":{"name":"a"}}'
CHAT = b'{"messages":[' + MESSAGE + b"]"
BODIES: list[tuple[str, bytes, str]] = [
    ("completions", b'{"prompt":[' + many(b"1.5,") + b"1]}", "more than 50000 values"),
    ("completions", b'{"prompt":[' + b"1.5," * 40_000 + b"1]}", "a text or a list of token ids"),
    ("completions", b'{"prompt":[' + b"[1.5]," * 20_000 + b"[]]}", "a text or a list of token ids"),
    ("completions", b'{"prompt":[' + many(b'"a",') + b'"a"]}', "more than 50000 values"),
    ("completions", b'{"prompt":[' + b'"a",' * 40_000 + b'"a"]}', "server.max_choices allows 256"),
    ("completions", b'{"prompt":[' + many(b"1,") + b"1]}", "maximum context length is 512"),
    ("completions", b'{"prompt":"' + b"a" * SIZE + b'"}', "maximum context length is 512"),
    ("completions", b'{"prompt":' + b"[" * SIZE, "not valid JSON"),
    ("completions", many(b'{"a":'), "not valid JSON"),
    (
        "completions",
        b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(40_000)) + b"}}",
        "at most 1024",
    ),
    ("completions", b'{"prompt":"a","stop":[' + b'"a",' * 40_000 + b'"a"]}', "at most 16"),
    (
        "completions",
        b'{"prompt":"a",' + b",".join(b'"x%d":1' % i for i in range(40_000)) + b"}",
        "'x0' is not known",
    ),
    ("chat/completions", b'{"messages":[' + b",".join([MESSAGE] * 16_000) + b"]}", "maximum context length is 512"),
    ("chat/completions", CHAT + b',"tools":[' + b",".join([TOOL] * 10_000) + b"]}", "at most 128"),
    ("chat/completions", CHAT + b',"chat_template_kwargs":{"a":[' + many(b"[],") + b"1]}}", "more than 50000 values"),
]


@pytest.fixture
def chatty(tmp_path: Path) -> Body:
    return {"engine": ENGINE, "model": serving.chatty(tmp_path)}


@asynccontextmanager
async def ticking() -> AsyncIterator[list[float]]:
    """The longest that the event loop's thread has computed without a turn for others, in seconds."""
    longest = [0.0]

    async def tick() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            longest[0], last = max(longest[0], now - last), now

    task = asyncio.create_task(tick())
    try:
        yield longest
    finally:
        task.cancel()


async def test_no_body_holds_up_the_loop(chatty: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    parse = parsing.parse

    def counted(body: bytes, model: Any, *how: Any) -> Any:
        parsed.append(len(body))
        return parse(body, model, *how)

    monkeypatch.setattr(parsing, "parse", counted)
    began = time.thread_time()
    for _, body, _ in BODIES:
        with suppress(ValueError, RecursionError):
            json.loads(body)
    reading_all = time.thread_time() - began
    async with running(**chatty) as server:
        for path, body, message in BODIES:
            async with ticking() as longest:
                status, answer, _ = await server.post(body, f"/v1/{path}")
            assert status == 400, (body[:60], answer)
            assert message in answer["error"]["message"], (body[:60], answer)
            assert longest[0] < reading_all / 2, (body[:60], longest)
        for path in ("/tokenize", "/detokenize"):
            text = {"prompt": "def f(x): " * 80_000} if path == "/tokenize" else {"tokens": [70] * 300_000}
            status, answer, _ = await server.post(text, path)
            assert status == 400
            assert f"{path} takes 262144 at most" in answer["error"]["message"]
        assert (await server.post({"prompt": "x", "max_tokens": 1}))[0] == 200
    assert max(parsed) <= bodies.INLINE_BYTES


LONG: list[tuple[str, Body]] = [
    ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}),
    ("completions", {"prompt": "a", "logprobs": 20}),
    ("completions", {"prompt": [70] * 300, "logprobs": 20, "echo": True}),
    ("completions", {"prompt": [70] * 300, "prompt_logprobs": 20}),
    ("responses", {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 20}),
]


@pytest.mark.parametrize(
    ("path", "body"), [*LONG[:2], *slowly(*LONG[2:])], ids=lambda v: v if isinstance(v, str) else "-".join(v)
)
async def test_no_answer_holds_up_the_loop(
    path: str, body: Body, chatty: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities are written item by item, others in between, and what is sent in pieces is what is sent at
    once."""
    written = longest = total = turns = 0

    def counted(logprob: float) -> str:
        nonlocal written, total
        written, total = written + 1, total + 1
        return repr(logprob)

    async def tick() -> None:
        nonlocal written, longest, turns
        while True:
            longest, written, turns = max(longest, written), 0, turns + 1
            await asyncio.sleep(0)

    body = body | {"max_output_tokens" if path == "responses" else "max_tokens": 150, "seed": 1, "temperature": 0.5}

    def essence(answer: Body) -> Any:
        part = answer["output"][0]["content"] if path == "responses" else answer["choices"]
        return part, answer["usage"]["total_tokens"]

    async with running(
        **chatty | {"engine": ENGINE | {"max_batch_size": 1}, "cache": {"backend": "slotted"}}
    ) as server:
        _, once, _ = await server.post(body, f"/v1/{path}")
        monkeypatch.setattr(streams, "TURN_S", -1.0)
        for module in (service, streams):
            monkeypatch.setattr(module, "PIECE_BYTES", 1000)
        writes, write = set[int](), streams.write

        async def watched(*args: Any) -> None:
            writes.add(turns)
            await write(*args)

        monkeypatch.setattr(streams, "write", watched)
        for module in (completions, service, tokens):
            monkeypatch.setattr(module, "number", counted)
        ticks = asyncio.create_task(tick())
        status, pieces, headers = await server.post(body, f"/v1/{path}")
        ticks.cancel()
        assert status == 200
        assert essence(pieces) == essence(once)
        assert headers["Content-Type"] == "application/json; charset=utf-8"
        assert int(headers["Content-Length"]) > 50_000
        assert len(writes) > 3
        assert headers["X-Request-Id"] in pieces["id"]
        assert total > 2000
        assert longest <= streams.FEW * 22, "more than a step's tokens at once"


async def test_tokens_are_written_few_at_a_time_beside_the_loop(chatty: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    dumps = json.dumps

    def counted(value: Any, **how: Any) -> str:
        assert threading.current_thread() is not threading.main_thread(), "in the event loop"
        sizes.append(len(value))
        return dumps(value, **how)

    async with running(**chatty) as server:
        text = "def f(x): \u00e9 " * 1000
        sent = dumps({"prompt": text, "return_token_strs": True, "add_special_tokens": False})
        monkeypatch.setattr(json, "dumps", counted)
        status, answer, _ = await server.post(sent, "/tokenize")
        monkeypatch.undo()
        _, back, _ = await server.post({"tokens": answer["tokens"]}, "/detokenize")
    assert (status, back["prompt"], len(answer["token_strs"])) == (200, text, answer["count"])
    assert (sum(sizes), max(sizes)) == (2 * answer["count"], streams.RUN)


@pytest.mark.slow
async def test_long_texts_leave_threads_for_others(chatty: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many texts take long to tokenize, others of a few kilobytes are tokenized meanwhile."""
    long, begun, free, inside = "a" * (events.LONG_CHARS + 1), asyncio.Event(), threading.Event(), 0
    encode, loop = Encoder.__call__, asyncio.get_running_loop()

    def slow(self: Encoder, text: str, *, special: bool, most: int) -> list[int]:
        nonlocal inside
        if text == long:
            inside += 1
            loop.call_soon_threadsafe(begun.set)
            free.wait()
        return encode(self, text, special=special, most=most)

    monkeypatch.setattr(Encoder, "__call__", slow)
    async with running(**chatty) as server:
        waiting = [asyncio.create_task(server.post({"prompt": long}, "/tokenize")) for _ in range(40)]
        try:
            async with asyncio.timeout(HANG_S):
                await begun.wait()
                for _ in range(3):
                    status, _, _ = await server.post({"prompt": "a " * service.INLINE_CHARS}, "/tokenize")
                    assert status == 200
            assert inside == 1
        finally:
            free.set()
        assert {answer[0] for answer in await asyncio.gather(*waiting)} == {200}


@pytest.mark.slow
async def test_a_refused_text_leaves_no_memory_behind(chatty: Body) -> None:
    """A text of half a million words takes a quarter of a gigabyte while it is tokenized."""
    process = psutil.Process()
    async with running(**chatty) as server:
        for words in (30_000, 500_000):  # the first brings what stays, such as threads
            before = process.memory_info().rss
            status, answer, _ = await server.post({"prompt": "word " * words}, "/tokenize")
            assert (status, answer.get("count", words + 2)) == (400 if words > 1 << 18 else 200, words + 2)
            left = process.memory_info().rss - before
    assert left < 128 << 20


async def test_small_work_that_many_ask_for_at_once_takes_turns(chatty: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small bodies are parsed and figures written in the event loop. However many ask, streams go on in between."""
    now = 0

    async def turn() -> None:
        nonlocal now
        while True:
            await asyncio.sleep(0)
            now += 1

    def noting(work: Any, at: list[int]) -> Any:
        def noted(*given: Any) -> Any:
            at.append(now)
            return work(*given)

        return noted

    parsed, written = list[int](), list[int]()
    monkeypatch.setattr(parsing, "parse", noting(parsing.parse, parsed))
    monkeypatch.setattr(metrics, "generate_latest", noting(generate_latest, written))
    async with running(**chatty) as server:
        ticker = asyncio.create_task(turn())
        url, few = f"{server.url}/metrics", {"prompt": "a", "n": 0}
        for _ in range(2):  # the second time, all connections are open
            asked = [*(server.post(few) for _ in range(40)), *(server.session.get(url) for _ in range(40))]
            await asyncio.gather(*asked)
        ticker.cancel()
    for at in (parsed, written):
        assert len(at) == 80
        assert len(set(at)) == 80


async def test_long_answers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are written at a time, only one does between two turns of the event loop."""
    monkeypatch.setattr(streams, "TURN_S", -1.0)
    writer = streams.Writer()
    made = longest = 0

    def make(item: int) -> int:
        nonlocal made
        made += 1
        return item * 2

    async def tick() -> None:
        nonlocal made, longest
        while True:
            longest, made = max(longest, made), 0
            await asyncio.sleep(0)

    ticks = asyncio.create_task(tick())
    found = await asyncio.gather(*(writer.each(make, range(100), 100) for _ in range(8)))
    ticks.cancel()
    assert found == [[2 * i for i in range(100)]] * 8
    assert longest <= 2


def test_arrays_are_written_where_they_stand() -> None:
    writer = streams.Writer()
    items = [json.dumps({"text": f"\u00e9 {i}", "at": i}, ensure_ascii=False).encode() for i in range(200)]
    value = {"a": streams.Array(items), "b": "\u00e9", "c": [streams.Array([]), {"d": streams.Array(items[:1])}]}
    for _ in range(2):
        assert json.loads(b"".join(writer.pieces(value))) == {
            "a": [json.loads(item) for item in items],
            "b": "\u00e9",
            "c": [[], {"d": [{"text": "\u00e9 0", "at": 0}]}],
        }
        with pytest.raises(TypeError):
            writer.pieces([streams.Array(items), object()])


def test_what_cannot_come_has_a_number_that_json_knows() -> None:
    assert [tokens.number(value) for value in (-0.5, float("-inf"))] == ["-0.5", "-9999.0"]


async def test_a_large_body_asks_for_what_a_small_one_does(chatty: Body) -> None:
    async with running(**chatty | {"cache": {"backend": "slotted"}}) as server:
        body: Body = {"prompt": ["def ", [70, 71]], "max_tokens": 8, "seed": 1, "user": "u", "stop": ["q"]}
        _, small, _ = await server.post(body)
        _, large, _ = await server.post(json.dumps(body) + " " * bodies.INLINE_BYTES)
        assert large["choices"] == small["choices"]
        talk: Body = {"messages": [{"role": "user", "content": "def f"}, {"role": "developer", "content": "x"}]}
        items: Body = {"input": [{"role": "user", "content": "def f"}], "instructions": "Be brief."}
        for path, body, key in (
            ("/v1/chat/completions", talk | {"max_tokens": 8, "seed": 1}, "choices"),
            ("/v1/responses", items | {"max_output_tokens": 16, "seed": 1}, "usage"),
            ("/tokenize", talk, "tokens"),
        ):
            _, small, _ = await server.post(body, path)
            status, large, _ = await server.post(json.dumps(body) + " " * bodies.INLINE_BYTES, path)
            assert (status, large[key]) == (200, small[key]), path
        body = {"prompt": "a"}
        for wrong, param in (({"max_tokens": -1}, "max_tokens"), ({"model": "x"}, "model")):
            status, answer, _ = await server.post(json.dumps(body | wrong) + " " * bodies.INLINE_BYTES)
            assert (status // 100, answer["error"]["param"]) == (4, param)


MANY: list[tuple[str, Body]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 8000}),
    ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 8000}),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}] * 8000}),
]


@pytest.mark.parametrize(("path", "body"), [*MANY[:1], *slowly(*MANY[1:])], ids=[path for path, _ in MANY])
async def test_what_a_long_conversation_says_is_worked_out_where_it_is_parsed(
    path: str, body: Body, chatty: Body
) -> None:
    """Neither its items nor what the template makes of each of them are this process's work."""
    sent = json.dumps(body)
    async with running(**chatty) as server:
        with working() as worked:
            status, answer, _ = await server.post(sent, path)
        if path == "/tokenize":
            assert (status, answer["count"] > 8000) == (200, True)
        else:
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert len(worked) < 1000


def test_the_first_fault_ends_the_check() -> None:
    class Listing(WireBody):
        messages: Many[messages.Message]

    with pytest.raises(ValidationError) as raised:
        Listing.model_validate_json(json.dumps({"messages": [{"role": 5}] * 1000}), strict=True)
    assert raised.value.error_count() == 1
    body = {"prompt": [1.5] * 1000}
    with pytest.raises(ValidationError) as raised:
        completions.CompletionRequest.model_validate_json(json.dumps(body), strict=True)
    assert raised.value.error_count() < 10


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module for child processes that does what its messages say."""
    (tmp_path / "mischief.py").write_text(
        "import os, time\n"
        "kept = []\n"
        "def worker(first):\n"
        "    def answer(message):\n"
        "        if message == b'eat': return len(bytearray(1 << 31)) * b'x'\n"
        "        if message == b'hang': time.sleep(1000)\n"
        "        while message == b'spin': pass\n"
        "        if message == b'kill': os.kill(os.getpid(), 9)\n"
        "        if message == b'once' and not os.path.exists(first):\n"
        "            open(first, 'w').close()\n"
        "            os.kill(os.getpid(), 9)\n"
        "        if message == b'fail': raise KeyError('fail')\n"
        "        if message.startswith(b'blocks'): kept.append([bytes(600) for _ in range(50_000)].pop())\n"
        "        return first + message + str(os.getpid()).encode()\n"
        "    return answer\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_what_runs_a_stranger_s_code_has_no_secrets_and_a_session_of_its_own(
    chatty: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal's Ctrl-C reaches the processes of its session, and a drain still needs these."""
    for name in ("HF_TOKEN", "INFER_SERVER__API_KEYS", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "a-secret")
    async with running(**chatty) as server:
        body: Body = {"messages": [{"role": "user", "content": "a" * bodies.INLINE_BYTES}], "max_tokens": 1}
        status, _, _ = await server.post(body, "/v1/chat/completions")
        form: Body = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": "[ab]+"}}
        assert (status, (await server.post(form))[0]) == (400, 200)
        children = psutil.Process().children()
        assert len(children) == 3
        for child in children:
            assert "a-secret" not in child.environ().values()
            assert os.getsid(child.pid) == child.pid
            # It takes seconds, and hundreds of megabytes, and checking a body needs none of it.
            assert not [file.path for file in child.memory_maps() if "libtorch" in file.path]


FRAGILE = """
import functools
from typing import ClassVar
from infer_server.http.body import Body

class Fragile(Body):
    DERIVED: ClassVar = {"loud": "text"}
    text: str

    @functools.cached_property
    def loud(self):
        if self.text == "bad":
            raise ValueError("nobody can say that aloud")
        return {"hm": "HM"}[self.text]
"""


async def test_what_fails_in_reading_a_body_ends_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fragile.py").write_text(FRAGILE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    model = importlib.import_module("fragile").Fragile
    reader = bodies.Reader()
    reader.expect(model)
    large = " " * bodies.INLINE_BYTES
    try:
        for more in ("", large):
            with pytest.raises(RequestError, match=r"text cannot be taken: nobody can say that aloud\.") as caught:
                await reader(f'{{"text": "bad"}}{more}'.encode(), model)
            assert caught.value.param == "text"
        process = reader._child._process
        with pytest.raises(RuntimeError, match="KeyError: 'lost'"):
            await reader(f'{{"text": "lost"}}{large}'.encode(), model)
        assert (await reader(f'{{"text": "hm"}}{large}'.encode(), model)).loud == "HM"
        assert reader._child._process is process is not None
    finally:
        await reader.close()


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
async def test_a_process_that_runs_away_ends_and_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Child("mischief", lambda: b"first:", seconds=HANG_S, memory=1 << 28)
    hurried = Child("mischief", lambda: b"first:", seconds=0.1, memory=1 << 28)
    try:
        with pytest.raises(ChildError, match="too long"):
            await hurried.ask(b"hang")  # without computing
        monkeypatch.setattr(hurried, "_timeout_s", None)
        with pytest.raises(ChildError, match="too long"):
            await hurried.ask(b"spin")
        first = await worker.ask(b"a")
        assert first.startswith(b"first:a")
        assert await worker.ask(b"a") == first, "the same process"
        with pytest.raises(ChildError, match="too much memory"):
            await worker.ask(b"eat")
        with pytest.raises(RuntimeError, match="status 1"):
            await worker.ask(b"fail")
        leaving = asyncio.create_task(worker.ask(b"hang"))
        waiting = asyncio.create_task(worker.ask(b"b"))
        while worker._process is None:
            await asyncio.sleep(0)
        process = worker._process
        leaving.cancel()
        assert (await waiting).startswith(b"first:b")
        assert process.returncode is not None, "who leaves takes the work along"
        assert worker._process is not None
        worker._process.kill()
        await worker._process.wait()
        assert (await worker.ask(b"c")).startswith(b"first:c")
    finally:
        await worker.close()
        await hurried.close()


@pytest.mark.usefixtures("workers")
async def test_work_whose_process_something_outside_ends_is_tried_once_more(tmp_path: Path) -> None:
    worker = Child("mischief", str(tmp_path / "killed").encode, seconds=HANG_S, memory=1 << 28)
    try:
        await worker.begin()
        assert b"killedonce" in await worker.ask(b"once")
        with pytest.raises(KilledError):
            await worker.ask(b"kill")
    finally:
        await worker.close()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc keeps other memory")
@pytest.mark.usefixtures("workers")
async def test_a_process_gives_back_what_a_message_took() -> None:
    """30 MB in small blocks, the last of which stays, and the message's own 8."""
    worker = Child("mischief", lambda: b"", seconds=HANG_S, memory=1 << 28)
    try:
        await worker.begin()
        assert worker._process is not None
        process = psutil.Process(worker._process.pid)

        async def kept() -> int:
            """What the process has after a message, as its next answer finds it."""
            await worker.ask(b"a")
            return process.memory_full_info().uss

        before = await kept()
        await worker.ask(b"blocks" + bytes(8 << 20))
        assert await kept() < before + (4 << 20)
    finally:
        await worker.close()


async def test_a_grammar_whose_compiler_is_killed_is_not_refused_for_good(
    chatty: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def killed(self: Child, message: bytes) -> bytes:
        raise KilledError("its process was killed")

    async with running(**chatty) as server:
        body: Body = {"prompt": "a", "max_tokens": 2, "guided_regex": "[ab]{2}"}
        with monkeypatch.context() as patch:
            patch.setattr(Child, "ask", killed)
            status, answer, _ = await server.post(body)
        assert (status, answer["error"]["param"]) == (400, "guided_regex")
        assert "its process was killed; try again later" in answer["error"]["message"]
        assert (await server.post(body))[0] == 200


@pytest.mark.slow
async def test_a_grammar_that_compiles_for_ever_is_refused_and_remembered(
    chatty: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "SECONDS", 1.0)
    asked: list[bytes] = []
    ask = Child.ask

    async def counted(self: Child, message: bytes) -> bytes:
        asked.append(message)
        return await ask(self, message)

    monkeypatch.setattr(Child, "ask", counted)
    async with running(**chatty) as server:
        body: Body = {"prompt": "a", "max_tokens": 5}
        hostile = [
            asyncio.create_task(server.post(body | {"structured_outputs": {"json": EXPONENTIAL | {"title": str(i)}}}))
            for i in range(2)
        ]
        for seed in range(8):
            assert (await server.post(body | {"seed": seed}))[0] == 200
        honest = await server.post(body | {"guided_regex": "[ab]{2}", "seed": 1})
        assert honest[0] == 200
        for status, answer, _ in await asyncio.gather(*hostile):
            assert (status, answer["error"]["param"]) == (400, "structured_outputs")
            assert "takes too" in answer["error"]["message"]
        before = len(asked)
        for again in ({"structured_outputs": {"json": EXPONENTIAL | {"title": "0"}}}, {"guided_regex": "[ab]{2}"}):
            status, _, _ = await server.post(body | again)
            assert status == (200 if "guided_regex" in again else 400)
        assert len(asked) == before == 3


async def test_as_many_grammars_wait_as_may(chatty: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MAX_WAITING", 2)
    async with running(**chatty) as server:
        bodies = [{"prompt": "a", "max_tokens": 2, "guided_regex": f"a{{{i}}}"} for i in range(1, 9)]
        statuses = [status for status, _, _ in await asyncio.gather(*map(server.post, bodies))]
        assert set(statuses) == {200, 503}


@pytest.mark.parametrize(
    "form",
    [
        {"guided_regex": r"[^\s\S]"},
        {"guided_json": {"enum": []}},
        *slowly(
            {"guided_grammar": "start: A\nA: /a/ & /b/"},
            {"guided_grammar": 'start: "x" A\nA: /a.*/ & /b/'},
            {"guided_grammar": 'start: "a" start'},
        ),
    ],
)
async def test_a_grammar_that_nothing_fits_is_the_clients_fault(chatty: Body, form: Body) -> None:
    async with running(**chatty) as server:
        status, answer, _ = await server.post({"prompt": "a"} | form)
        assert (status, answer["error"]["param"]) == (400, *form), answer


@pytest.mark.slow
async def test_masks_that_take_too_long_end_only_their_own_request(
    chatty: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLGuidance, "_fault_of", lambda self, text: None)
    async with running(**chatty) as server:
        other: Body = {"prompt": "def ", "max_tokens": 60, "seed": 3, "guided_regex": r"[\w ]{40,}"}
        _, alone, _ = await server.post(other)
        slow: Body = {"prompt": "a", "max_tokens": 500, "guided_grammar": AMBIGUOUS, "temperature": 0}
        hostile = asyncio.create_task(server.post(slow))
        _, beside, _ = await server.post(other)
        status, answer, _ = await hostile
        assert (status, answer["error"]["param"]) == (400, "guided_grammar"), answer
        assert "took more than 25 ms" in answer["error"]["message"]
        assert beside["choices"] == alone["choices"]
        status, answer, _ = await server.post(slow)
        assert (status, answer["error"]["param"]) == (400, "guided_grammar"), "it is known by now"
        assert (await server.post(other))[1]["choices"] == alone["choices"]


async def test_a_body_that_is_not_its_encoding_is_the_clients_fault(
    chatty: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(**chatty) as server:

        async def post(data: bytes, encoding: str) -> tuple[int, Any]:
            headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
            url = server.url + "/v1/completions"
            async with server.session.post(url, data=data, headers=headers) as response:
                return response.status, await response.json()

        good = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
        assert (await post(gzip.compress(good), "gzip"))[0] == 200
        for data, encoding in ((good, "gzip"), (good, "deflate"), (gzip.compress(good)[:-9] + b"garbage", "gzip")):
            status, answer = await post(data, encoding)
            assert status == 400, answer
            assert "Content-Encoding" in answer["error"]["message"]
        whole = gzip.compress(good)
        for data, encoding in ((whole[:-4], "gzip"), (whole + b"more", "gzip"), (good, "br")):
            status, answer = await post(data, encoding)
            assert (status, "Content-Encoding" in answer["error"]["message"]) == (400, True), answer
        assert (await post(zlib.compress(good), "deflate"))[0] == 200
        taken: list[int] = []
        inflate = bodies.inflated

        def watched(body: bytes, encoding: str, most: int) -> bytes:
            assert threading.current_thread() is not threading.main_thread(), "in the event loop"
            taken.append(len(body))
            return inflate(body, encoding, most)

        monkeypatch.setattr(bodies, "inflated", watched)
        bomb = gzip.compress(b'{"prompt": "' + b"a" * (64 << 20) + b'"}')
        status, answer = await post(bomb, "gzip")
        assert status == 413, "what counts is the size of what comes out"
        assert taken == [len(bomb)]


@pytest.mark.slow
async def test_little_is_parsed_at_a_time(chatty: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body in chunks of one byte costs a hundred times what it takes to receive."""
    sizes: list[int] = []
    received = Protocol.data_received

    def counted(self: Protocol, data: bytes) -> None:
        sizes.append(len(data))
        received(self, data)

    monkeypatch.setattr(Protocol, "data_received", counted)
    async with running(**chatty) as server:
        status, answer, _ = await server.post({"prompt": "a" * SIZE})
        assert (status, answer["error"]["param"]) == (400, "prompt")
    assert sum(sizes) > SIZE
    assert max(sizes) <= 1 << 14


async def test_the_memory_of_large_bodies_is_given_back(chatty: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all that came meanwhile, however they were answered, and not for small ones."""
    given, left = asyncio.Event(), list[int]()
    loop = asyncio.get_running_loop()

    def give_back() -> None:
        left.append(1)
        loop.call_soon_threadsafe(given.set)

    monkeypatch.setattr(bodies, "give_back", give_back)
    monkeypatch.setattr(bodies, "LARGE_S", 0.0)
    async with running(**chatty) as server, asyncio.timeout(HANG_S):
        assert (await server.post({"prompt": "a", "max_tokens": 1}))[0] == 200
        assert (await server.post(b" " * (bodies.LARGE_BYTES >> 1)))[0] == 400
        assert not left
        assert (await server.post(b"[" * (bodies.LARGE_BYTES << 1)))[0] == 400
        await given.wait()
        given.clear()
        bomb, packed = gzip.compress(bytes(8 << 20)), {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        async with server.session.post(server.url + "/v1/completions", data=bomb, headers=packed) as answer:
            assert answer.status == 413
        await given.wait()
    assert left == [1, 1]


async def test_the_memory_of_long_texts_is_given_back(chatty: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each one, whether it is refused or not, and not for short ones."""
    left: list[int] = []
    monkeypatch.setattr(service, "give_back", lambda: left.append(1))
    monkeypatch.setattr(service, "LONG_CHARS", most := 2 * service.INLINE_CHARS)
    async with running(**chatty) as server:
        for words, long in ((10, 0), (most // 2, 0), (most // 2 + 1, 1)):
            for path, status in (("/tokenize", 200), ("/v1/completions", 200 if words == 10 else 400)):
                left.clear()
                assert (await server.post({"prompt": "a " * words}, path))[0] == status
                assert len(left) == long, (path, words)


@pytest.mark.slow
async def test_bodies_on_their_way_take_so_much_memory_together(chatty: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_BODIES", 2)
    budgets: list[bodies.BodyBudget] = []

    class Watched(bodies.BodyBudget):
        def __init__(self, most: int) -> None:
            super().__init__(most)
            budgets.append(self)

    monkeypatch.setattr(service, "BodyBudget", Watched)
    async with running(**chatty | {"server": {"max_body_bytes": 200_000}}) as server, asyncio.timeout(HANG_S):
        host, port = server.url.removeprefix("http://").split(":")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        body = b'{"prompt": "a", "max_tokens": 1}'.ljust(190_000)
        slow = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        for _, writer in slow[:2]:
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body[:-1])
        while budgets[0]._left != 2 * (200_000 - len(body[:-1]) + bodies.INLINE_BYTES):
            await asyncio.sleep(0)
        reader, writer = slow[2]
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body[:-1])
        refused = await reader.readuntil(b"\r\n\r\n")
        assert refused.startswith(b"HTTP/1.1 503"), refused
        assert b"Retry-After" in refused
        status, answer, headers = await server.post(b" " * 100_000 + body[:40])
        assert (status, headers["Retry-After"]) == (503, "1"), "it has all arrived, and there is no room yet"
        assert "try again later" in answer["error"]["message"]
        whole = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        async with server.session.post(server.url + "/v1/completions", data=gzip.compress(body), headers=whole) as few:
            assert few.status == 503, "what counts is what comes out"
        assert (await server.post({"prompt": "a", "max_tokens": 1}))[0] == 200, "small ones go on"
        for _, writer in slow:
            writer.close()
        while (await server.post(body))[0] == 503:
            await asyncio.sleep(0)
        assert (await server.post(body))[0] == 200


async def test_idle_connections_are_kept_longer_than_clients_keep_them() -> None:
    """Else a client would send a request while the server closes the connection."""
    async with aiohttp.TCPConnector() as connector:
        assert (connector._keepalive_timeout or 0) < sockets.KEEPALIVE_S
    assert (httpx.Limits().keepalive_expiry or 0) < sockets.KEEPALIVE_S


async def test_a_burst_of_connections_is_accepted_in_several_turns(
    chatty: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that open streams go on between them; the others wait in the kernel, and none is refused."""
    made: list[Protocol] = []
    make = Protocol.connection_made

    def noted(protocol: Protocol, transport: asyncio.BaseTransport) -> None:
        made.append(protocol)
        make(protocol, transport)

    monkeypatch.setattr(Protocol, "connection_made", noted)
    monkeypatch.setattr(sockets, "ACCEPTED", 3)
    async with running(**chatty) as server, asyncio.timeout(HANG_S):
        host, port = server.url.removeprefix("http://").split(":")
        burst = [socket.socket() for _ in range(10)]
        for each in burst:
            each.setblocking(False)
            each.connect_ex((host, int(port)))
        assert len({each.getpeername() for each in burst}) == 1, "all are connected before any is accepted"
        most = 0
        while len(made) < len(burst):
            before = len(made)
            await asyncio.sleep(0)
            most = max(most, len(made) - before)
        assert most == 3
        for each in burst:
            each.close()


async def test_headers_that_do_not_end_are_not_waited_for(chatty: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "KEEPALIVE_S", 0.2)
    async with running(**chatty) as server, asyncio.timeout(HANG_S):
        host, port = server.url.removeprefix("http://").split(":")
        for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: local"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            assert await reader.read() == b""
            writer.close()


async def test_so_many_connections_are_taken_and_others_are_told(chatty: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_CONNECTIONS", 3)
    async with running(**chatty) as server, asyncio.timeout(HANG_S):
        host, port = server.url.removeprefix("http://").split(":")
        assert (await server.post({"prompt": "a", "max_tokens": 1}))[0] == 200  # on one that stays
        held = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1" in head
        assert json.loads(body)["error"]["message"] == "All 3 connections are taken. Try again."
        writer.close()
        assert (await server.post({"prompt": "a", "max_tokens": 1}))[0] == 200
        held[0][1].close()
        answer = b""
        while not answer.startswith(b"HTTP/1.1 200 "):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()


def test_as_many_files_are_opened_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [100, 1000]

    def raised(kind: int, asked: tuple[int, int]) -> None:
        limits[:] = asked

    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", raised)
    assert sockets._files() == 1000


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux drops them")
def test_who_never_reads_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the answers are short, and the server has closed the connection by itself."""
    lost, connection_lost = threading.Event(), Protocol.connection_lost

    def seen(self: Protocol, error: BaseException | None) -> None:
        connection_lost(self, error)
        lost.set()

    monkeypatch.setattr(Protocol, "connection_lost", seen)
    with serving_in_process("demo", server={"stall_timeout_s": 0.5}) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect((host, int(port)))
            client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 40)
            assert lost.wait(HANG_S)
