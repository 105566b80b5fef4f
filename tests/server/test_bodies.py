"""Which bodies are accepted, and what the errors say of the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bodies import USER, WRONG, check_nulls, check_refusal, places, refusal
from tests.examples import examples

from infer.errors import RequestError
from infer_agents.message_bodies import MessagesRequest
from infer_agents.response_bodies import ResponsesRequest
from infer_agents.seal import Seal
from infer_server.endpoints.chat_completions import ChatRequest
from infer_server.endpoints.completions import CompletionRequest
from infer_server.endpoints.tokenization import DetokenizeRequest, TokenizeRequest
from infer_server.http.body import Body
from infer_server.http.parsing import parse
from infer_server.tools import FunctionTool

TOOL = {"type": "function", "name": "f"}
SPACE = {"type": "namespace", "name": "n", "description": "a few", "tools": [TOOL]}
SEALED = Seal(b"key").seal("hm")
SCHEMA = {"type": "object", "properties": {"a": {"enum": [None, 1], "default": None}}}
CALL = {
    "id": "c",
    "type": "function",
    "index": 0,
    "function": {"name": "f", "arguments": '{"a": 1}', "parsed_arguments": {"a": 1}},
}
ANSWERED: dict[str, Any] = {
    "role": "assistant",
    "content": [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "refusal", "refusal": "b"},
    ],
    "tool_calls": [CALL],
    "reasoning_content": "r",
    "annotations": [{"type": "url_citation"}],
    "thinking_blocks": [{"type": "thinking", "thinking": "r", "signature": "s"}],
    "provider_specific_fields": {"refusal": None, "citations": []},
    "refusal": None,
    "parsed": {"a": 1},
}
SAMPLING = {
    "model": "demo",
    "n": 1,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": False, "include_obfuscation": False},
    "temperature": 0.5,
    "top_k": 3,
    "seed": 4,
    "stop": ["a", "b"],
    "stop_token_ids": [1],
    "logit_bias": {"3": 1.5},
    "user": "u",
}
BODIES: list[tuple[type[Body], dict[str, Any]]] = [
    (
        ChatRequest,
        SAMPLING
        | {
            "messages": [USER, ANSWERED, {"role": "tool", "tool_call_id": "c", "content": "y", "name": "f"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "logprobs": True,
            "top_logprobs": 2,
            "chat_template_kwargs": {"a": None},
        },
    ),
    (
        ChatRequest,
        {
            "messages": [USER],
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        },
    ),
    (
        ChatRequest,
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "d", "type": "custom", "custom": {"name": "g", "input": "i"}}],
                },
                {"role": "tool", "tool_call_id": "d", "content": "y"},
            ],
            "tools": [
                {"type": "custom", "custom": {"name": "g", "description": "d", "format": {"type": "text"}}},
                {"type": "function", "function": {"name": "f"}},
            ],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "g"}}]},
            },
            "metadata": {"a": "b"},
            "reasoning_effort": "low",
        },
    ),
    (CompletionRequest, SAMPLING | {"prompt": [[1, 2], "b"], "structured_outputs": {"json": SCHEMA}}),
    (CompletionRequest, {"prompt": [1, 2], "guided_choice": ["a"], "max_tokens": 3}),
    (
        ResponsesRequest,
        {
            "input": [
                {"role": "developer", "content": "be brief"},
                USER | {"type": "message", "id": "m", "status": "completed"},
                {
                    "type": "reasoning",
                    "id": "r",
                    "status": "completed",
                    "summary": [{"type": "summary_text", "text": "s"}],
                    "content": [{"type": "reasoning_text", "text": "t"}],
                },
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [
                        {"type": "output_text", "text": "a", "logprobs": [{}], "annotations": [], "parsed": {}}
                    ],
                },
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc"},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
                {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "free text"},
                {"type": "custom_tool_call_output", "call_id": "d", "output": "p"},
            ],
            "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
            "include": ["message.output_text.logprobs"],
            "metadata": {"a": "b"},
            "stream_options": {"include_obfuscation": False},
        },
    ),
    (
        MessagesRequest,
        {
            "model": "demo",
            "max_tokens": 5,
            "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                USER,
                {"role": "system", "content": [{"type": "text", "text": "now"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": ""},
                        {"type": "redacted_thinking", "data": "d"},
                        {"type": "text", "text": "a"},
                        {"type": "server_tool_use", "id": "s", "name": "web_search"},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "content": [{"type": "text", "text": "o"}, {"type": "tool_reference", "tool_name": "f"}],
                            "is_error": True,
                        },
                        {"type": "text", "text": "b"},
                    ],
                },
            ],
            "tools": [
                {"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True, "defer_loading": False},
                {"type": "web_search_20250305", "name": "web_search"},
            ],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "stream": True,
            "temperature": 0.5,
            "stop_sequences": ["x"],
            "metadata": {"user_id": "u"},
            "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "summarized"},
            "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
            "context_management": {"edits": [None]},
            "service_tier": "auto",
            "mcp_servers": [],
        },
    ),
    (TokenizeRequest, {"messages": [USER], "add_special_tokens": True}),
    (
        ResponsesRequest,
        {
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": "be brief"}], "id": "m"},
                {"type": "reasoning", "summary": [], "encrypted_content": SEALED},
                {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "o", "name": "f", "namespace": "n"},
                {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search"}},
                {"type": "local_shell_call", "call_id": "s", "action": {"type": "exec"}},
                {"type": "local_shell_call_output", "call_id": "s", "output": "p"},
                {"type": "additional_tools", "role": "developer", "tools": []},
                {"type": "tool_search_output", "tools": []},
                {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            ],
            "instructions": "go on",
            "tools": [
                TOOL | {"parameters": SCHEMA, "strict": False, "description": "d", "defer_loading": True},
                {"type": "custom", "name": "g", "description": "d", "format": {"type": "text"}},
                {"type": "custom", "name": "h", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}},
                SPACE,
                {"type": "web_search_preview", "search_context_size": "low"},
                {"type": "image_generation", "output_format": "png"},
                {"type": "local_shell"},
            ],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [
                    {"type": "function", "name": "f", "namespace": "n"},
                    {"type": "custom", "name": "h"},
                    {"type": "web_search_preview"},
                ],
            },
            "reasoning": {"effort": "high", "summary": "auto", "generate_summary": "concise"},
            "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
            "text": {"verbosity": "low"},
            "store": True,
            "parallel_tool_calls": True,
            "max_tool_calls": 4,
            "prompt_cache_key": "k",
            "prompt_cache_retention": "24h",
            "client_metadata": {"a": {"b": 1}},
            "service_tier": "priority",
            "context_management": [{"type": "compaction", "compact_threshold": 9}],
            "truncation": "disabled",
            "stream": True,
        },
    ),
    (
        ResponsesRequest,
        {
            "input": [],
            "tools": [{"type": "custom", "name": "g"}],
            "tool_choice": {"type": "custom", "name": "g"},
        },
    ),
    (DetokenizeRequest, {"tokens": [1, 2]}),
]
PLACES = [(i, path) for i, (_, body) in enumerate(BODIES) for path in places(body)]


@pytest.mark.parametrize(("model", "body"), BODIES)
def test_all_of_it_is_taken(model: type[Body], body: dict[str, Any]) -> None:
    assert refusal(model, body) is None


@settings(max_examples=examples(400, 100))
@given(place=st.sampled_from(PLACES), value=WRONG, sibling=st.booleans())
def test_a_refusal_names_a_field_on_the_way_to_what_is_wrong(
    place: tuple[int, tuple[int | str, ...]], value: Any, sibling: bool
) -> None:
    index, path = place
    model, body = BODIES[index]
    check_refusal(model, body, path, value, sibling)


@pytest.mark.parametrize(
    ("model", "body", "param", "message"),
    [
        (ChatRequest, {"messages": [USER], "Temperature": 0}, "Temperature", "Did you mean 'temperature'?"),
        (
            ChatRequest,
            {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "Strict": True}}]},
            "tools[0].function.Strict",
            "Did you mean 'strict'?",
        ),
        (
            ChatRequest,
            {"messages": [USER | {"content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "'text'",
        ),
        (ChatRequest, {"messages": [USER | {"content": [{"text": "x"}]}]}, "messages[0].content[0].type", "missing"),
        (ChatRequest, {"messages": [USER | {"content": [5]}]}, "messages[0].content[0]", "object"),
        (ChatRequest, {"messages": [USER | {"content": {"str": 5}}]}, "messages[0].content", "valid string"),
        (ChatRequest, {"messages": [USER | {"role": None}]}, "messages[0].role", "missing"),
        (ChatRequest, {"messages": [USER], "logit_bias": {"x": 1}}, "logit_bias.x", "integer"),
        (
            ChatRequest,
            {"messages": [USER], "response_format": {"type": "json_schema"}},
            "response_format",
            "the type json_schema needs json_schema",
        ),
        (
            ResponsesRequest,
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "s"}}},
            "text.format",
            "the type json_schema needs schema",
        ),
        (
            ResponsesRequest,
            {"input": "x", "text": {"format": {"schema": {"type": "object"}}}},
            "text.format",
            "schema goes with the type json_schema, and the type is text",
        ),
        (ResponsesRequest, {"input": "x", "tools": [{"type": "function"}]}, "tools[0].name", "missing"),
        (ResponsesRequest, {"input": "x", "tools": [{"type": "fuction"}]}, "tools[0].type", "'namespace'"),
        (ResponsesRequest, {"input": "x", "tools": [TOOL, TOOL]}, "tools", "two tools named 'f'; rename one"),
        (ResponsesRequest, {"input": "x", "tools": [TOOL | {"name": "n__f"}, SPACE]}, "tools", "named 'n__f'"),
        (
            ResponsesRequest,
            {"input": "x", "tools": [SPACE | {"name": f"n{i}", "tools": [TOOL] * 128} for i in range(9)]},
            "tools",
            "holds 1152 tools",
        ),
        (ResponsesRequest, {"input": "x", "tool_choice": "required"}, "tool_choice", "tools has none"),
        (
            ResponsesRequest,
            {"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"},
            "tool_choice",
            "tools has none that the model can be shown",
        ),
        (
            ResponsesRequest,
            {"input": "x", "tools": [TOOL], "tool_choice": {"type": "custom", "name": "f"}},
            "tool_choice",
            "names 'f', which is not among tools",
        ),
        (
            ResponsesRequest,
            {"input": "x", "tools": [SPACE], "tool_choice": {"type": "function", "name": "f", "namespace": "m"}},
            "tool_choice",
            "names 'f', which is not among tools",
        ),
        (
            ResponsesRequest,
            {"input": "x", "tool_choice": {"type": "web_search"}},
            "tool_choice.type",
            "'allowed_tools'",
        ),
        (
            ResponsesRequest,
            {
                "input": "x",
                "tools": [TOOL, {"type": "web_search"}],
                "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
            },
            "tool_choice",
            "asks for a tool",
        ),
        (
            ResponsesRequest,
            {"input": "x", "tools": [TOOL], "tool_choice": "required", "text": {"format": {"type": "json_object"}}},
            "tool_choice",
            "cannot be combined with another text.format",
        ),
        (ResponsesRequest, {"input": "x", "text": {"verbosity": "loud"}}, "text.verbosity", "'medium'"),
        (ResponsesRequest, {"input": "x", "conversation": {"id": "c"}}, "conversation", "use previous_response_id"),
        (ResponsesRequest, {"input": "x", "background": True, "stream": True}, "background", "leave one out"),
        (ResponsesRequest, {"input": "x", "background": True, "store": False}, "background", "leave store = false out"),
        (ResponsesRequest, {"input": "x", "truncation": "auto"}, "truncation", "'disabled' is"),
        (ResponsesRequest, {"input": "x", "include": ["reasoning"]}, "include[0]", "'reasoning.encrypted_content'"),
        (
            ResponsesRequest,
            {"input": [{"type": "reasoning", "encrypted_content": "?"}]},
            "input[0].encrypted_content",
            "not a sealed text",
        ),
        (ResponsesRequest, {"input": [{"role": "usr", "content": ""}]}, "input[0].role", "'developer'"),
        (ResponsesRequest, {"input": [{"type": "compaction"}]}, "input[0].type", "'reasoning'"),
        (
            ResponsesRequest,
            {"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]},
            "input",
            "input[0]: the output for call_id 'c' has no call",
        ),
        (MessagesRequest, {"messages": [USER | {"role": "robot"}]}, "messages[0].role", "'user'"),
        (MessagesRequest, {"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
        (
            MessagesRequest,
            {"messages": [USER | {"content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
            "'text'",
        ),
        (MessagesRequest, {"messages": [USER], "tools": [{"name": "f"}]}, "tools[0].input_schema", "missing"),
        (MessagesRequest, {"messages": [USER], "tools": [{"type": 5}]}, "tools[0].type", "string"),
        (MessagesRequest, {"messages": [USER], "mcp_servers": [{}]}, "mcp_servers", "leave it out"),
        (MessagesRequest, {"messages": [USER], "max_tokes": 3}, "max_tokes", "Did you mean 'max_tokens'?"),
        (MessagesRequest, {"messages": [USER], "tool_choice": {"type": "any"}}, "tool_choice", "tools has none"),
    ],
)
def test_a_refusal_names_the_field(model: type[Body], body: dict[str, Any], param: str, message: str) -> None:
    error = refusal(model, body)
    assert error is not None
    assert error.param == param, str(error)
    assert message in str(error)


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("reasoning_effort", ""),  # response_format is a known one
        ("top_a", ""),
        ("max_token", " Did you mean 'max_tokens'?"),
        ("Top_P", " Did you mean 'top_p'?"),
    ],
)
def test_only_a_field_of_much_the_same_name_is_suggested(field: str, hint: str) -> None:
    error = refusal(CompletionRequest, {"prompt": "a", field: 1})
    assert str(error) == f"The field '{field}' is not known.{hint}"


@pytest.mark.parametrize("index", range(len(BODIES)))
def test_a_null_counts_as_not_given_wherever_a_field_may_be_left_out(index: int) -> None:
    """Of each optional field at each depth: the request is the one without it."""
    model, body = BODIES[index]
    tried = check_nulls(model, body)
    assert tried or model is DetokenizeRequest, "or nothing was tried"


def test_nulls_say_something_in_schemas_and_of_max_tokens() -> None:
    chat = parse(json.dumps(BODIES[0][1]).encode(), ChatRequest)
    assert chat.tools is not None
    assert isinstance(chat.tools[0], FunctionTool)
    assert chat.tools[0].function.parameters == SCHEMA
    assert chat.chat_template_kwargs == {"a": None}
    assert parse(b'{"prompt": "x"}', CompletionRequest).max_tokens == 16
    assert parse(b'{"prompt": "x", "max_tokens": null, "temperature": null}', CompletionRequest).max_tokens is None


@pytest.mark.parametrize(
    "body",
    [
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "DEEP"}}]}
            ]
        },
        {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "DEEP"}}]},
        {"messages": [USER], "chat_template_kwargs": {"a": "BARE"}},
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": "BARE"}}}]},
    ],
)
def test_brackets_without_end_are_refused(body: dict[str, Any]) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    sent = json.dumps(body).replace("DEEP", deep).replace('"BARE"', deep)
    with pytest.raises(RequestError, match=r"nested too deeply|recursion limit") as caught:
        parse(sent.encode(), ChatRequest)
    assert len(str(caught.value)) < 500
    if "DEEP" in json.dumps(body):
        assert str(caught.value.param).endswith("function.arguments") or "function_call.arguments" in str(
            caught.value.param
        )


def test_arguments_that_are_no_json_stay_as_they_are() -> None:
    def arguments(text: str) -> Any:
        call = {"id": "c", "function": {"name": "f", "arguments": text}}
        asked = parse(json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]}).encode(), ChatRequest)
        return asked.messages[0].plain()["tool_calls"][0]["function"]["arguments"]

    assert arguments('{"a": [1, null, "é"]}') == {"a": [1, None, "é"]}
    assert arguments('{"a": ') == '{"a": '
    assert arguments("") == {}


def test_items_are_messages() -> None:
    asked = parse(json.dumps(BODIES[5][1]).encode(), ResponsesRequest)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    custom = {"id": "d", "type": "function", "function": {"name": "g", "arguments": {"input": "free text"}}}
    assert json.loads(asked.turns) == [
        {"role": "developer", "content": "be brief"},
        USER,
        {"role": "assistant", "content": "a", "reasoning_content": "t", "tool_calls": [call]},
        {"role": "tool", "content": "o", "tool_call_id": "c"},
        {"role": "assistant", "content": None, "tool_calls": [custom]},
        {"role": "tool", "content": "p", "tool_call_id": "d"},
    ]


def test_what_a_message_says_is_heard_wherever_it_says_it() -> None:
    def plain(**message: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "assistant"} | message]}
        return parse(json.dumps(body).encode(), ChatRequest).messages[0].plain()

    assert plain(content=None, refusal="No.")["content"] == "No."
    assert plain(**ANSWERED)["content"] == "ab"
    assert plain(content="x", reasoning="r")["reasoning_content"] == "r"
    assert plain(function_call={"name": "f", "arguments": "{}"})["tool_calls"][0]["function"] == {
        "name": "f",
        "arguments": {},
    }
