"""Structured output on the demo model: the answer always conforms."""

from __future__ import annotations

import ctypes
import json
import random
import re
import sys
import time
import unicodedata
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from infer import LLM, RequestError, SamplingParams
from infer.contracts.grammar import MASK_SECONDS, Checked, Vocabulary
from infer.contracts.params import StructuredOutputs
from infer.engine.masks import Masks
from infer.text import grammars as kept
from infer.text.grammars import Grammars, error_of, vocabulary
from infer_llguidance.backend import Grammar, LLGuidance, Matcher

SCHEMAS = 500


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", kernels={"threads": 1}, engine={"max_batch_size": 32, "max_seq_len": 1024}) as made:
        yield made


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Of every kind, with a bound on everything that could go on for ever."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    match draw.choice(kinds + ["object", "array", "anyOf"] * 2 if depth < 3 else kinds):
        case "string":
            least = draw.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 9)}
        case "integer":
            least = draw.randint(-1000, 1000)
            return {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 10**6)}
        case "number":
            return {"type": "number", "enum": [draw.uniform(-9, 9), draw.randint(-9, 9), 1e-9]}
        case "enum":
            return {"enum": draw.sample(["a", "ä\n", 'q"', "", 1, 2.5, None, True, "longer than the others"], 4)}
        case "const":
            return {"const": draw.choice(["x", 17, None, {"a": [1]}])}
        case "pattern":
            return {
                "type": "string",
                "pattern": draw.choice([r"^[a-c]{2,5}$", r"^\d{3}-\d{2}$", r"^(ab|cd)+x$"]),
                "maxLength": 9,
            }
        case "format":
            return {"type": "string", "format": draw.choice(["date", "uuid", "ipv4"])}
        case "object":
            names = draw.sample(["id", "name", "größe", "a b", "x"], draw.randint(0, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(draw, depth + 1) for name in names},
                "required": [name for name in names if draw.random() < 0.6],
                "additionalProperties": False,
            }
        case "array":
            least = draw.randint(0, 2)
            items = random_schema(draw, depth + 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + draw.randint(0, 2)}
        case "anyOf":
            return {"anyOf": [random_schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]}
        case kind:
            return {"type": kind}


def test_what_random_schemas_ask_for_is_what_comes(llm: LLM) -> None:
    draw = random.Random(0)
    schemas = [random_schema(draw) for _ in range(SCHEMAS)]
    params = [
        SamplingParams(
            max_tokens=900, temperature=draw.choice([0.0, 0.7, 1.0, 1.5]), seed=i, structured_outputs={"json": schema}
        )
        for i, schema in enumerate(schemas)
    ]
    answers = llm.generate(["x = "] * SCHEMAS, params)
    for schema, answer in zip(schemas, answers, strict=True):
        assert answer.finish_reason == "stop", (schema, answer.text, answer.error)
        jsonschema.validate(json.loads(answer.text), schema)
    assert len({answer.text for answer in answers}) > SCHEMAS / 2


UPPER = "[" + "".join(c for c in map(chr, range(sys.maxunicode)) if unicodedata.category(c) == "Lu") + "]"
"""What ``re`` does not know as \\p{Lu}."""
REGEXES = [
    r"[a-f0-9]{4}(-[a-f0-9]{4}){2}",
    r"(yes|no|perhaps), (sir|madam)\.",
    r"\p{Lu}\w{3,8}",
    r"a{0,3}b?",
    r"[äöü€😀]{3}",
]


@pytest.mark.parametrize("pattern", REGEXES)
def test_what_a_regex_asks_for_is_what_comes(pattern: str, llm: LLM) -> None:
    params = [SamplingParams(max_tokens=60, seed=i, structured_outputs={"regex": pattern}) for i in range(20)]
    for answer in llm.generate(["x = "] * 20, params):
        assert answer.finish_reason == "stop"
        assert re.fullmatch(pattern.replace(r"\p{Lu}", UPPER), answer.text), answer.text


def test_choices_grammars_and_objects(llm: LLM) -> None:
    lark = 'start: "<" NAME ">" | "(" start ")"\nNAME: /[a-z]{1,4}/'
    for outputs, fits in (
        ({"choice": ("yes", 'no "way"', "öh")}, lambda text: text in ("yes", 'no "way"', "öh")),
        ({"grammar": lark}, lambda text: re.fullmatch(r"\(*<[a-z]{1,4}>\)*", text)),
    ):
        for seed in range(8):
            (answer,) = llm.generate("x", SamplingParams(max_tokens=200, seed=seed, structured_outputs=outputs))
            assert answer.finish_reason == "stop"
            assert fits(answer.text), answer.text
    (answer,) = llm.generate("x", SamplingParams(max_tokens=5, structured_outputs={"json_object": True}))
    assert answer.text.startswith("{")


def test_an_answer_does_not_depend_on_company(llm: LLM) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "b", 1, 2, 3]}, "minItems": 3, "maxItems": 6}
    params = [SamplingParams(max_tokens=80, seed=i, structured_outputs={"json": schema}) for i in range(6)]
    together = [answer.text for answer in llm.generate(["x = "] * 6, params)]
    alone = [llm.generate("x = ", each)[0].text for each in params]
    assert together == alone


BAD: list[tuple[dict[str, Any], str]] = [
    ({"regex": "("}, "cannot be compiled"),
    ({"grammar": "nonsense"}, "cannot be compiled"),
    ({"json": {"type": "what"}}, "cannot be compiled"),
    ({"json": "{"}, "cannot be compiled"),
]


@pytest.mark.parametrize(("outputs", "message"), BAD)
def test_what_is_no_grammar_is_refused(outputs: dict[str, Any], message: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        llm.generate("x", SamplingParams(structured_outputs=outputs))
    assert len(str(raised.value)) < 700


def test_a_panic_is_told_without_the_calls_that_led_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panicked:
        def is_error(self) -> bool:
            return True

        def get_error(self) -> str:
            return "panic: too many symbols.\n<backtrace>\n   0: <unknown>\n</backtrace>"

    monkeypatch.setattr(LLGuidance, "_start", lambda self, text: Panicked())
    fault = LLGuidance(Vocabulary(str, 0, [0])).check("{}").fault
    assert fault is not None
    message = "The structured output cannot be compiled: panic: too many symbols."
    assert str(error_of(fault)) == message


def test_it_takes_one_form_at_a_time() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        StructuredOutputs(regex="a", grammar="b")
    with pytest.raises(ValueError, match="exactly one"):
        StructuredOutputs()
    for more in ({"ignore_eos": True}, {"min_tokens": 3}):
        with pytest.raises(ValueError, match=next(iter(more))):
            SamplingParams(structured_outputs=StructuredOutputs(regex="a"), **more)


class Spinning(Matcher):
    """Computes until it is let go, as a mask of a very ambiguous grammar does."""

    def __init__(self, grammar: Grammar) -> None:
        super().__init__(grammar)
        self.let_go = False

    def compute(self) -> None:
        while not self.let_go:
            pass


def test_a_mask_that_takes_too_long_is_left_behind_and_no_other(llm: LLM) -> None:
    grammars = llm.served.grammars
    fine, slow = (grammars.compile(StructuredOutputs(regex=regex)) for regex in ("[ab]{3}", "[cd]{4}"))
    masks = Masks()
    assert isinstance(slow, Grammar)
    first, spinning, last = fine.matcher(), Spinning(slow), fine.matcher()
    try:
        masks.compute([first, spinning, last])
        assert first.fault is None
        assert last.fault is None
        assert (first.allowed == last.allowed).all()
        assert first.allowed.any()
        assert spinning.fault is not None
        assert "took more than 25 ms" in spinning.fault
        assert not spinning.allowed.any()
        spinning.accept(5)
        masks.compute([spinning, last])
        with pytest.raises(RequestError, match="took more than 25 ms"):
            grammars.compile(StructuredOutputs(regex="[cd]{4}"))
        assert grammars.compile(StructuredOutputs(regex="[ab]{3}")) is fine
    finally:
        spinning.let_go = True


def test_waiting_is_not_computing(llm: LLM) -> None:
    """On a busy machine a mask may take long without having had its turn."""

    class Waiting(Matcher):
        def compute(self) -> None:
            time.sleep(4 * MASK_SECONDS)
            super().compute()

    grammar = llm.served.grammars.compile(StructuredOutputs(regex="[ab]{3}"))
    assert isinstance(grammar, Grammar)
    matcher = Waiting(grammar)
    Masks().compute([matcher])
    assert matcher.fault is None
    assert matcher.allowed.any()


def test_grammars_that_are_remembered_stay_within_their_memory(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = fresh(llm)
    sources = [grammars.source(StructuredOutputs(regex=f"a{{{i}}}")) for i in range(1, 5)]
    third = Checked(None, num_bytes=kept.KEPT_BYTES // 3)
    for source in sources[:3]:
        grammars.make(source, third)
    assert all(grammars.known(source) for source in sources[:3])
    grammars.known(sources[0])
    grammars.make(sources[3], third)
    assert [grammars.known(source) is not None for source in sources] == [True, False, True, True]
    monkeypatch.setattr(kept, "MAX_CHARS", 50)
    with pytest.raises(RequestError, match="more than 50 characters"):
        grammars.source(StructuredOutputs(regex="\\n" * 20))  # which is escaped


def fresh(llm: LLM) -> Grammars:
    """That keep nothing yet."""
    return Grammars(LLGuidance(vocabulary(llm.served.tokenizer, llm.served.vocab_size, frozenset({0}))))


@pytest.mark.parametrize(
    "outputs",
    [
        {"regex": "a" * 51},
        {"grammar": "start: " + "a" * 50},
        {"choice": ["a" * 26] * 2},
        {"json": '{"const": "' + "a" * 51},
        {"json": {"const": "a" * 51}},
        {"json": {"enum": [{"a" * 5: {}, "b": "c" * 5}] * 5}},
        {"json": {"enum": [0] * 51}},
    ],
    ids=str,
)
def test_a_long_source_is_refused_before_it_is_made(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, outputs: dict[str, Any]
) -> None:
    """Making it would hold up every stream."""
    grammars = fresh(llm)
    monkeypatch.setattr(kept, "MAX_CHARS", 50)
    monkeypatch.setattr(LLGuidance, "source", lambda self, outputs: pytest.fail("it is made"))
    with pytest.raises(RequestError, match="it has more than 50 characters"):
        grammars.source(StructuredOutputs.model_validate(outputs))


def test_a_mask_that_raises_is_its_own_requests_fault() -> None:
    """In the thread that computes them, whatever it raises."""

    class Panics:
        def deep_copy(self) -> Panics:
            return self

        def is_error(self) -> bool:
            return False

        def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
            raise BaseException("out of its depth")

    class Allows(Panics):
        def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
            ctypes.memset(address, 255, size)

    good, bad, other = (Matcher(Grammar(kind(), 64)) for kind in (Allows, Panics, Allows))  # type: ignore[arg-type]
    masks = Masks()
    for _ in range(2):
        masks.compute([good, bad, other])
        assert bad.fault == "BaseException: out of its depth"
        assert not bad.allowed.any()
        for matcher in (good, other):
            assert matcher.fault is None
            assert (matcher.allowed == -1).all()
