"""POST /v1/responses with a model that reasons."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.serving import Body, Running, running, thinker

from infer.contracts.text import ReasoningTags
from infer_server.thoughts import Thoughts

REQUEST: Body = {
    "input": "a loop",
    "max_output_tokens": 24,
    "temperature": 0,
    "chat_template_kwargs": {"enable_thinking": True},
}
REFUSED = ["min_tokens", "n", "stop_token_ids", "ignore_eos", "logprobs", "logprob_token_ids", "prompt_logprobs"]
"""What other endpoints take and responses do not."""
SCHEMA = {"type": "json_schema", "name": "x", "schema": {"enum": ["yes", "no"]}}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(model=thinker(tmp_path), engine={"max_seq_len": 256}) as made:
        yield made


async def ask(server: Running, **more: Any) -> Any:
    status, answer, _ = await server.post(REQUEST | more, "/v1/responses")
    assert status == 200, answer
    return answer


async def stream(server: Running, **more: Any) -> list[Any]:
    async with server.session.post(server.url + "/v1/responses", json=REQUEST | more | {"stream": True}) as response:
        assert response.status == 200
        text = (await response.read()).decode()
    return [json.loads(block.partition("data: ")[2]) for block in text.split("\n\n") if block]


async def test_reasoning_is_an_item_of_its_own_and_its_tokens_are_counted(server: Running) -> None:
    answer = await ask(server)
    reasoning, message = answer["output"]
    assert (reasoning["type"], reasoning["status"], message["type"]) == ("reasoning", "completed", "message")
    (thought,), (said,) = reasoning["content"], message["content"]
    assert thought["type"] == "reasoning_text"
    assert thought["text"]
    assert "think>" not in thought["text"] + said["text"][:8]
    _, prompt, _ = await server.post(
        {"messages": [{"role": "user", "content": "a loop"}], "chat_template_kwargs": {"enable_thinking": True}},
        "/tokenize",
    )
    plain = {"prompt": prompt["tokens"], "max_tokens": 24, "temperature": 0, "logprobs": 0}
    _, raw, _ = await server.post(plain)
    tokens = raw["choices"][0]["logprobs"]["tokens"]
    count = tokens.index("</think>") + 1
    assert thought["text"] == "".join(tokens[: count - 1]).strip()
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": count}
    assert said["text"] == "".join(tokens[count:]).lstrip()


async def test_chats_count_the_tokens_of_reasoning_as_well(server: Running) -> None:
    counted = (await ask(server))["usage"]["output_tokens_details"]
    asked = {"messages": [{"role": "user", "content": "a loop"}], "max_tokens": 24, "temperature": 0}
    asked |= {"chat_template_kwargs": REQUEST["chat_template_kwargs"]}
    _, whole, _ = await server.post(asked, "/v1/chat/completions")
    assert whole["usage"]["completion_tokens_details"] == counted
    assert 0 < counted["reasoning_tokens"] < 24
    _, twice, _ = await server.post(asked | {"n": 2}, "/v1/chat/completions")
    assert twice["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * counted["reasoning_tokens"]}
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    usages = [event["usage"] for event in (await server.stream(asked | options, "/v1/chat/completions"))[1:-1]]
    assert usages[-1]["completion_tokens_details"] == counted
    so_far = [each["completion_tokens_details"]["reasoning_tokens"] for each in usages]
    assert so_far == sorted(so_far)
    _, formed, _ = await server.post(
        asked | {"chat_template_kwargs": {}, "guided_regex": "a{3}"}, "/v1/chat/completions"
    )
    assert formed["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_a_schema_waits_for_the_end_of_reasoning(server: Running) -> None:
    free, answer = await ask(server), await ask(server, text={"format": SCHEMA})
    assert answer["output"][0]["content"] == free["output"][0]["content"], "what is thought is as without a schema"
    assert json.loads(answer["output"][1]["content"][0]["text"]) in ("yes", "no")
    assert answer["status"] == "completed"


@pytest.mark.parametrize("more", [{}, {"text": {"format": SCHEMA}}, {"max_output_tokens": 3}])
async def test_what_is_streamed_is_what_comes_whole(server: Running, more: Body) -> None:
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 2} | more
    whole, events = await ask(server, **more), await stream(server, **more)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    ended = events[-1]["response"]
    strip = ("id", "created_at", "output")
    assert {k: v for k, v in ended.items() if k not in strip} == {k: v for k, v in whole.items() if k not in strip}
    contents = [(item["type"], item["status"], item["content"]) for item in whole["output"]]
    assert [(item["type"], item["status"], item["content"]) for item in ended["output"]] == contents
    items: list[Any] = []
    for event in events:  # as a client puts them together
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "content_part.added":
                items[event["output_index"]]["content"].append(event["part"])
            case "reasoning_text.delta" | "output_text.delta":
                item = items[event["output_index"]]
                assert item["id"] == event["item_id"]
                part = item["content"][event["content_index"]]
                part["text"] += event["delta"]
                if item["type"] == "message":
                    part["logprobs"] += event["logprobs"]
            case "output_item.done":
                items[event["output_index"]]["status"] = event["item"]["status"]
    assert items == ended["output"]
    assert len({item["id"] for item in items}) == len(items)
    if more.get("max_output_tokens") == 3:
        assert [item["type"] for item in items] == ["reasoning"]
        assert items[0]["status"] == "incomplete"
        assert ended["usage"]["output_tokens_details"]["reasoning_tokens"] == 3


async def test_log_probabilities_are_those_of_the_text(server: Running) -> None:
    answer = await ask(server, include=["message.output_text.logprobs"])
    (part,) = answer["output"][1]["content"]
    assert part["text"] == "".join(entry["token"] for entry in part["logprobs"]).lstrip()
    details = answer["usage"]["output_tokens_details"]
    assert len(part["logprobs"]) == answer["usage"]["output_tokens"] - details["reasoning_tokens"]
    assert all(entry["top_logprobs"] == [] for entry in part["logprobs"])
    answer = await ask(server, include=["message.output_text.logprobs"], top_logprobs=3)
    assert {len(entry["top_logprobs"]) for entry in answer["output"][1]["content"][0]["logprobs"]} == {3}
    assert (await ask(server))["output"][1]["content"][0]["logprobs"] == []


async def test_what_was_thought_can_be_sent_back(server: Running) -> None:
    first = await ask(server)
    after = [{"role": "user", "content": "a loop"}, *first["output"], {"role": "user", "content": "another"}]
    second = await ask(server, input=after)
    reasoning, message = (item["content"][0]["text"] for item in first["output"])
    said = [after[0], {"role": "assistant", "content": message, "reasoning_content": reasoning}, after[-1]]
    _, prompt, _ = await server.post({"messages": said, "chat_template_kwargs": {"enable_thinking": True}}, "/tokenize")
    assert second["usage"]["input_tokens"] == prompt["count"]


async def test_top_k_and_stop_are_taken(server: Running) -> None:
    plain: Body = {"chat_template_kwargs": {}}

    def said(answer: Any) -> tuple[str, str]:
        return answer["status"], answer["output"][0]["content"][0]["text"]

    whole = await ask(server, **plain)
    _, text = said(whole)
    assert said(await ask(server, **plain, top_k=1, temperature=5, seed=1)) == said(whole), "only the likeliest is left"
    stop = text[5:8]
    for given in (stop, ["never", stop]):
        assert said(await ask(server, **plain, stop=given)) == ("completed", text.partition(stop)[0])


async def test_sampling_is_that_of_chats(server: Running) -> None:
    """vLLM's responses have these fields, too."""
    drawn: Body = {"temperature": 1.5, "seed": 3}
    chat = {"messages": [{"role": "user", "content": REQUEST["input"]}], "max_tokens": REQUEST["max_output_tokens"]}

    async def said(**more: Any) -> tuple[str, str]:
        answer = await ask(server, chat_template_kwargs={}, **drawn, **more)
        _, other, _ = await server.post(chat | drawn | more, "/v1/chat/completions")
        return answer["output"][0]["content"][0]["text"], other["choices"][0]["message"]["content"]

    plain, _ = await said()
    _, tokens, _ = await server.post({"prompt": plain, "add_special_tokens": False}, "/tokenize")
    for name, value in (
        ("min_p", 0.9),
        ("presence_penalty", 2.0),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 3.0),
        ("logit_bias", {str(tokens["tokens"][0]): -100}),
    ):
        own, chats = await said(**{name: value})
        assert own == chats, name
        assert own != plain, name


async def test_sampling_that_openai_does_not_have_is_refused(server: Running) -> None:
    """But for what the page says is taken."""
    for field, value, says in (
        ("top_k", -2, "top_k = -2 must be greater than or equal to -1."),
        ("min_p", 2, "min_p = 2 must be less than or equal to 1."),
        ("stop", [""], "1 to 256 characters"),
        ("stop", ["x"] * 17, "at most 16"),
        *((name, 1, f"The field {name!r} is not known.") for name in REFUSED),
    ):
        status, answer, _ = await server.post({"input": "x", field: value}, "/v1/responses")
        assert (status, answer["error"]["param"]) == (400, field), answer
        assert says in answer["error"]["message"]


class Pieces:
    """Tokens by their texts."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def bytes(self, token_id: int) -> list[int]:
        return list(self._texts[token_id].encode())


@pytest.mark.parametrize(
    ("within", "texts", "thought"),
    [
        (True, ["a", "</think>", "b"], [1, 1, 0]),
        (True, ["a</thi", "nk", "> b", "c"], [1, 1, 1, 0]),
        (False, ["\n", "<think>", "a", "</think>", "b"], [0, 1, 1, 1, 0]),
        (False, ["a", "b</think>"], [0, 0]),
        (True, ["é", "</", "x", "</think", ">", "</think>"], [1, 1, 1, 1, 1, 0]),
    ],
)
def test_tokens_of_reasoning_however_they_cut_its_tags(within: bool, texts: list[str], thought: list[int]) -> None:
    thoughts = Thoughts(Pieces(*texts), ReasoningTags("<think>", "</think>"), within)  # type: ignore[arg-type]
    assert [thoughts.push(i) for i in range(len(texts))] == list(map(bool, thought))
    assert thoughts.count == sum(thought)
