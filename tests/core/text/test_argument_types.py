"""Arguments that are written as text have the types that their function's JSON schema gives them, however it does."""

from __future__ import annotations

import datetime
import enum
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field, TypeAdapter
from tests.core.text.test_tool_families import FAMILIES, written
from tests.server.test_calling import FORMATS

from infer_tool_formats.schemas import MOST, Schema


class Color(enum.Enum):
    RED = "red"
    ONE = "1"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Odd(enum.Enum):
    """Of which pydantic gives the values, but no type."""

    TEXT = "1"
    NUMBER = 2
    NOTHING = None


class Place(BaseModel):
    name: str
    zip: str | None = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Tree(BaseModel):
    value: int
    label: str = ""
    below: list[Tree] = []


class Asked(BaseModel):
    place: Place
    described: Place = Field(description="Where.")
    maybe: Optional[Place] = None  # noqa: UP045
    places: list[Place]
    by_name: dict[str, Place]
    color: Color
    colors: set[Color]
    level: Level
    maybe_level: Level | None
    odd: Odd
    also_odd: Odd
    unit: Literal["c", "1"]
    size: Literal[1, 2]
    either: Literal["1", 2]
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    tree: Tree
    pair: tuple[int, str]
    day: datetime.date | None
    anything: Any


ASKED = Asked(
    place=Place(name="Rome", zip="00118"),
    described=Place(name="5"),
    maybe=Place(name="None"),
    places=[Place(name="Oslo"), Place(name="Bonn", zip="53111")],
    by_name={"1": Place(name="2")},
    color=Color.ONE,
    colors={Color.RED},
    level=Level.HIGH,
    maybe_level=Level.LOW,
    odd=Odd.TEXT,
    also_odd=Odd.NUMBER,
    unit="1",
    size=2,
    either="1",
    pet=Cat(kind="cat", lives=9),
    tree=Tree(value=1, below=[Tree(value=2, label="3")]),
    pair=(4, "5"),
    day=datetime.date(2026, 1, 2),
    anything="six",
)
BARE = ASKED.model_copy(update={"maybe": None, "maybe_level": None, "odd": Odd.NOTHING, "either": 2, "day": None})
GIVEN = [ASKED, BARE, Tree(value=7, label="8", below=[Tree(value=9)])]
TEXTUAL = [name for name, family in FAMILIES.items() if family.format in ("xml", "glm", "minimax", "minicpm")]


def arguments(text: str, format: str, schema: Any) -> Any:
    """Those of the one call that an answer is, read as a whole and character by character."""
    told = []
    for parts in ([text], list(text)):
        part = FORMATS[format].reader({"weather": schema})
        pieces = [*(piece for each in parts for piece in part.push(each)), *part.flush()]
        assert [piece.text for piece in pieces if piece.kind == "call"] == ["weather"]
        told.append(json.loads("".join(piece.text for piece in pieces if piece.kind == "arguments")))
    assert told[0] == told[1]
    return told[0]


@pytest.mark.parametrize("name", TEXTUAL)
@pytest.mark.parametrize("given", GIVEN, ids=["all", "bare", "recursive"])
def test_pydantics_schemas_tell_types(name: str, given: BaseModel) -> None:
    values = given.model_dump(mode="json")
    text = written(FAMILIES[name].template, [("weather", values)])
    assert arguments(text, FAMILIES[name].format, type(given).model_json_schema()) == values


@pytest.mark.parametrize("format", ["xml", "glm"])
def test_pydantics_types_of_their_own_tell_types(format: str) -> None:
    text = {
        "xml": "<function=weather><parameter=x>\n2\n</parameter></function>",
        "glm": "<tool_call>weather<arg_key>x</arg_key><arg_value>2</arg_value></tool_call>",
    }[format]
    kinds: list[tuple[Any, Any]] = [
        (int, 2),
        (str, "2"),
        (Level, 2),
        (Color, "2"),
        (Odd, 2),
        (Level | None, 2),
        (Color | None, "2"),
        (Level | Color | None, 2),
        (Literal["2", 3], "2"),
        (Literal["2", "3"], "2"),
        (Literal[True, 2], 2),
        (float | None, 2),
        (Place, "2"),
        (Any, "2"),
    ]
    for kind, value in kinds:
        schema = TypeAdapter(kind).json_schema()
        rest = {"$defs": schema.pop("$defs")} if "$defs" in schema else {}
        found = arguments(text, format, {"properties": {"x": schema}} | rest)
        assert (found["x"], type(found["x"])) == (value, type(value)), kind


def test_a_number_without_a_fraction_is_an_integer() -> None:
    """Where the schema wants one: to JSON schemas, 3.0 is one."""
    schema = {"properties": {"n": {"type": ["integer", "null"]}, "x": {"type": "number"}, "m": {"type": "integer"}}}
    given = {"n": "3.0", "x": "3.0", "m": "3.5"}
    text = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in given.items())
    found = arguments(f"<tool_call>weather{text}</tool_call>", "glm", schema)
    assert json.dumps(found) == '{"n": 3, "x": 3.0, "m": "3.5"}'


TYPES: list[tuple[Any, set[str]]] = [
    ({}, set()),
    (True, set()),
    ({"const": 1}, {"integer"}),
    ({"const": None}, {"null"}),
    ({"enum": [1.5, True, "a", [], {}]}, {"number", "boolean", "string", "array", "object"}),
    ({"type": "number", "enum": [1.5]}, {"number"}),
    ({"properties": {}}, {"object"}),
    ({"additionalProperties": {"type": "integer"}}, {"object"}),
    ({"items": {"type": "integer"}}, {"array"}),
    ({"prefixItems": []}, {"array"}),
    ({"allOf": [{"$ref": "#/$defs/a"}], "default": 1}, {"integer"}),
    ({"oneOf": [{"anyOf": [{"allOf": [{"type": "null"}]}]}]}, {"null"}),
    ({"$ref": "#/definitions/b~1c~0d%20e"}, {"boolean"}),
    ({"$ref": "#/properties/x/anyOf/1"}, {"array"}),
    ({"$ref": "#"}, {"object"}),
    ({"$ref": "#/$defs/again"}, set()),
    ({"$ref": "#/$defs/nothing"}, set()),
    ({"$ref": "#/properties/x/anyOf/9"}, set()),
    ({"$ref": "#/properties/x/anyOf/one"}, set()),
    ({"$ref": "#/type/0/1"}, set()),
    ({"$ref": "#a"}, set()),
    ({"$ref": "https://example.org/schema"}, set()),
    ({"$ref": 1, "type": 2, "enum": 3, "anyOf": 4, "properties": 5}, set()),
    ({"type": ["integer", 1, None]}, {"integer"}),
]
ROOT = {
    "type": "object",
    "properties": {"x": {"anyOf": [{"type": "null"}, {"type": "array"}]}},
    "$defs": {"a": {"type": "integer"}, "again": {"$ref": "#/$defs/again"}},
    "definitions": {"b/c~d e": {"const": True}},
}


@pytest.mark.parametrize(("schema", "types"), TYPES)
def test_what_a_schema_allows(schema: Any, types: set[str]) -> None:
    assert Schema(ROOT, schema).types == types


def test_what_members_are() -> None:
    """Those of all objects that a value may be."""
    either = [{"properties": {"x": {"type": "integer"}}}, {"properties": {"x": {"type": "string"}}}]
    root = {"anyOf": [*either, {"additionalProperties": {"type": "null"}}]}
    schema = Schema(root, root)
    assert schema.member("x").types == {"integer", "string", "null"}
    assert schema.member("y").types == {"null"}
    items = Schema(None, {"items": {"items": {"type": "boolean"}}})
    assert items.member("item").member("item").types == {"boolean"}
    assert items.member("x").types == set()


class Counted(list[Any]):
    """A list that counts how many of its members are read."""

    def __init__(self, values: Any, reads: list[int]) -> None:
        super().__init__(values)
        self.reads = reads

    def __iter__(self) -> Iterator[Any]:
        for value in super().__iter__():
            self.reads[0] += 1
            yield value


def hostile(size: int, reads: list[int]) -> Iterator[dict[str, Any]]:
    """Schemas that grow with ``size``."""
    for each in ({"type": "integer"}, {"$ref": "#"}, {"$ref": "#/$defs/x"}, 1):
        for key in ("allOf", "anyOf", "oneOf"):
            schema = {key: Counted([each] * size, reads)}
            yield schema | {"$defs": {"x": schema}}
    yield {"enum": Counted(range(size), reads)}
    yield {"type": Counted(["integer"] * size, reads)}
    yield {"anyOf": [{"type": Counted(["integer"] * size, reads)} for _ in range(MOST)]}
    yield {"anyOf": [{"enum": Counted(["a"] * size, reads)} for _ in range(MOST)]}
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(size):
        nested = {"anyOf": Counted([nested], reads)}
    yield nested
    chain = {f"{i}": {"$ref": f"#/$defs/{i + 1}", "anyOf": Counted([{}], reads)} for i in range(size)}
    yield {"$defs": chain, "$ref": "#/$defs/0"}
    yield {"$ref": "#/" + "/" * size}


def test_a_large_schema_takes_no_longer_than_a_small_one() -> None:
    """To tell a type, no more than so many parts of it are read. Told again, none are."""
    counts: list[list[int]] = []
    for size in (2 * MOST, 20 * MOST):
        counts.append([])
        reads = [0]
        for schema in hostile(size, reads):
            root = {"properties": {"x": schema}, **schema}
            reads[0] = 0
            member = Schema(root, root).member("x")
            assert member.types <= {"integer", "string"}
            assert member.texts <= {"a"}
            counts[-1].append(reads[0])
    assert counts[0] == counts[1]
    assert max(counts[0]) <= 8 * MOST
