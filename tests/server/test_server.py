"""A real server on a real socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.serving import HANG_S, Body, chatty, holding, running, until

from infer.engine.runner import Runner


@pytest.fixture(scope="module")
def small() -> Body:
    return {"engine": {"max_batch_size": 2, "max_waiting_requests": 4, "max_seq_len": 512}}


async def test_whole_and_streamed_answers_agree(small: Body) -> None:
    body = {"model": "demo", "prompt": "import ", "max_tokens": 24, "temperature": 0.8, "seed": 5}
    async with running(**small) as server:
        status, whole, headers = await server.post(body)
        assert status == 200
        assert headers["X-Request-Id"] in whole["id"]
        assert whole["object"] == "text_completion"
        assert whole["usage"]["completion_tokens"] == 24
        assert whole["choices"][0]["finish_reason"] == "length"
        *chunks, done = await server.stream(body)
        assert done == "[DONE]"
        assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]
        assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "length"
        assert all("usage" not in c for c in chunks)
        *chunks, last, done = await server.stream(body | {"stream_options": {"include_usage": True}})
        assert all(c["usage"] is None for c in chunks)
        assert (last["choices"], last["usage"]) == ([], whole["usage"])


async def test_a_stop_string_across_tokens_ends_the_answer(small: Body) -> None:
    async with running(**small) as server:
        body = {"prompt": "def f(", "max_tokens": 60, "temperature": 0}
        _, free, _ = await server.post(body)
        text = free["choices"][0]["text"]
        stop = text[len(text) // 2 : len(text) // 2 + 5]
        _, stopped, _ = await server.post(body | {"stop": stop})
        assert stopped["choices"][0]["text"] == text[: text.index(stop)]
        assert stopped["choices"][0]["finish_reason"] == "stop"
        *chunks, _ = await server.stream(body | {"stop": [stop]})
        assert "".join(c["choices"][0]["text"] for c in chunks) == text[: text.index(stop)]


async def test_logprobs_of_answer_and_prompt(small: Body) -> None:
    async with running(**small) as server:
        body = {"prompt": "return x", "max_tokens": 3, "temperature": 0, "logprobs": 2, "prompt_logprobs": 1}
        _, answer, _ = await server.post(body)
        choice = answer["choices"][0]
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert all(len(top) == 2 for top in choice["logprobs"]["top_logprobs"])
        assert choice["prompt_logprobs"][0] is None
        assert len(choice["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
        *chunks, _ = await server.stream(body)
        streamed = [
            p for c in chunks for p in (c["choices"][0]["logprobs"] or {"token_logprobs": []})["token_logprobs"]
        ]
        assert streamed == choice["logprobs"]["token_logprobs"]


async def test_a_common_prefix_is_computed_once_and_not_across_salts(small: Body) -> None:
    async with running(**small) as server:
        answers = []
        for salt in ("a", "a", "b", None):
            body = {"prompt": list(range(1, 41)), "max_tokens": 3, "temperature": 0, "logprobs": 3, "cache_salt": salt}
            _, answer, _ = await server.post(body)
            answers.append(answer)
        cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
        assert cached == [0, 32, 0, 0]
        assert all(a["choices"] == answers[0]["choices"] for a in answers)
        status, refused, _ = await server.post({"prompt": "x", "cache_salt": "s" * 257})
        assert (status, refused["error"]["param"]) == (400, "cache_salt")


async def test_metrics_count_what_was_computed_and_what_was_needed(small: Body) -> None:
    small = small | {"engine": small["engine"] | {"prefill_chunk_size": 16}}
    async with running(**small) as server:
        for _ in range(2):
            await server.post({"prompt": list(range(1, 41)), "max_tokens": 5, "ignore_eos": True})
        async with server.session.get(server.url + "/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain")
            families = text_string_to_metric_families(await response.text())
        found = {sample.name: sample.value for family in families for sample in family.samples}
        assert found["infer_prompt_tokens_total"] == 80
        assert found["infer_prefix_cache_hits_total"] == 32
        assert found["infer_generation_tokens_total"] == 10
        assert found["infer_computed_tokens_total"] == found["infer_useful_tokens_total"] == 40 + 4 + 8 + 4
        assert found["infer_passes_total"] == 3 + 4 + 1 + 4
        assert found["infer_num_preemptions_total"] == 0


async def test_metrics_count_passes_that_raised(small: Body) -> None:
    async with running(**small) as server:
        with patch.object(Runner, "launch", side_effect=RuntimeError("nobody at home")):
            assert (await server.post({"prompt": "x"}))[0] == 500
        await server.post({"prompt": "x", "max_tokens": 1})
        async with server.session.get(server.url + "/metrics") as response:
            assert 'infer_failed_passes_total{model_name="demo"} 1.0' in await response.text()


async def test_models_health_and_ready(small: Body) -> None:
    async with running(**small) as server:
        _, models = await server.get("/v1/models")
        assert models["data"][0]["id"] == "demo"
        assert models["data"][0]["max_model_len"] == 512
        assert models["data"][0]["exact"] is True
        assert models["data"][0]["quantization"] is None
        assert await server.get("/health") == (200, {"status": "ok"})
        assert await server.get("/ready") == (200, {"status": "ready"})


async def test_a_server_says_that_a_pass_is_stuck() -> None:
    async with running(engine={"max_seq_len": 512, "step_timeout_s": 1e-9}) as server:
        with holding(0):
            task = asyncio.create_task(server.post({"prompt": "x", "max_tokens": 1}))
            await until(lambda: server.engine_loop.stuck)
            for path in ("/health", "/ready"):
                assert await server.get(path) == (503, {"status": "stuck"})
        assert (await task)[0] == 200
        await until(lambda: server.engine_loop.healthy)


BAD: list[tuple[Any, int, str | None, str]] = [
    (b"{", 400, None, "not valid JSON"),
    (b"[]", 400, None, "must be a JSON object"),
    (b"\xff\xfe", 400, None, "not valid JSON"),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, None, "not valid JSON"),
    ({}, 400, "prompt", "missing"),
    ({"prompt": []}, 400, "prompt", "empty"),
    ({"prompt": ["a", 5]}, 400, "prompt", "a text or a list"),
    ({"prompt": ["a"] * 300}, 400, "prompt", "server.max_choices allows 256"),
    ({"prompt": [1, 10**9]}, 400, "prompt", "token id 1000000000"),
    ({"prompt": [-1]}, 400, "prompt", "a text or a list"),
    ({"prompt": [5] * 600}, 400, "prompt", "This model's maximum context length is 512"),
    ({"prompt": [5] * 500, "min_tokens": 13, "max_tokens": None}, 400, "min_tokens", "min_tokens asks for at least 13"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "is possible with echo only"),
    ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens", "greater than or equal to 0"),
    ({"prompt": "a", "max_tokens": "7"}, 400, "max_tokens", "valid integer"),
    (b'{"prompt": "a", "temperature": NaN}', 400, "temperature", "temperature"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature", "greater than or equal to 0"),
    ({"prompt": "a", "top_p": 0}, 400, "top_p", "greater than 0"),
    ({"prompt": "a", "temprature": 1}, 400, "temprature", "Did you mean 'temperature'?"),
    ({"prompt": "a", "n": 0}, 400, "n", "greater than or equal to 1"),
    ({"prompt": "a", "n": 300}, 400, "n", "server.max_choices allows 256"),
    ({"prompt": "a", "best_of": 2}, 400, "best_of", "not supported"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, 400, "logit_bias.5", "less than or equal to 100"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias.x", "valid integer"),
    ({"prompt": "a", "logit_bias": {"999999": 1}}, 400, "logit_bias", "token id 999999"),
    ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias", "at most 1024"),
    ({"prompt": "a", "top_k": 10**30}, 400, "top_k", "less than 2147483648"),
    ({"prompt": "a", "seed": 2**63}, 400, "seed", "less than"),
    ({"prompt": "a", "min_tokens": 10**30, "max_tokens": None}, 400, "min_tokens", "less than"),
    ({"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty", "less than or equal to 2"),
    ({"prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty", "greater than or equal to 0.01"),
    ({"prompt": "a", "min_tokens": 20}, 400, "min_tokens", "above max_tokens"),
    ({"prompt": "a", "guided_regex": "a", "min_tokens": 2}, 400, "min_tokens", "structured output"),
    ({"prompt": "a", "guided_regex": "("}, 400, "guided_regex", "cannot be compiled"),
    ({"prompt": "a", "guided_regex": "a", "guided_choice": ["b"]}, 400, "structured_outputs", "not several"),
    ({"prompt": "a", "response_format": {"type": "json_schema"}}, 400, "response_format", "needs json_schema; give it"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, 400, "response_format.type", "not supported"),
    ({"prompt": "a", "suffix": "b"}, 400, "suffix", "not supported"),
    ({"prompt": "a", "logprobs": 21}, 400, "logprobs", "less than or equal to 20"),
    ({"prompt": "a", "stop": [""]}, 400, "stop", "1 to 256 characters"),
    ({"prompt": "a", "stop": ["x"] * 17}, 400, "stop", "at most 16"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options", "stream is not true"),
    ({"prompt": "a", "model": "gpt-4"}, 404, "model", "'gpt-4' is not served here"),
]


async def test_everything_a_client_can_get_wrong_gets_one_sentence_and_the_server_lives_on(small: Body) -> None:
    async with running(**small) as server:
        for body, status, param, message in BAD:
            got, answer, headers = await server.post(body)
            error = answer["error"]
            assert (got, error["param"]) == (status, param), (body if len(str(body)) < 99 else "...", answer)
            assert message in error["message"]
            assert error["type"] == "invalid_request_error"
            assert "X-Request-Id" in headers
        assert (await server.post({"prompt": [5] * 600}))[1]["error"]["code"] == "context_length_exceeded"
        status, answer, _ = await server.post({"prompt": "a"}, "/chat/completions")
        assert status == 404
        assert answer["error"]["message"] == "There is no /chat/completions here; GET /docs lists what there is."
        async with server.session.get(server.url + "/v1/completions") as response:
            assert response.status == 405
            assert "POST" in (await response.json())["error"]["message"]
        assert (await server.post({"prompt": "x" * (5 << 20)}))[0] == 413
        neutral: Body = {"n": 1, "best_of": 1, "echo": False, "suffix": None, "logit_bias": {}, "temperature": None}
        assert (await server.post({"prompt": "a", "max_tokens": 1} | neutral))[0] == 200


async def test_head_is_answered_where_get_is(small: Body) -> None:
    async with running(**small) as server:
        for path in ("/v1/models", "/v1/models/demo", "/health", "/ready", "/metrics", "/tokenizer_info", "/docs"):
            async with (
                server.session.get(server.url + path) as got,
                server.session.head(server.url + path) as head,
            ):
                assert (head.status, await head.read()) == (200, b""), path
                assert head.headers["Content-Type"] == got.headers["Content-Type"]
        async with server.session.head(server.url + "/v1/completions") as refused:
            assert refused.status == 405


async def test_an_expectation_is_met_or_ignored(small: Body) -> None:
    async with running(**small) as server:
        port = int(server.url.rpartition(":")[2])
        for value in ("100-continue", "200-ok"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"POST /tokenize HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: 14\r\nExpect: {value}\r\nConnection: close\r\n\r\n".encode())
            async with asyncio.timeout(HANG_S):
                if value == "100-continue":
                    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
                writer.write(b'{"prompt":"a"}')
                assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
            writer.close()


async def test_two_run_four_wait_two_are_refused() -> None:
    engine = {"max_batch_size": 2, "max_waiting_requests": 4, "max_seq_len": 1024}
    async with running(engine=engine) as server:
        body = {"prompt": "def ", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
        with holding(0):
            asked = [asyncio.create_task(server.post(body)) for _ in range(8)]
            await until(lambda: sum(each.done() for each in asked) == 2)
        answers = await asyncio.gather(*asked)
        statuses = sorted(status for status, _, _ in answers)
        assert statuses == [200] * 6 + [503] * 2
        refused = [(answer, headers) for status, answer, headers in answers if status == 503]
        assert all(int(headers["Retry-After"]) >= 1 for _, headers in refused)
        assert all("max_waiting_requests" in answer["error"]["message"] for answer, _ in refused)
        texts = {answer["choices"][0]["text"] for status, answer, _ in answers if status == 200}
        assert len(texts) == 1, "equal requests are answered equally in any company"


GENERATING = (
    *("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/responses"),
    *("/v1/messages", "/v1/decisions", "/v1/systemone", "/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
)


async def test_no_body_is_read_while_there_is_no_place(tmp_path: Path) -> None:
    """But for those of requests that need none."""
    engine = {"max_batch_size": 1, "max_waiting_requests": 1, "max_seq_len": 1024}
    async with running(engine=engine, model=chatty(tmp_path)) as server:
        with holding(0):
            asked = [asyncio.create_task(server.post({"prompt": "def ", "max_tokens": 3})) for _ in range(2)]
            await until(lambda: server.engine_loop.num_open == 2)
            for path in GENERATING:
                host, port = server.url.removeprefix("http://").split(":")
                reader, writer = await asyncio.open_connection(host, int(port))
                head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                writer.write(f"{head}Content-Length: 1000\r\n\r\n".encode())  # of which none comes
                assert b" 503 " in await reader.readline(), path
                writer.close()
            for path, body in (("/tokenize", {"prompt": "a"}), ("/v1/responses/input_tokens", {"input": "a"})):
                assert (await server.post(body, path))[0] == 200, path
        assert [status for status, _, _ in await asyncio.gather(*asked)] == [200, 200]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_aborted(small: Body, stream: bool) -> None:
    async with running(engine={"max_batch_size": 1, "max_seq_len": 2000}) as server:
        body = {"prompt": "def ", "max_tokens": 1900, "ignore_eos": True, "stream": stream}
        if stream:
            async with server.session.post(server.url + "/v1/completions", json=body) as response:
                await response.content.readline()
                response.close()
        else:
            task = asyncio.create_task(server.post(body))
            await until(lambda: server.engine_loop.num_open > 0)
            task.cancel()
        await server.idle()
        assert (await server.post({"prompt": "x", "max_tokens": 1}))[0] == 200


async def test_a_draining_server_finishes_what_it_has_and_takes_no_more() -> None:
    async with running(engine={"max_batch_size": 2, "max_seq_len": 600}) as server:
        task = asyncio.create_task(server.post({"prompt": "def ", "max_tokens": 200, "ignore_eos": True}))
        await until(lambda: server.engine_loop.num_open > 0)
        closing = asyncio.create_task(asyncio.to_thread(server.engine_loop.close, 60.0))
        async with asyncio.timeout(HANG_S):
            while (await server.get("/ready"))[0] != 503:
                pass
        assert (await server.post({"prompt": "a"}))[0] == 503
        status, answer, _ = await task
        assert (status, answer["usage"]["completion_tokens"]) == (200, 200)
        await closing
        assert (await server.get("/health"))[0] == 503


async def test_what_does_not_finish_within_the_drain_is_told_so() -> None:
    async with running(engine={"max_batch_size": 2, "max_seq_len": 2000}) as server:
        body = {"prompt": "def ", "max_tokens": 1900, "ignore_eos": True}
        async with server.session.post(server.url + "/v1/completions", json=body | {"stream": True}) as streamed:
            await streamed.content.readline()
            whole = asyncio.create_task(server.post(body))
            await until(lambda: server.engine_loop.num_open == 2)
            await asyncio.to_thread(server.engine_loop.close)
            status, answer, headers = await whole
            *_, error, done = [line for line in (await streamed.read()).split(b"\n\n") if line]
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "shutting down" in answer["error"]["message"]
        assert b"shutting down" in error
        assert done == b"data: [DONE]"
