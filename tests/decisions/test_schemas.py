"""Which bodies of decisions are accepted, and what the errors say of the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bodies import USER, WRONG, check_nulls, check_refusal, places, refusal
from tests.examples import examples

from infer_decisions.endpoint import DecisionsRequest, Questions, SystemOneRequest
from infer_server.http.body import Body
from infer_server.http.parsing import parse

ASKED: list[tuple[type[Body], dict[str, Any]]] = [
    (
        SystemOneRequest,
        {
            "state": {"a": [None]},
            "questions": {
                "u": {"type": "noul", "instructions": "?", "criteria": {"true": "y", "false": "n"}},
                "t": {"type": "choice", "instructions": "?", "criteria": {"a": "b", "c": None}},
                "s": {"type": "score", "instructions": "?", "criteria": ["a", "b"]},
            },
        },
    ),
    (
        DecisionsRequest,
        {
            "input": [USER, {"role": "user", "content": [{"type": "input_json", "data": {"a": None}}]}],
            "questions": [
                {"type": "predicate", "name": "p", "instructions": [{"type": "input_text", "text": "true?"}]},
                {
                    "type": "choice",
                    "instructions": "?",
                    "choices": [{"value": True}, {"value": "true", "description": "d"}],
                },
                {"type": "score", "instructions": "?", "levels": [{"label": "a", "description": "b"}, {"label": "c"}]},
            ],
            "prompt_cache_key": "k",
            "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
            "safety_identifier": "u",
        },
    ),
]
QUESTIONS = {"questions": [{"type": "predicate", "instructions": "?"}]}
PLACES = [(i, path) for i, (_, body) in enumerate(ASKED) for path in places(body)]


@pytest.mark.parametrize(("model", "body"), ASKED)
def test_all_of_it_is_taken(model: type[Body], body: dict[str, Any]) -> None:
    assert refusal(model, body) is None


@settings(max_examples=examples(200, 60))
@given(place=st.sampled_from(PLACES), value=WRONG, sibling=st.booleans())
def test_a_refusal_names_a_field_on_the_way_to_what_is_wrong(
    place: tuple[int, tuple[int | str, ...]], value: Any, sibling: bool
) -> None:
    index, path = place
    model, body = ASKED[index]
    check_refusal(model, body, path, value, sibling)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (
            {"state": "", "questions": {"a": {"type": "choice", "instructions": 5}}},
            "questions.a.instructions",
            "string",
        ),
        (
            {"state": "", "questions": {"choice": {"type": "choice", "choice": 1, "criteria": {"a": "", "b": ""}}}},
            "questions.choice.instructions",
            "missing",
        ),
        ({"input": "", "questions": [{"type": "noul"}]}, "questions[0].type", "'predicate'"),
        (
            {"input": "", "questions": [{"type": "choice", "instructions": "", "choices": [{"value": "a"}] * 2}]},
            "questions[0].choices",
            "'a' twice",
        ),
        (
            {"input": [USER, {"type": "function_call_output", "call_id": "c", "output": ""}], **QUESTIONS},
            "input",
            "input[1]: the output for call_id 'c' has no call",
        ),
    ],
)
def test_a_refusal_names_the_field(body: dict[str, Any], param: str, message: str) -> None:
    error = refusal(Questions, body)
    assert error is not None
    assert error.param == param, str(error)
    assert message in str(error)


@pytest.mark.parametrize(("model", "body"), ASKED)
def test_a_null_counts_as_not_given_wherever_a_field_may_be_left_out(model: type[Body], body: dict[str, Any]) -> None:
    assert check_nulls(model, body)


def test_nulls_say_something_in_states_and_criteria() -> None:
    one = parse(json.dumps(ASKED[0][1]).encode(), Questions)
    assert isinstance(one, SystemOneRequest)
    assert one.state == {"a": [None]}
    assert one.questions["t"].criteria == {"a": "b", "c": None}
