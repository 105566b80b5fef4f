"""A server of infer's in this process, whose model answers conversations by a script.

This folder is on the path of pytest in a peer's checkout, whose own package is called ``tests``, so nothing here
imports from ours."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from infer.contracts.grammar import MatcherProtocol
from infer.contracts.params import SamplingParams
from infer.contracts.request import Request
from infer.engine import answer
from infer.engine.processors import Edit, LogitsProcessor
from infer_server.testing import Serving, serving

FOLDER = Path(os.environ.get("INFER_CONFORMANCE_MODEL", ""))
"""The checkpoint, which the runner has made: the demo's, with ChatML's tokens and a template."""
CONTEXT = 1 << 15
"""How many tokens it has room for."""
TURN, THOUGHT = "<|im_start|>assistant\n", "<think>\nLet me think.\n</think>\n\n"
WANTED, CLOSING = 2000.0, {'"': 1000.0, "}": 900.0, "]": 800.0, ",": 700.0, ":": 600.0}
"""What is added to the logits of the script's next token; and, where a grammar allows another one only, to those of
tokens that bring JSON to its end."""


def argument(schema: Any, text: str) -> Any:
    """A value that the schema allows: the simplest one, or for a string the first place in ``text``."""
    schema = schema if isinstance(schema, Mapping) else {}
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    if kind == "object" or "properties" in schema:
        return {name: argument(each, text) for name, each in schema.get("properties", {}).items()}
    if kind == "array":
        return [argument(schema.get("items"), text)]
    if kind in ("integer", "number"):
        return 1
    if kind == "boolean":
        return True
    names = re.findall(r"\b(?:in|for) ([A-Z][a-z]+)", text)
    return names[0] if names else "it"


def script(prompt: str) -> str | None:
    """What the model says to a prompt: after a user's message that shares a word with a tool's name, a call of it; the
    products that the conversation asks for; or what it has heard. None if the prompt is no conversation."""
    head, _, tail = prompt.rpartition(TURN)
    if not head:
        return None
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", head, flags=re.DOTALL)
    thinks = "<|thinks|>" in head
    begin = THOUGHT if thinks and not tail else THOUGHT.removeprefix("<think>\n")
    if "</think>" in tail or not ("<think>" in tail or thinks):  # it has been thought, or nothing is to be
        begin = ""
    role, said = turns[-1] if turns else ("user", "")
    if role == "user":
        tools = [json.loads(line) for line in re.findall(r'^\{"type".*\}$', head, flags=re.MULTILINE)]
        functions = [tool.get("function", tool) for tool in tools]
        words = set(re.findall(r"[a-z]{4,}", said.lower()))
        if named := [each for each in functions if words & set(re.findall(r"[a-z]{4,}", each["name"].lower()))]:
            call = {"name": named[0]["name"], "arguments": argument(named[0].get("parameters"), said)}
            return begin + f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    products = [str(int(a) * int(b)) for a, b in re.findall(r"(\d+) \* (\d+)", said)]
    heard = re.sub(r"<[^<>]*>", "", said).strip()  # tags would have a meaning in the answer
    return begin + " ".join(["I heard:", heard or "nothing", *products])


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


class Scripted(LogitsProcessor):
    """Also has the model say what the script wants, unless a grammar forbids it."""

    def __init__(self, request: Request, stops: Collection[int]) -> None:
        super().__init__(request, stops)
        said = None
        if request.pooling is None:
            said = script(tokenizer().decode(request.prompt_token_ids, skip_special_tokens=False))
        self._script: Sequence[int] | None = None
        if said is not None:
            self._script = (*tokenizer().encode(said, add_special_tokens=False).ids, ended())
        self._at = 0
        """The index of the script's next token; of its end, once the answer says anything else."""
        self._said: list[int] = []

    def _see(self, token: int) -> None:
        self._said.append(token)
        if self._script is not None:
            shut = tokenizer().token_to_id("</think>")
            if token == shut and shut in self._script:  # also where a budget shut the reasoning
                self._at = self._script.index(token)
            elif self._at < len(self._script) and token != self._script[self._at]:
                self._at = len(self._script) - 2
            self._at += 1
        super()._see(token)

    def _edit(self, matcher: MatcherProtocol | None) -> Edit:
        wanted: dict[int, float] = {}
        if self._script is not None:
            if matcher is not None:
                wanted |= closing()
                if re.search(r'[:\[]\s*"$', tokenizer().decode(self._said[-4:], skip_special_tokens=False)):
                    wanted[letter()] = WANTED / 2 + 1  # no string is empty
            wanted[self._script[min(self._at, len(self._script) - 1)]] = WANTED
        rows = {self._place(token): bias for token, bias in wanted.items()}
        edit = super()._edit(matcher)
        bias_M = edit.bias_M.copy()
        for row, bias in rows.items():
            bias_M[row] += np.float32(bias)
        return edit._replace(bias_M=bias_M)


@functools.cache
def ended() -> int:
    """The token that ends a turn."""
    token = tokenizer().token_to_id("<|im_end|>")
    assert token is not None
    return token


@functools.cache
def letter() -> int:
    token = tokenizer().token_to_id("x")
    assert token is not None
    return token


@functools.cache
def closing() -> Mapping[int, float]:
    found = {tokenizer().token_to_id(text): bias for text, bias in CLOSING.items()}
    return {token: bias for token, bias in found.items() if token is not None}


def template(thinks: bool) -> Path:
    """The chat template, of a model that reasons or does not."""
    return FOLDER / ("thinks.jinja" if thinks else "template.jinja")


STARTED: dict[str, Serving] = {}
"""What runs, by its settings."""
RUNNING = contextlib.ExitStack()


def start(plugins: Sequence[object] = (), **sections: Any) -> Serving:
    """A server with these settings, which several tests share; it ends with the tests."""
    key = json.dumps(sections, sort_keys=True)
    if key not in STARTED:
        sections["kernels"] = {"threads": 1}
        STARTED[key] = RUNNING.enter_context(serving(str(FOLDER), plugins=plugins, **sections))
    return STARTED[key]


def follow_script() -> None:
    """From here on, the models of this process do."""
    SamplingParams.edits_logits = property(lambda self: True)  # type: ignore[assignment, method-assign]
    answer.LogitsProcessor = Scripted  # type: ignore[attr-defined]


class Reports:
    """Writes each test's outcome, and why it is none, to the runner's file."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid
        told = report.outcome != "passed" or report.when == "call"
        if told and self.found.get(name, ("passed",))[0] == "passed":
            self.found[name] = report.outcome, self._why(report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome != "passed":
            self.found[report.nodeid] = report.outcome, self._why(report)

    def pytest_sessionfinish(self) -> None:
        RUNNING.close()
        Path(os.environ["INFER_CONFORMANCE_REPORT"]).write_text(json.dumps(self.found))

    @staticmethod
    def _why(report: Any) -> str:
        why = report.longrepr
        if isinstance(why, tuple):
            return str(why[-1])
        crash = getattr(why, "reprcrash", None)
        return str(why if crash is None else f"{crash.message} ({Path(crash.path).name}:{crash.lineno})")
