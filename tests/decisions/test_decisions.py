"""Decisions, as OpenAI and TypeSafe's System One ask for them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests import serving
from tests.examples import slowly
from tests.models.checkpoints import write_checkpoint
from tests.serving import HANG_S, Body, holding, running, working

from infer.contracts.request import Request
from infer.errors import QueueFullError
from infer_decisions import endpoint
from infer_server.http import bodies, streams
from infer_server.service import Service

ENGINE = {"max_batch_size": 4, "max_seq_len": 512}


@pytest.fixture
def chatty(tmp_path: Path) -> dict[str, Any]:
    """Settings of a server that can chat."""
    return {"engine": ENGINE, "model": serving.chatty(tmp_path)}


STATE = "The integration keeps failing, I was charged twice and I need help as soon as possible. " * 8
QUESTIONS = {
    "urgent": {"type": "noul", "instructions": "Is it urgent?", "criteria": {"true": "now", "false": "later"}},
    "refund": {"type": "yes_no", "instructions": "Is a refund asked for?"},
    "team": {
        "type": "choice",
        "instructions": "Which team?",
        "criteria": {"billing": "money", "support": None, "other": None},
    },
    "anger": {"type": "score", "instructions": "How angry?", "criteria": ["calm", "annoyed", "angry"]},
}


async def test_decisions_repeat_bit_for_bit_and_share_the_state(chatty: dict[str, Any]) -> None:
    async with running(**chatty) as server:
        body = {"state": STATE, "questions": QUESTIONS}
        status, first, _ = await server.post(body, "/v1/decisions")
        assert status == 200, first
        answers = first["answers"]
        assert list(answers) == list(QUESTIONS)
        assert 0 <= answers["urgent"]["noul"] <= 1
        assert answers["refund"]["type"] == "yes_no"
        team = answers["team"]
        assert team["choice"] == max(team["probabilities"], key=team["probabilities"].get)
        assert sum(team["probabilities"].values()) == pytest.approx(1)
        assert 0 <= team["confidence"] <= 1
        anger = answers["anger"]
        assert anger["score"] == pytest.approx(sum(int(i) * p for i, p in anger["probabilities"].items()))
        assert anger["legend"] == {"0": "calm", "1": "annoyed", "2": "angry"}
        assert list(anger["probabilities"]) == list(anger["legend"])
        async with server.session.get(server.url + "/metrics") as response:
            families = list(text_string_to_metric_families(await response.text()))
        found = {sample.name: sample.value for family in families for sample in family.samples}
        state_tokens = (await server.post({"prompt": STATE}, "/tokenize"))[1]["count"]
        assert found["infer_prefix_cache_hits_total"] >= 3 * (state_tokens - 32)
        busy = asyncio.gather(*(server.post({"prompt": "def ", "max_tokens": 40, "seed": i}) for i in range(3)))
        _, again, _ = await server.post(body, "/v1/systemone")
        assert again["answers"] == answers
        await busy
        one = {"state": {"text": STATE}, "questions": {"urgent": QUESTIONS["urgent"]}}
        assert (await server.post(one, "/v1/decisions"))[0] == 200
        for bad, param in (
            ({"state": "x", "questions": {}}, "questions"),
            ({"state": "x", "questions": {"a": {"type": "maybe", "instructions": "?"}}}, "questions.a.type"),
            ({"questions": QUESTIONS}, "input"),
        ):
            status, answer, _ = await server.post(bad, "/v1/decisions")
            assert (status, answer["error"]["param"]) == (400, param), answer


async def test_decisions_as_openai_asks_them(chatty: dict[str, Any]) -> None:
    """The same figures as System One's: two ways to say one thing."""
    async with running(**chatty) as server:
        asked = [
            {"type": "choice", "name": "team", "instructions": "Which team?"}
            | {"choices": [{"value": "billing", "description": "money"}, {"value": "support"}, {"value": "other"}]},
            {"type": "score", "instructions": [{"type": "input_text", "text": "How angry?"}]}
            | {"levels": [{"label": "calm"}, {"label": "annoyed"}, {"label": "angry"}]},
            {"type": "predicate", "name": "refund", "instructions": "A refund is asked for."},
            {"type": "choice", "instructions": "Is it?", "choices": [{"value": True}, {"value": "true"}]},
        ]
        status, found, _ = await server.post({"input": STATE, "questions": asked}, "/v1/decisions")
        assert status == 200, found
        _, same, _ = await server.post({"state": STATE, "questions": QUESTIONS}, "/v1/systemone")
        team, anger, refund, truth = found["answers"]
        other = same["answers"]["team"]
        assert (team["choice"], team["confidence"], team["name"]) == (other["choice"], other["confidence"], "team")
        assert {each["value"]: each["probability"] for each in team["probabilities"]} == other["probabilities"]
        other = same["answers"]["anger"]
        assert (anger["score"], anger["confidence"], anger["name"]) == (other["score"], other["confidence"], None)
        assert [(str(each["value"]), each["label"]) for each in anger["probabilities"]] == list(other["legend"].items())
        assert [each["probability"] for each in anger["probabilities"]] == list(other["probabilities"].values())
        assert 0 < refund["probability"] < 1
        assert refund["name"] == "refund"
        assert [each["value"] for each in truth["probabilities"]] == [True, "true"]
        usage = found["usage"]
        assert usage["input_tokens"] == usage["total_tokens"] > 0
        assert usage["input_tokens_details"]["cached_tokens"] > 0


async def test_decisions_judge_a_conversation(chatty: dict[str, Any]) -> None:
    """What it says arrives in the prompt: as the text that it makes does."""
    items = [
        {"role": "system", "content": "Help."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "It "}, {"type": "input_json", "data": {"a": None}}],
        },
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "ok"},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Done."}, {"type": "refusal", "refusal": "!"}],
        },
    ]
    said = 'system: Help.\nuser: It {"a": null}\nassistant calls look: {}\ntool: ok\nassistant: Done.!'
    questions = [{"type": "predicate", "instructions": "It is done."}]
    async with running(**chatty) as server:
        _, one, _ = await server.post({"input": items, "questions": questions}, "/v1/decisions")
        _, other, _ = await server.post({"input": said, "questions": questions}, "/v1/decisions")
    assert one["answers"] == other["answers"]
    assert one["usage"]["input_tokens"] == other["usage"]["input_tokens"]


async def test_many_questions_leave_places_for_others(chatty: dict[str, Any]) -> None:
    questions = [{"type": "predicate", "name": f"{i}", "instructions": f"Is it {i}?"} for i in range(30)]
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, server.engine_loop.num_open)
            await asyncio.sleep(0)

    async with running(**chatty) as server:
        watching = asyncio.create_task(watch())
        status, found, _ = await server.post({"input": "x", "questions": questions}, "/v1/decisions")
        watching.cancel()
    assert status == 200, found
    assert [answer["name"] for answer in found["answers"]] == [f"{i}" for i in range(30)]
    assert 1 <= most <= ENGINE["max_batch_size"]


async def test_many_questions_are_counted_first_and_made_as_they_run(
    chatty: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question's request has all of the state's tokens."""
    made = most = 0
    requests, whole = Service.requests, Service.whole

    async def make(self: Service, *given: Any, **how: Any) -> Any:
        nonlocal made, most
        made += 1
        most = max(most, made)
        return await requests(self, *given, **how)

    async def run(self: Service, *given: Any, **how: Any) -> Any:
        nonlocal made
        made = 0
        return await whole(self, *given, **how)

    monkeypatch.setattr(Service, "requests", make)
    monkeypatch.setattr(Service, "whole", run)
    questions = [{"type": "predicate", "instructions": "Is it?"} for _ in range(40)]
    async with running(**chatty, server={"max_choices": 39, "access_log": False}) as server:
        status, found, _ = await server.post({"input": "x", "questions": questions}, "/v1/decisions")
        assert (status, found["error"]["param"], made) == (400, "questions", 0)
        assert found["error"]["message"] == "This asks for 40 answers at once; server.max_choices allows 39."
        status, found, _ = await server.post({"input": "x", "questions": questions[1:]}, "/v1/decisions")
        assert (status, len(found["answers"]), most) == (200, 39, ENGINE["max_batch_size"])


async def test_prompts_have_so_many_tokens_in_all(chatty: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known from the first, before there is any other."""
    made, requests = list[int](), Service.requests

    async def counted(self: Service, *given: Any, **how: Any) -> list[Request]:
        found = await requests(self, *given, **how)
        made.extend(len(request.prompt_token_ids) for request in found)
        return found

    monkeypatch.setattr(Service, "requests", counted)
    body = {"input": STATE, "questions": [{"type": "predicate", "instructions": "Is it?"}] * 3}
    async with running(**chatty) as server:
        assert (await server.post(body, "/v1/decisions"))[0] == 200
        first, *others = made
        assert others == [first, first]
        monkeypatch.setattr(endpoint, "MAX_TOKENS", 3 * first - 1)
        made.clear()
        status, found, _ = await server.post(body, "/v1/decisions")
        assert (status, found["error"]["param"], made) == (400, "questions", [first])
        assert found["error"]["message"] == (
            f"Each question's prompt has the whole state: 3 of about {first} tokens are {3 * first}, and at most "
            f"{3 * first - 1} are allowed. Ask fewer questions at a time."
        )
        monkeypatch.setattr(endpoint, "MAX_TOKENS", 3 * first)
        assert (await server.post(body, "/v1/decisions"))[0] == 200


async def test_a_question_waits_while_another_request_has_the_only_place(
    chatty: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one takes it between the first question and the second, and is answered meanwhile."""
    between, go, refused, times = asyncio.Event(), asyncio.Event(), asyncio.Event(), itertools.count()
    whole = Service.whole

    async def pausing(self: Service, *given: Any, **how: Any) -> Any:
        if next(times) == 1:
            between.set()
            await go.wait()
        return await whole(self, *given, **how)

    monkeypatch.setattr(Service, "whole", pausing)
    questions = [{"type": "predicate", "instructions": f"Is it {i}?"} for i in range(3)]
    engine = ENGINE | {"max_batch_size": 1, "max_waiting_requests": 0}
    async with running(**chatty | {"engine": engine}) as server, asyncio.timeout(HANG_S):
        submit_all = server.engine_loop.submit_all

        def watched(requests: Sequence[Request], mailbox: Any) -> int:
            try:
                accepted: int = submit_all(requests, mailbox)
            except QueueFullError:
                refused.set()
                raise
            return accepted

        monkeypatch.setattr(server.engine_loop, "submit_all", watched)
        asked = asyncio.create_task(server.post({"input": "x", "questions": questions}, "/v1/decisions"))
        await between.wait()
        with holding(0):
            body = {"prompt": "a", "max_tokens": 2, "stream": True}
            other = await server.session.post(server.url + "/v1/completions", json=body)
            assert other.status == 200
            go.set()
            await refused.wait()
        assert (await other.text()).endswith("data: [DONE]\n\n")
        status, found, _ = await asked
    assert (status, len(found.get("answers", ()))) == (200, len(questions)), found


async def test_more_choices_than_letters(chatty: dict[str, Any]) -> None:
    chatty["engine"] = ENGINE | {"max_seq_len": 2048}
    questions = [
        {"type": "choice", "instructions": "?", "choices": [{"value": str(i)} for i in range(count)]}
        for count in (26, 60, 255)
    ]
    async with running(**chatty) as server:
        status, found, _ = await server.post({"input": "x", "questions": questions[:2]}, "/v1/decisions")
        assert status == 200, found
        for answer, count in zip(found["answers"], (26, 60), strict=True):
            assert sum(each["probability"] for each in answer["probabilities"]) == pytest.approx(1)
            assert len({each["probability"] for each in answer["probabilities"]}) > count / 2, "each has its own token"
        status, found, _ = await server.post({"input": "x", "questions": questions[2:]}, "/v1/decisions")
        assert (status, found["error"]["param"]) == (400, "questions")
        assert "255 choices" in found["error"]["message"]


async def test_many_decisions_are_written_in_turns(chatty: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    written = longest = 0
    answered = endpoint._answer

    def counted(*given: Any) -> Any:
        nonlocal written
        written += 1
        return answered(*given)

    async def tick() -> None:
        nonlocal written, longest
        while True:
            longest, written = max(longest, written), 0
            await asyncio.sleep(0)

    monkeypatch.setattr(endpoint, "_answer", counted)
    async with running(**chatty) as server:
        questions = {
            f"q{i}": {"type": "choice", "instructions": "?", "criteria": {"a": None, "\u00e9": "b"}} for i in range(64)
        }
        once = await server.post({"state": "a", "questions": questions}, "/v1/systemone")
        assert list(once[1]["answers"]) == list(questions)
        assert list(once[1]["answers"]["q0"]["probabilities"]) == ["a", "\u00e9"]
        monkeypatch.setattr(streams, "TURN_S", -1.0)
        written = 0
        ticks = asyncio.create_task(tick())
        again = await server.post({"state": "a", "questions": questions}, "/v1/systemone")
        ticks.cancel()
    assert again[1]["answers"] == once[1]["answers"]
    assert longest <= streams.FEW


ITEMS: Body = {
    "input": [{"role": "user", "content": "def f"}],
    "questions": [{"type": "predicate", "instructions": "It is."}],
}
TREE: Body = {"state": {"a": ["\u00e9", 1]}, "questions": {"q": {"type": "yes_no", "instructions": "Is it?"}}}


async def test_refusals_name_the_endpoints_own_fields(chatty: dict[str, Any]) -> None:
    """Whatever the engine and the template call what is wrong."""
    long = "x " * 5000
    question = {"type": "predicate", "instructions": "It is."}
    bad: list[tuple[str, Body, str, str]] = [
        ("/v1/decisions", {"input": long, "questions": [question]}, "input", "maximum context length"),
        ("/v1/systemone", {"state": long, "questions": {"u": QUESTIONS["urgent"]}}, "state", "maximum context length"),
        ("/v1/systemone", {"input": "x", "questions": []}, "state", "missing"),
    ]
    async with running(**chatty) as server:
        for path, body, param, message in bad:
            status, answer, _ = await server.post(body, path)
            assert (status, answer["error"]["param"]) == (400, param), answer
            assert message in answer["error"]["message"], answer


async def test_no_template_is_needed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", "llama")
    async with running(engine=ENGINE, model={"path": str(folder), "dtype": "float32"}) as server:
        body = {"state": "I need help.", "questions": {"urgent": QUESTIONS["urgent"]}}
        status, answer, _ = await server.post(body, "/v1/decisions")
        assert status == 200, answer


async def test_the_checkpoints_sampling_values_change_nothing(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", "llama")
    (folder / "generation_config.json").write_text('{"temperature": 30.0, "top_k": 40, "repetition_penalty": 1.3}')
    model = serving.chatty(tmp_path, path=str(folder))
    answers = []
    for each in (model, model | {"generation_config": "none"}):
        async with running(engine=ENGINE, model=each) as server:
            body = {"state": "x", "questions": {"q": {"type": "yes_no", "instructions": "?"}}}
            answers.append((await server.post(body, "/v1/decisions"))[1]["answers"])
    assert answers[0] == answers[1]


async def test_the_document_knows_both_routes(chatty: dict[str, Any]) -> None:
    async with running(**chatty) as server:
        _, made = await server.get("/openapi.json")
    assert {"/v1/decisions", "/v1/systemone"} <= set(made["paths"])


async def test_who_asks_reaches_the_engine(chatty: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(**chatty) as server:
        seen: list[Request] = []
        submit_all = server.engine_loop.submit_all

        def watched(requests: Sequence[Request], mailbox: Any) -> int:
            seen.extend(requests)
            accepted: int = submit_all(requests, mailbox)
            return accepted

        monkeypatch.setattr(server.engine_loop, "submit_all", watched)
        for path, asked, user in (
            ("/v1/decisions", ITEMS | {"safety_identifier": "s"}, "s"),
            ("/v1/systemone", TREE | {"user": "u"}, "u"),
        ):
            seen.clear()
            assert (await server.post(asked, path))[0] == 200, asked
            assert [(request.owner.user, request.group) for request in seen] == [(user, "")], asked


@pytest.mark.slow
async def test_a_large_body_asks_for_what_a_small_one_does(chatty: dict[str, Any]) -> None:
    async with running(**chatty | {"cache": {"backend": "slotted"}}) as server:
        for path, body in (("/v1/decisions", ITEMS), ("/v1/systemone", TREE)):
            _, small, _ = await server.post(body, path)
            status, large, _ = await server.post(json.dumps(body) + " " * bodies.INLINE_BYTES, path)
            assert (status, large["answers"]) == (200, small["answers"]), path


@pytest.mark.parametrize(
    ("path", "body"),
    slowly(
        ("/v1/decisions", ITEMS | {"input": [{"role": "user", "content": "a"}] * 8000}),
        ("/v1/systemone", TREE | {"state": [{"a": i} for i in range(8000)]}),
    ),
    ids=["/v1/decisions", "/v1/systemone"],
)
async def test_what_a_long_subject_says_is_worked_out_where_it_is_parsed(
    path: str, body: Body, chatty: dict[str, Any]
) -> None:
    """Neither its items nor its text are the server's process's work."""
    sent = json.dumps(body)
    async with running(**chatty) as server:
        with working() as worked:
            status, answer, _ = await server.post(sent, path)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert len(worked) < 1000
    assert body.get("state", "none") not in worked
