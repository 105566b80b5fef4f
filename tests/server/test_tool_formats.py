"""Plugins' formats of tool calls and reasoning are found and used, and do no harm to others if they fail."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from tests.core.text.test_tool_families import FAMILIES, TOOLS, written
from tests.serving import TEMPLATE, chatty, running, thinker

from infer import LLM, PLUGIN_API, PluginError, hookimpl
from infer.contracts.registration import Registration
from infer.contracts.sections import Settings
from infer.contracts.text import (
    Piece,
    ReasoningFactory,
    ReasoningTags,
    ToolFormatFactory,
    ToolFormatRegistration,
    Tools,
)
from infer.plugins.discovery import Plugins
from infer.text.tool_formats.reader import Marks, Reader, Steps, prose, scripted, up_to

MARKS = Marks("«")
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": [LOOK], "max_tokens": 60}
CHAT = "/v1/chat/completions"


def quills(reader: Reader, tools: Tools) -> Steps[None]:
    """``«name|{...}»`` is a call."""
    while (yield from prose(reader, MARKS)) is not None:
        reader.take(1)
        inside = yield from up_to(reader, "»", 512)
        name, _, arguments = (inside or "").partition("|")
        if name in tools:
            yield Piece("call", name)
            yield Piece("arguments", arguments)
        else:
            yield reader.content("«" if inside is None else f"«{inside}»")


class Stranger:
    """A plugin that brings formats."""

    INFER_PLUGIN_API = PLUGIN_API

    def __init__(self, *formats: Registration[ToolFormatFactory]) -> None:
        self.formats: list[Any] = list(formats)

    @hookimpl
    def infer_tool_formats(self) -> list[ToolFormatRegistration]:
        return self.formats


class Odd:
    """Gives what it was made with, whatever it is, and raises it where it can be raised."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def push(self, text: str) -> Iterator[Piece]:
        if isinstance(self.given, Exception):
            raise self.given
        yield self.given

    def flush(self) -> Iterator[Piece]:
        yield from ()


def odd(given: object, priority: int = 50) -> ToolFormatRegistration:
    make: Callable[..., Any] = lambda tools, settings: Odd(given)  # noqa: E731
    return ToolFormatRegistration("odd", make, "a test's", priority=priority)


QUILLS = ToolFormatRegistration("quills", scripted(quills), "calls in guillemets", marks=("«",))


def quilled(folder: Path, **model: Any) -> dict[str, Any]:
    """The section ``model`` of a server whose template writes calls in guillemets."""
    section = chatty(folder, **model)
    Path(section["chat_template"]).write_text(
        TEMPLATE.replace(
            "<tool_call>{{ call.function | tojson }}</tool_call>",
            "«{{ call.function.name }}|{{ call.function.arguments | tojson }}»",
        )
    )
    return section


async def test_a_strangers_format_is_found_by_what_the_template_writes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Though one with a higher priority fails, and whether the answer comes whole or streamed."""
    written = 'Well. «look|{"at": "«"}»'
    body = BODY | {"structured_outputs": {"choice": [written]}}
    with caplog.at_level(logging.INFO):
        async with running([Stranger(QUILLS, odd(KeyError("lost")))], model=quilled(tmp_path)) as server:
            _, answer, _ = await server.post(body, CHAT)
            *events, _ = await server.stream(body, CHAT)
    assert "tool calls are read as model.tool_format = quills" in caplog.text
    assert (
        "auto passes over odd: The tool_format plugin 'odd' of Stranger cannot read an answer: KeyError" in caplog.text
    )
    message = answer["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (message["content"], call["function"]) == ("Well. ", {"name": "look", "arguments": '{"at": "«"}'})
    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["name"] for call in calls if "name" in call] == ["look"]
    assert "".join(call["arguments"] for call in calls) == '{"at": "«"}'


@pytest.mark.parametrize("name", ["GLM 4.5", "Gemma 4"])
async def test_a_familys_calls_reach_the_client(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whole and streamed, and a call that is forced as well, which is JSON whatever the family's own way."""
    (tmp_path / "t.jinja").write_text(FAMILIES[name].template)
    arguments = {"city": 'Rome "IT"\nä', "n": 3}
    text = written(FAMILIES[name].template, [("weather", arguments)], "Well. ")
    body = BODY | {"tools": [tool for tool in TOOLS if tool["function"]["name"] == "weather"], "max_tokens": 400}
    with caplog.at_level(logging.INFO):
        async with running(model={"path": "demo", "chat_template": str(tmp_path / "t.jinja")}) as server:
            asked = body | {"structured_outputs": {"choice": [text]}}
            _, answer, _ = await server.post(asked, CHAT)
            *events, _ = await server.stream(asked, CHAT)
            _, must, _ = await server.post(body | {"tool_choice": "required"}, CHAT)
    assert f"tool calls are read as model.tool_format = {FAMILIES[name].format}" in caplog.text
    message = answer["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (message["content"].strip(), call["function"]["name"]) == ("Well.", "weather")
    assert json.loads(call["function"]["arguments"]) == arguments
    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert json.loads("".join(call["arguments"] for call in calls)) == arguments
    assert must["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (KeyError("lost"), "KeyError: 'lost'"),
        (("call", "look"), "it gave a tuple, not a Piece"),
        (Piece("thought", "hm"), "it gave a Piece, not a Piece of a known kind"),  # type: ignore[arg-type]
        (Piece("arguments", "{}"), "arguments before a call"),
    ],
    ids=["raises", "tuple", "kind", "order"],
)
async def test_a_format_that_fails_names_itself_and_ends_its_answers_only(
    tmp_path: Path, given: object, says: str
) -> None:
    async with running([Stranger(odd(given))], model=chatty(tmp_path, tool_format="odd")) as server:
        status, answer, _ = await server.post(BODY, CHAT)
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert "The tool_format plugin 'odd' of Stranger cannot read an answer" in answer["error"]["message"]
        assert says in answer["error"]["message"]
        *_, error, done = await server.stream(BODY, CHAT)
        assert says in error["error"]["message"]
        assert done == "[DONE]"
        assert (await server.post({key: BODY[key] for key in ("messages", "max_tokens")}, CHAT))[0] == 200


def names(plugins: Plugins, tool_format: str) -> list[str]:
    found = plugins.candidates("tool_format", Settings(model={"tool_format": tool_format}))
    return [offer.name for offer in found]


def test_a_format_is_named_or_all_are_tried_by_priority(caplog: pytest.LogCaptureFixture) -> None:
    own = Plugins.discover()
    assert names(own, "auto") == [
        *(
            "action",
            "deepseek",
            "dsml",
            "gemma",
            "glm",
            "harmony",
            "kimi",
            "kimi3",
            "minicpm",
            "minimax",
            "mistral",
            "solar",
        ),
        *("tags", "xml", "python", "json"),
    ]
    assert (names(own, "xml"), names(own, "none")) == (["xml"], [])
    with pytest.raises(PluginError, match=r"model.tool_format is 'tgas', .* xml\. Did you mean 'tags'\?"):
        names(own, "tgas")
    both = Plugins.discover([Stranger(QUILLS, odd(None)), Stranger(QUILLS)])
    assert names(both, "auto")[0] == "odd"
    assert "quills" not in names(both, "auto")
    assert "auto passes over quills of Stranger: Stranger and Stranger both offer 'quills'" in caplog.text
    with pytest.raises(PluginError, match=r"both offer 'quills' for model\.tool_format"):
        names(both, "quills")


class Muse:
    """A plugin that brings ways to write reasoning, one of them broken."""

    INFER_PLUGIN_API = PLUGIN_API

    @hookimpl
    def infer_reasoning_formats(self) -> list[Registration[ReasoningFactory]]:
        broken: Any = lambda settings: "[MUSE]"  # noqa: E731
        return [
            Registration("muse", lambda settings: ReasoningTags("<think>", "[/MUSE]"), "a test's"),
            Registration("broken", broken, "makes no tags", priority=9),
        ]


async def test_without_any_format_calls_are_forced_or_refused_and_the_package_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where infer-core is installed without infer-tool-formats."""
    discover, others = Plugins.discover, [each for each in entry_points(group="infer") if each.name != "tool_formats"]
    monkeypatch.setattr(Plugins, "discover", lambda extra=(): discover(extra, installed=others))
    async with running(model=chatty(tmp_path)) as server:
        status, refused, _ = await server.post(BODY, CHAT)
        _, forced, _ = await server.post(BODY | {"tool_choice": "required", "parallel_tool_calls": False}, CHAT)
    assert (status, refused["error"]["param"]) == (400, "tools")
    assert "This server has no format of tool calls; install infer-tool-formats" in refused["error"]["message"]
    (call,) = forced["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    brings = "pip install -r dist/infer-tool-formats.txt brings some"
    assert f"has none of the known formats (none is installed); {brings}" in caplog.text
    assert f"model.reasoning: auto finds no format installed, so reasoning is not told from the text; {brings}" in (
        caplog.text
    )
    for setting in ("tool_format", "reasoning"):
        with pytest.raises(PluginError, match=rf"model\.{setting} is 'harmony', .* none is installed\. Install it"):
            LLM("demo", model={setting: "harmony"})


@pytest.mark.parametrize("setting", ["auto", "muse"])
async def test_a_strangers_reasoning_is_told_apart(
    tmp_path: Path, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By the template or by name, though another's cannot be made: in the text, in usage and before a form."""
    model = thinker(tmp_path) | {"reasoning": setting}
    for name in ("tokenizer.json", "template.jinja"):
        file = tmp_path / name
        file.write_text(file.read_text().replace("</think>", "[/MUSE]"))
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
    asked = {"input": "a loop", "max_output_tokens": 24, "temperature": 0} | kwargs
    async with running([Muse()], model=model, engine={"max_seq_len": 256}) as server:
        _, answer, _ = await server.post(asked, "/v1/responses")
        _, prompt, _ = await server.post({"messages": [{"role": "user", "content": "a loop"}]} | kwargs, "/tokenize")
        plain = {"prompt": prompt["tokens"], "max_tokens": 24, "temperature": 0, "logprobs": 0}
        _, raw, _ = await server.post(plain)
    tokens = raw["choices"][0]["logprobs"]["tokens"]
    count = tokens.index("[/MUSE]") + 1
    reasoning, message = answer["output"]
    assert reasoning["content"][0]["text"] == "".join(tokens[: count - 1]).strip()
    assert message["content"][0]["text"] == "".join(tokens[count:]).lstrip()
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": count}
    assert "'broken' of Muse cannot be used: TypeError: its factory made no ReasoningTags" in caplog.text


def test_reasoning_that_is_asked_for_has_to_be_there() -> None:
    for name, says in (("broken", "made no ReasoningTags"), ("mose", r"Did you mean 'muse'\?")):
        with pytest.raises(PluginError, match=says):
            LLM("demo", plugins=[Muse()], model={"reasoning": name})


@pytest.mark.parametrize(("setting", "expected"), [("auto", "muse"), ("none", None), ("think", "think")])
def test_the_setting_decides_whether_a_model_reasons(tmp_path: Path, setting: str, expected: str | None) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages }}[/MUSE]")
    model = {"chat_template": str(tmp_path / "t.jinja"), "reasoning": setting}
    with LLM("demo", plugins=[Muse()], model=model) as llm:
        tags = {"muse": ReasoningTags("<think>", "[/MUSE]"), "think": ReasoningTags("<think>", "</think>"), None: None}
        assert llm.served.reasoning == tags[expected]
