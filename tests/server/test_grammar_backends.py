"""Grammar backends are found and used, and what one lacks is said."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field
from tests.serving import chatty, running

from infer import LLM, PLUGIN_API, PluginError, RequestError, SamplingParams, hookimpl
from infer.commands.cli import main
from infer.contracts.grammar import Checked, Fault, GrammarBackendFactory, GrammarBackendProtocol, Vocabulary
from infer.contracts.params import CallOutputs, StructuredOutputs, ToolGrammar
from infer.contracts.registration import Registration
from infer.plugins.discovery import Plugins
from infer.text.grammars import Grammars, order, told, worker

CHAT = "/v1/chat/completions"
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60}


class OwnSettings(BaseModel):
    most: int = Field(3, description="how long choices may be")


class Choosy:
    """Takes choices of few characters, and makes no grammar of them."""

    def __init__(self, vocabulary: Vocabulary, settings: OwnSettings) -> None:
        self.size, self.most = len(vocabulary.tokenizer()), settings.most

    def source(self, outputs: StructuredOutputs) -> str:
        if outputs.choice is None:
            raise ValueError("Choosy knows choices alone")
        return " ".join(outputs.choice)

    def prepare(self) -> None:
        pass

    def check(self, source: str) -> Checked:
        fault = Fault(f"{source!r} is longer than {self.most}") if len(source) > self.most else None
        return Checked(str(self.size), fault, 17)

    def make(self, source: str, checked: Checked) -> Any:
        raise AssertionError("nothing is made")


class Stranger:
    INFER_PLUGIN_API = PLUGIN_API

    def __init__(self, factory: GrammarBackendFactory, settings: type[BaseModel] = OwnSettings) -> None:
        self.made = Registration("choosy", factory, "a test's", settings, priority=9)

    @hookimpl
    def infer_grammar_backends(self) -> list[Registration[GrammarBackendFactory]]:
        return [self.made]


async def test_without_a_backend_what_needs_a_grammar_is_refused_and_the_package_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where infer-core is installed without infer-llguidance."""
    discover, others = Plugins.discover, [each for each in entry_points(group="infer") if each.name != "llguidance"]
    monkeypatch.setattr(Plugins, "discover", lambda extra=(): discover(extra, installed=others))
    async with running(model=chatty(tmp_path)) as server:
        assert (await server.post(BODY, CHAT))[0] == 200
        for more, param in (
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"tools": [LOOK], "tool_choice": "required"}, "tools"),
        ):
            status, refused, _ = await server.post(BODY | more, CHAT)
            assert (status, refused["error"]["param"]) == (400, param)
            message = "This server has no backend for structured output; install infer-llguidance there."
            assert refused["error"]["message"] == message
    brings = "pip install -r dist/infer-llguidance.txt brings one"
    assert f"auto finds none installed, so structured output is refused; {brings}" in caplog.text
    assert main(["plugins", "--model.path", "demo"]) == 0, "a server can do without"
    with pytest.raises(PluginError, match=r"engine\.grammar_backend is 'llguidance', .* none is installed\. Install"):
        LLM("demo", engine={"grammar_backend": "llguidance"})


def test_a_strangers_backend_is_used_with_its_own_settings() -> None:
    with LLM("demo", plugins=[Stranger(Choosy)], engine={"choosy": {"most": 5}}) as llm:
        for outputs, says in (
            ({"regex": "a"}, "cannot be compiled: Choosy knows choices alone."),
            ({"choice": ["a", "bcde"]}, "cannot be compiled: 'a bcde' is longer than 5."),
        ):
            with pytest.raises(RequestError, match=says):
                llm.generate("x", SamplingParams(structured_outputs=StructuredOutputs.model_validate(outputs)))


def test_a_child_process_makes_the_same_backend() -> None:
    """With the settings that it was made with, though their class is stricter than the plugin's own."""

    class Strict(OwnSettings, extra="forbid"):
        pass

    answer = worker(order(Choosy, Strict(most=2), Vocabulary(lambda: "{}", 9, [0]))())
    assert told(answer(b"ab")) == Checked("2", None, 17)
    assert told(answer(b"abc")) == Checked("2", Fault("'abc' is longer than 2"), 17)


@pytest.mark.parametrize("kind", ["lambda", "local"])
def test_a_factory_that_no_child_could_import_is_named(kind: str) -> None:
    def local(vocabulary: Vocabulary, settings: Any) -> GrammarBackendProtocol:
        return Choosy(vocabulary, settings)

    made: GrammarBackendFactory = local if kind == "local" else lambda *given: local(*given)
    with pytest.raises(PluginError, match=r"grammar plugin 'choosy' of Stranger cannot be used: .*child process could"):
        LLM("demo", plugins=[Stranger(made)])


def test_a_fault_names_where_it_is() -> None:
    grammars = Grammars(None, lacking="There is none.")
    with pytest.raises(RequestError, match=r"^There is none\.$"):
        grammars.compile(StructuredOutputs(regex="a"))
    error = grammars.refuse("x", Fault("The tool is wrong.", "tools[3]"))
    assert (str(error), error.param) == ("The tool is wrong.", "tools[3]")


def test_what_calls_tools_is_no_format_of_a_clients_and_passes_as_it_is() -> None:
    """Parameters check it as they check what clients give."""
    tool = ToolGrammar("look", "regex", "a", "tools[0]")
    outputs = CallOutputs(kind="free", tools=(tool,), functions=(("x", {}),), single=True, opened=True)
    assert SamplingParams(structured_outputs=outputs).structured_outputs == outputs
    with pytest.raises(ValueError, match="exactly one"):
        SamplingParams(structured_outputs=StructuredOutputs.model_construct())
