"""Structured output on the demo model: it always fits."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from infer import LLM, RequestError, SamplingParams
from infer.request import StructuredOutputs

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
        assert re.fullmatch(pattern.replace(r"\p{Lu}", "[A-ZÀ-Þ]"), answer.text) or "\\p" in pattern, answer.text


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


def test_it_takes_one_form_at_a_time() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        StructuredOutputs(regex="a", grammar="b")
    with pytest.raises(ValueError, match="exactly one"):
        StructuredOutputs()
    for more in ({"ignore_eos": True}, {"min_tokens": 3}):
        with pytest.raises(ValueError, match=next(iter(more))):
            SamplingParams(structured_outputs=StructuredOutputs(regex="a"), **more)
