"""What of another replica's stream a client gets, whose first replica was lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from infer_router.resume import ClientStream, DivergedError, complaint
from infer_server.http.errors import error_body
from infer_server.http.wire import OPENAI, ErrorBody, NamedEvents, Ollama

FIRST, SECOND = "5e1f00d5", "0ddba115"


def events(id: str, pieces: Iterable[str], end: bool = False) -> bytes:
    choices = [{"index": 0, "text": piece, "finish_reason": None} for piece in pieces]
    if end:
        choices.append({"index": 0, "text": "", "finish_reason": "length"})
    made = ({"id": f"cmpl-{id}", "created": int(id, 16), "choices": [choice]} for choice in choices)
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in made)


def heard(data: bytes) -> tuple[str, set[str], set[int]]:
    """The texts together, the ids and the times."""
    frames = [json.loads(frame.removeprefix(b"data: ")) for frame in data.split(b"\n\n") if frame]
    texts = "".join(frame["choices"][0]["text"] for frame in frames)
    return texts, {frame["id"] for frame in frames}, {frame["created"] for frame in frames}


@pytest.mark.parametrize("told", [["ab"], ["ab", "cde"], ["abcdefg"], []])
@pytest.mark.parametrize("again", [["abc", "defg", "hi"], ["a", "b", "c", "d", "e", "f", "g", "h", "i"], ["abcdefghi"]])
def test_answers_that_are_divided_otherwise_are_cut_where_the_client_is(told: list[str], again: list[str]) -> None:
    account = ClientStream()
    account.begin(FIRST)
    first = account.relay(events(FIRST, told))
    account.begin(SECOND)
    texts, ids, times = heard(first + account.relay(events(SECOND, again, end=True)))
    assert texts == "abcdefghi"
    assert len(times) == 1
    assert ids == {f"cmpl-{FIRST}"}


def test_an_event_that_is_cut_stays_one_line() -> None:
    """To clients for which a line ends as ``str.splitlines`` has it."""
    account = ClientStream()
    account.begin(FIRST)
    account.relay(events(FIRST, ["ab"]))
    account.begin(SECOND)
    rest = account.relay(events(SECOND, ["abc\x85\u2028\u2029"]))
    assert heard(rest)[0] == "c\x85\u2028\u2029"
    assert len(rest.decode().splitlines()) == 2


def test_a_response_that_waits_elsewhere_says_so_too() -> None:
    """What the new stream begins with is known. What it says again is a sign of life."""

    def told(id: str, kinds: list[str]) -> bytes:
        frames = [{"type": f"response.{kind}", "sequence_number": i, "response": id} for i, kind in enumerate(kinds)]
        frames.append({"type": "response.output_text.delta", "sequence_number": len(frames), "delta": "a"})
        return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in frames)

    account = ClientStream()
    account.begin(FIRST)
    first = account.relay(told(FIRST, ["created", "in_progress"]))
    account.begin(SECOND)
    rest = account.relay(told(SECOND, ["created", *["in_progress"] * 3]))
    heard = [json.loads(event.removeprefix(b"data: ")) for event in (first + rest).split(b"\n\n") if event]
    kinds = ["created", "in_progress", "output_text.delta", "in_progress", "in_progress"]
    assert [event["type"].removeprefix("response.") for event in heard] == kinds
    assert [event["sequence_number"] for event in heard] == list(range(len(heard)))
    frame = {"type": "error", "sequence_number": 5, "message": "No."}
    rest = account.relay(b"event: error\ndata: " + json.dumps(frame).encode() + b"\n\n")
    assert rest.startswith(b"event: error\n")
    assert json.loads(rest.partition(b"data: ")[2]) == frame | {"sequence_number": len(heard)}
    assert account.count() == len(heard) + 1


def test_another_text_is_noticed_within_an_event() -> None:
    account = ClientStream()
    account.begin(FIRST)
    account.relay(events(FIRST, ["abcd"]))
    account.begin(SECOND)
    with pytest.raises(DivergedError):
        account.relay(events(SECOND, ["abXdef"]))


def test_comments_pass_and_do_not_count() -> None:
    comment = b": the prompt is being computed\n\n"
    account = ClientStream()
    account.begin(FIRST)
    assert account.relay(comment + events(FIRST, ["ab"])).startswith(comment)
    account.begin(SECOND)
    rest = account.relay(comment + events(SECOND, ["abc"], end=True))
    assert rest.startswith(comment)
    assert heard(rest.removeprefix(comment))[0] == "c"


@pytest.mark.parametrize("failure", [OPENAI.failure, NamedEvents().failure])
def test_a_failure_is_noticed_however_it_is_written(failure: Callable[[ErrorBody], dict[str, Any]]) -> None:
    frame = failure(error_body("Ends.", "server_error"))
    before = b'data: {"type": "response.created", "response": {"error": null}}\n\n'
    assert complaint(before) is None
    assert complaint(before + b"event: error\ndata: " + json.dumps(frame).encode() + b"\n\n") == "Ends."


def test_a_response_that_fails_is_noticed_before_its_error() -> None:
    frame = {"type": "response.failed", "sequence_number": 4, "response": {"error": {"code": "x", "message": "Ends."}}}
    assert complaint(b"event: response.failed\ndata: " + json.dumps(frame).encode() + b"\n\n") == "Ends."


def test_a_line_that_fails_is_noticed() -> None:
    line = json.dumps(Ollama().failure(error_body("Ends.", "server_error"))).encode() + b"\n"
    for before in (b"", b" ", b'{"response": "x"}\n', b'{"response": "x"}\n  '):
        assert complaint(before + line) == "Ends."
    said = json.dumps({"response": "\n" + line.decode()}).encode() + b"\n"
    assert complaint(said) is None


def test_events_of_another_form_pass_and_cannot_be_gone_on_with() -> None:
    """As the engine's steps, which are lists, however many there are."""
    account = ClientStream()
    account.begin(FIRST)
    steps = b"data: " + json.dumps([{"step": 1, "works": "x" * 1000}]).encode() + b"\n\n"
    for _ in range(40):
        assert account.relay(steps) == steps
    assert not account.known
