"""What any endpoint's bodies are tried with: wrong values at each place, and nulls."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from tests.serving import Running

from infer.errors import RequestError
from infer_server.http.body import Body
from infer_server.http.parsing import parse

USER = {"role": "user", "content": "x"}
FREE = {
    "schema",
    "parameters",
    "chat_template_kwargs",
    "json",
    "parsed",
    "parsed_arguments",
    "state",
    "data",
    "logprobs",
}
FREE |= {
    "annotations",
    "thinking_blocks",
    "provider_specific_fields",
    "cache_control",
    "client_metadata",
    "context_management",
    "action",
    "input_schema",
}
"""What below holds is the client's own."""
MAPS = FREE | {"metadata", "logit_bias", "criteria", "questions"}
"""And these have keys, not fields."""


def places(value: Any, path: tuple[int | str, ...] = ()) -> list[tuple[int | str, ...]]:
    """Of every value in a body that a schema says something about."""
    found = [path] if path else []
    if isinstance(value, dict) and (not path or path[-1] not in FREE):
        found += [place for key, each in value.items() for place in places(each, (*path, key))]
    if isinstance(value, list):
        found += [place for i, each in enumerate(value) for place in places(each, (*path, i))]
    return found


def at(body: Any, path: Sequence[int | str]) -> Any:
    for step in path:
        body = body[str(step) if isinstance(body, dict) else step]
    return body


def put(body: Any, path: tuple[int | str, ...], value: Any) -> Any:
    if not path:
        return value
    if isinstance(body, list):
        return [put(each, path[1:], value) if i == path[0] else each for i, each in enumerate(body)]
    return body | {path[0]: put(body.get(path[0]), path[1:], value)}


def shown(path: Sequence[int | str]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def refusal(model: type[Body], body: Any) -> RequestError | None:
    try:
        parse(json.dumps(body).encode(), model)
    except RequestError as error:
        return error
    return None


WRONG: Any = st.one_of(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    st.sampled_from([2**70, "str", {"str": 1}, {"NamedTool": {}}, {"type": "message"}, {"type": 3}, [[]], [None]]),
    st.recursive(
        st.none() | st.booleans() | st.text(max_size=2),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
        max_leaves=6,
    ),
)


def check_refusal(model: type[Body], body: Any, path: tuple[int | str, ...], value: Any, sibling: bool) -> None:
    """One value is another, or gets an unknown neighbor. Where that is refused, the field named is there, or missing
    from where it is said to be, and it is what was changed, something in it, beside it or around it."""
    holder = at(body, path[:-1])
    if sibling:
        if isinstance(holder, list) or (path[-2:-1] and path[-2] in MAPS):
            return
        path = (*path[:-1], "Unknown")
    sent = put(body, path, value)
    error = refusal(model, sent)
    if error is None:
        return
    assert error.param, str(error)
    assert len(str(error)) < 600
    if sibling and "is not known" in str(error):
        assert error.param == shown(path)
    named: list[int | str] = [int(step) if step.isdigit() else step for step in re.findall(r"[^.\[\]]+", error.param)]
    around = list(path[:-1])
    if "missing" in str(error):
        assert at(sent, named[:-1]).get(named[-1]) is None
    elif len(named) > 1:
        at(sent, named)
    else:
        assert named[0] in {**sent, **model.model_fields}
    assert len(named) == 1 or shown(named[: len(around)]) == shown(around[: len(named)])


ODD: tuple[Any, ...] = (None, -1, 2**70, "", "x", [], [None], {}, True, 0.5, {"type": 3})


async def check_sweep(server: Running, body: dict[str, Any], *paths: str) -> None:
    """Each value of a body is each odd one, and is sent to the paths in turn: it is taken, or refused in so many words.
    Whole answers are expected, as an error in a stream would not be seen."""
    tried = ((place, value) for place in places(body) for value in ODD)
    for (place, value), path in zip(tried, itertools.cycle(paths), strict=False):
        async with server.session.post(server.url + path, json=put(body, place, value)) as response:
            assert response.status in (200, 400, 404), (path, place, value, await response.text())
            assert response.status == 200 or (await response.json())["error"]


def check_nulls(model: type[Body], body: Any) -> int:
    """With a null for an optional field, the request is the one without the field, at each depth. Returns how many
    fields were tried."""

    def without(value: Any, path: tuple[int | str, ...]) -> Any:
        if len(path) == 1:
            return {key: each for key, each in value.items() if key != path[0]}
        return put(value, path[:1], without(value[path[0]], path[1:]))

    tried = 0
    for path in places(body):
        if isinstance(path[-1], int) or (path[-2:-1] and path[-2] in MAPS) or any(step in FREE for step in path[:-1]):
            continue
        try:
            expected = parse(json.dumps(without(body, path)).encode(), model)
        except RequestError:
            continue
        if path == ("max_tokens",):  # which means another thing
            continue
        found = parse(json.dumps(put(body, path, None)).encode(), model)
        assert found == expected, path
        assert found.model_fields_set == expected.model_fields_set, path
        tried += 1
    return tried
