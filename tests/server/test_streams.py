"""What a stream reports besides its text: where tokens begin, logprobs, ends, usage, and the access log's line."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tests.models.checkpoints import tokenizer, write_checkpoint
from tests.serving import HANG_S, Body, chatty, holding, running, until
from tokenizers import Tokenizer, normalizers, processors

from infer.engine.loop import EngineLoop
from infer_server import service
from infer_server.tokens import Tokens

ENGINE = {"max_batch_size": 8, "max_seq_len": 256}


@pytest.fixture
def numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are reported by their ids, which tell apart what reads alike."""
    monkeypatch.setattr(Tokens, "_text", lambda self, token_id: str(token_id))


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Body:
    """A model that draws from all byte-level tokens alike."""
    folder = write_checkpoint(tmp_path_factory.mktemp("random") / "c", "llama")
    return {"path": str(folder), "dtype": "float32"}


def begins(made: Tokenizer, prompt: list[int], ids: list[int]) -> list[int]:
    """Where each token's first byte is, in the whole decode."""
    before = made.decode(prompt).removesuffix("\ufffd")
    found = []
    for i, token in enumerate(ids):
        piece = made.id_to_token(token)
        assert piece
        first = [] if token < 2 else [made.get_vocab()[piece[0]]]
        text = made.decode([*prompt, *ids[:i], *first])
        found.append(len(text.removesuffix("\ufffd") if not first else text[:-1]) - len(before))
    return found


async def test_tokens_begin_where_they_do_in_the_text_streamed_and_whole(random: Body, numbered: None) -> None:
    """Parts of characters, bytes that are none, stop strings that hold text back, and prompts inside a character."""
    made = tokenizer()
    inside = made.encode("b\u00e9").ids[:-1]
    async with running(engine=ENGINE, model=random) as server:

        async def check(seed: int) -> None:
            prompt = [inside, [5, 6]][seed % 2]
            body: Body = {"prompt": prompt, "max_tokens": 40, "temperature": 100.0, "seed": seed, "logprobs": 1}
            body["ignore_eos"] = True
            if seed % 3:
                body["stop"] = ["\u00e9zz", "q\ufffdq", "\ufffd" * 3][seed % 3 :] + [c + "~" for c in "aeost \ufffd"]
            _, answer, _ = await server.post(body)
            whole = answer["choices"][0]
            ids = [int(token) for token in whole["logprobs"]["tokens"]]
            assert whole["logprobs"]["text_offset"] == begins(made, prompt, ids)
            if "stop" not in body:
                before = made.decode(prompt).removesuffix("\ufffd")
                assert before + whole["text"] == made.decode([*prompt, *ids])
            *chunks, _ = await server.stream(body)
            streamed = [chunk["choices"][0] for chunk in chunks]
            assert "".join(c["text"] for c in streamed) == whole["text"]
            found = [c["logprobs"] for c in streamed if c["logprobs"]]
            for key, values in whole["logprobs"].items():
                assert [value for logprobs in found for value in logprobs[key]] == values, key

        for start in range(0, 24, 8):
            await asyncio.gather(*(check(seed) for seed in range(start, start + 8)))


@pytest.mark.parametrize("normal", [False, True])
async def test_an_echo_s_tokens_begin_where_they_do_in_the_text_that_is_sent(
    normal: bool, random: Body, tmp_path: Path, numbered: None
) -> None:
    """Not where they would if the text had the special token that the tokenizer begins it with."""
    made = Tokenizer.from_str(tokenizer().to_str())
    made.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", 1)])
    if normal:
        made.normalizer = normalizers.NFC()
    made.save(str(tmp_path / "t.json"))
    prompt = "a b\u00e9 \u4e2d" + ("e\u0301" if normal else "") + " c"
    async with running(engine=ENGINE, model=random | {"tokenizer": str(tmp_path / "t.json")}) as server:
        body: Body = {"prompt": prompt, "echo": True, "max_tokens": 3, "logprobs": 0, "temperature": 0, "n": 2}
        _, answer, _ = await server.post(body)
        for choice in answer["choices"]:
            assert choice["text"].startswith(prompt)
            tokens = [int(token) for token in choice["logprobs"]["tokens"]]
            assert tokens[0] == 1
            encoding = made.encode(prompt)
            assert tokens[:-3] == encoding.ids
            expected = [begin for begin, _ in encoding.offsets]
            assert choice["logprobs"]["text_offset"][:-3] == expected
            assert choice["logprobs"]["text_offset"][-3] == len(prompt)
        ids = [1, *made.encode("b\u00e9", add_special_tokens=False).ids[:-1]]
        _, answer, _ = await server.post(body | {"prompt": ids, "n": 1})
        choice = answer["choices"][0]
        tokens = [int(token) for token in choice["logprobs"]["tokens"]]
        assert choice["text"] == made.decode(tokens, skip_special_tokens=False)
        assert choice["logprobs"]["text_offset"][:4] == [0, 5, 6, 7], "it does not go on with the character"
        only: Body = {"logprobs": None, "logprob_token_ids": [7], "n": 1}
        _, answer, _ = await server.post(body | only)
        choice = answer["choices"][0]
        assert [int(token) for token in choice["logprobs"]["tokens"]] == tokens_of(answer, made, prompt)
        assert choice["logprobs"]["text_offset"][0] == len(prompt)


def tokens_of(answer: Any, made: Tokenizer, prompt: str) -> list[int]:
    text = answer["choices"][0]["text"].removeprefix(prompt)
    ids = [int(token) for token in answer["choices"][0]["logprobs"]["tokens"]]
    assert made.decode(ids) == text
    return ids


async def test_an_echo_without_an_answer_is_billed_as_none(random: Body, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "infer.access"):
        async with running(engine=ENGINE, model=random, server={"access_log": True}) as server:
            inside = tokenizer().encode("b\u00e9").ids[:-1]
            body: Body = {"prompt": inside, "echo": True, "max_tokens": 0, "logprobs": 1, "temperature": 100}
            body["stop_token_ids"] = list(range(300, 320))
            _, answer, _ = await server.post(body)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 0, 2)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("b\ufffd", "length", None)
    assert choice["logprobs"]["text_offset"] == [0, 1]
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) == 2
    (line,) = [json.loads(record.message) for record in caplog.records if record.name == "infer.access"]
    assert line["usage"] == usage


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"logprob_token_ids": [7]}, {"prompt_logprobs": 0}])
@pytest.mark.parametrize("most", [0, 5])
async def test_an_echo_is_streamed_as_it_comes_whole(most: int, more: Body, random: Body) -> None:
    inside = tokenizer().encode("b\u00e9").ids[:-1]
    body: Body = {"prompt": ["a b\u00e9", inside], "echo": True, "n": 2, "seed": 3, "max_tokens": most} | more
    async with running(engine=ENGINE, model=random) as server:
        _, whole, _ = await server.post(body)
        *chunks, last, _ = await server.stream(body | {"stream_options": {"include_usage": True}})
    cached = {"prompt_tokens_details"}
    assert {k: v for k, v in last["usage"].items() if k not in cached} == {
        k: v for k, v in whole["usage"].items() if k not in cached
    }
    assert last["usage"]["completion_tokens"] == 4 * most
    for expected in whole["choices"]:
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == expected["index"]]
        assert parts[0]["text"].startswith("b" if expected["index"] > 1 else "a b\u00e9")
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert parts[-1]["finish_reason"] == expected["finish_reason"] == "length"
        assert parts[0].get("prompt_logprobs") == expected.get("prompt_logprobs")
        found = [part["logprobs"] for part in parts if part["logprobs"]]
        for key, values in (expected["logprobs"] or {}).items():
            assert [value for logprobs in found for value in logprobs[key]] == values, key


@pytest.mark.parametrize("most", [0, 5])
async def test_an_echo_that_is_streamed_is_billed_as_if_whole(
    most: int, random: Body, caplog: pytest.LogCaptureFixture
) -> None:
    body: Body = {"prompt": ["ab", "c"], "echo": True, "n": 2, "seed": 3, "max_tokens": most}
    with caplog.at_level(logging.INFO, "infer.access"):
        async with running(engine=ENGINE, model=random, server={"access_log": True}) as server:
            _, whole, _ = await server.post(body)
            *_, last, _ = await server.stream(body | {"stream_options": {"include_usage": True}})
    lines = [json.loads(record.message) for record in caplog.records if record.name == "infer.access"]
    assert [line["usage"] for line in lines] == [whole["usage"], last["usage"]]


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
async def test_every_chunk_says_what_it_has_to(
    path: str, random: Body, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Log-probabilities of tokens without text too, the end with the last alone, the usage so far with each."""
    (tmp_path / "template.jinja").write_text("{{ messages[0].content }}")
    model = random | {"chat_template": str(tmp_path / "template.jinja")}
    asked: Body = {"messages": [{"role": "user", "content": "ab"}]} if path == CHAT else {"prompt": "ab"}
    asked |= {"max_tokens": 30, "temperature": 100.0, "seed": 5, "ignore_eos": True, "stop": ["~never~"]}
    asked |= {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    usage = {"include_usage": True, "continuous_usage_stats": True}
    with caplog.at_level(logging.INFO, "infer.access"):
        async with running(engine=ENGINE, model=model, server={"access_log": True}) as server:
            _, whole, _ = await server.post(asked, path)
            body = asked | {"stream": True, "stream_options": usage, "user": "u-2"}
            async with server.session.post(server.url + path, json=body) as response:
                request_id = response.headers["X-Request-Id"]
                lines = (await response.read()).decode().split("\n\n")
            plain = await server.stream(asked | {"stream_options": {"continuous_usage_stats": True}}, path)
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert chunks[0]["id"].endswith(request_id)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {whole["usage"]["prompt_tokens"]}, "the first, too"
    choices = [chunk["choices"][0] for chunk in chunks]
    ended = [choice["finish_reason"] for choice in choices]
    assert ended == [None] * (len(ended) - 1) + [whole["choices"][0]["finish_reason"]]
    of_tokens = [(choice, chunk["usage"]) for choice, chunk in zip(choices, chunks, strict=True) if choice["logprobs"]]
    assert len(of_tokens) == 30, "one token a chunk, whether or not it completes a character"
    assert any(not (choice.get("text") or choice.get("delta", {}).get("content")) for choice, _ in of_tokens)
    assert [usage["completion_tokens"] for _, usage in of_tokens] == list(range(1, 31))
    key = "content" if path == CHAT else "token_logprobs"
    assert [e for choice, _ in of_tokens for e in choice["logprobs"][key]] == whole["choices"][0]["logprobs"][key]
    assert [c["usage"]["completion_tokens"] for c in plain[:-1] if c["choices"][0]["logprobs"]] == list(range(1, 31))
    _, logged, _ = [json.loads(record.message) for record in caplog.records if record.name == "infer.access"]
    assert (logged["request_id"], logged["user"], logged["usage"]) == (request_id, "u-2", whole["usage"])
    assert logged["status"] == 200


async def test_a_stop_string_that_the_last_token_completes_is_why_it_ends() -> None:
    async with running(engine=ENGINE) as server:
        body: Body = {"prompt": "def f(", "temperature": 0, "ignore_eos": True}
        texts = [(await server.post(body | {"max_tokens": n}))[1]["choices"][0]["text"] for n in range(2, 12)]
        last, text = next((n, t) for n, t in enumerate(texts, 2) if t.find(t[-2:]) == len(t) - 2)
        body |= {"max_tokens": last, "stop": text[-2:]}
        whole = (await server.post(body))[1]["choices"][0]
        *chunks, _ = await server.stream(body)
        streamed = chunks[-1]["choices"][0] | {"text": "".join(chunk["choices"][0]["text"] for chunk in chunks)}
        for choice in (whole, streamed):
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:-2], "stop", text[-2:])


async def test_a_body_that_does_not_come_is_answered_408(random: Body) -> None:
    server_settings = {"body_timeout_s": 0.2, "access_log": False}
    async with asyncio.timeout(HANG_S), running(engine=ENGINE, model=random, server=server_settings) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(head + b"Content-Length: 50\r\n\r\n{")
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        finally:
            writer.close()


async def test_a_client_that_does_not_read_is_dropped(random: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request ends, though it keeps its connection. What is buffered on the way is made small here."""
    settings = {"stall_timeout_s": 0.2, "access_log": False}
    engine = {"max_batch_size": 1, "max_seq_len": 500}
    async with asyncio.timeout(HANG_S), running(engine=engine, model=random, server=settings) as server:

        async def never(*args: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(web.StreamResponse, "write", never)
        monkeypatch.setattr("asyncio.selector_events._SelectorSocketTransport.get_write_buffer_size", lambda self: 1)
        body = {"prompt": [5, 6], "max_tokens": 490, "ignore_eos": True, "stream": True}
        async with server.session.post(server.url + "/v1/completions", json=body) as response:
            with pytest.raises(aiohttp.ClientError):
                await response.read()
            await server.idle()


async def test_the_last_of_several_deltas_says_why_it_ends(tmp_path: Path) -> None:
    """A stop string holds the whole answer back; its end brings a call's name and arguments at once."""
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    body: Body = {"messages": [{"role": "user", "content": "x"}], "stop": call + "z", "max_tokens": 100}
    body |= {"tools": [{"type": "function", "function": {"name": "f"}}], "structured_outputs": {"choice": [call]}}
    async with running(engine={"max_seq_len": 512}, model=chatty(tmp_path)) as server:
        chunks = await server.stream(body, CHAT)
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert len(choices) > 2
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    assert [call["function"] for choice in choices for call in choice["delta"].get("tool_calls", ())] != []


async def test_the_chunks_of_a_chat_add_up_to_the_whole_answer(tmp_path: Path) -> None:
    """As OpenAI's own client adds them up: a message that only calls has no content, an empty one has an empty text."""
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked: Body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100, "n": 2, "tools": tools}
    found = []
    async with running(engine={"max_seq_len": 512}, model=chatty(tmp_path)) as server:
        for text in (call, f"So: {call}", "So.", "S"):
            body = asked | {"structured_outputs": {"choice": [text]}, "stop": "S" if text == "S" else "~never~"}
            _, whole, _ = await server.post(body, CHAT)
            state = ChatCompletionStreamState()
            for chunk in (await server.stream(body | {"stream_options": {"include_usage": True}}, CHAT))[:-1]:
                state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
            added, expected = state.current_completion_snapshot, ChatCompletion.model_validate(whole)
            assert added.usage is not None
            assert expected.usage is not None
            cached = {"prompt_tokens_details"}  # how much is found in the cache depends on what came before, and where
            assert added.usage.model_dump(exclude=cached) == expected.usage.model_dump(exclude=cached)
            for one, other in zip(added.choices, expected.choices, strict=True):
                strip: Any = {
                    "stop_reason": True,
                    "message": {"parsed": True, "tool_calls": {"__all__": {"id", "index"}}},
                }
                told, whole_told = one.model_dump(exclude=strip), other.model_dump(exclude=strip)
                for called in told["message"]["tool_calls"] or ():
                    assert called["function"].pop("parsed_arguments") is None
                assert told == whole_told
            found.append(expected.choices[1].message.content)
    assert found == [None, "So: ", "So.", ""]


async def test_a_stream_that_is_refused_after_a_place_was_seen_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may take the place while a body is read."""
    monkeypatch.setattr(EngineLoop, "check_place", lambda self: None)
    async with running(engine={"max_batch_size": 1, "max_waiting_requests": 1, "max_seq_len": 256}) as server:
        url, asked = f"{server.url}/v1/completions", {"prompt": "def ", "max_tokens": 3, "stream": True}
        with holding(0):
            streams = [await server.session.post(url, json=asked) for _ in range(3)]
            assert [stream.status for stream in streams] == [200, 200, 503], "no place is known before the headers"
            assert "max_waiting_requests" in await streams[2].text()
        for stream in streams[:2]:
            assert "data: [DONE]" in await stream.text()
        await server.idle()


async def test_headers_come_when_requests_are_taken_and_comments_until_there_is_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "SILENCE_S", 0.0)
    engine = {"max_batch_size": 1, "max_waiting_requests": 1, "max_seq_len": 256}
    async with running(engine=engine) as server:
        body: Body = {"prompt": "def ", "max_tokens": 3, "temperature": 0, "seed": 1}
        _, whole, _ = await server.post(body)
        url, asked = f"{server.url}/v1/completions", body | {"stream": True}
        with holding(0):
            streams = [await server.session.post(url, json=asked) for _ in range(3)]
            assert [stream.status for stream in streams] == [200, 200, 503], "no place is known before the headers"
            assert await streams[0].content.readuntil(b"\n\n") == b": the answer is being computed\n\n"
            streams[1].close()
            await until(lambda: server.engine_loop.num_open == 2)
        events = [event for event in (await streams[0].text()).split("\n\n") if event and not event.startswith(":")]
        frames = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        assert events[-1] == "data: [DONE]"
        assert "".join(frame["choices"][0]["text"] for frame in frames) == whole["choices"][0]["text"]
        await server.idle()
