"""Tokenizers that are tables of bytes by rank, in the terms of the hub's tokenizer.json: Mistral's tekken.json, and the
tiktoken.model of Moonshot's models. Of two neighbors, the two whose bytes together have the lowest rank become one
token first."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from infer.errors import CheckpointError
from infer_formats.gguf.tokenizer import SPLITS

MAX_TOKEN, MAX_WAYS = 1024, 32
"""Bytes of a token, since all places where it can be cut are tried; and how many of these leave two tokens, on average
over a table. Published tables have about two."""
MOONSHOT = "TikTokenTokenizer"
"""What Moonshot's models call their tokenizer's class, whose code says how texts are split."""


class Special(NamedTuple):
    """A token that is found in a text before it is split."""

    id: int
    text: str
    control: bool


def tekken(file: Path) -> bytes:
    """tokenizer.json of a tekken.json. Raises CheckpointError."""
    given = _object(file)
    try:
        config, entries = given["config"], given["vocab"]
        count, pattern = _whole(config.get("default_num_special_tokens", 1000)), _text(config["pattern"])
        size = config.get("default_vocab_size")
        entries = entries if size is None else entries[: _whole(size) - count]
        ranks = {base64.b64decode(entry["token_bytes"], validate=True): _whole(entry["rank"]) for entry in entries}
        specials = [
            Special(_whole(entry["rank"]), _text(entry["token_str"]), entry.get("is_control") is not False)
            for entry in given["special_tokens"]
        ]
        begin = next(special for special in specials if special.text == "<s>")
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise CheckpointError(
            f"{file} is not as infer knows such files from version 7 on ({error!r}); give model.tokenizer a "
            "tokenizer.json."
        ) from error
    ids = {token: rank + count for token, rank in ranks.items()}
    return _made(file, ids, pattern, [special for special in specials if special.id < count], begin)


def tiktoken(file: Path) -> bytes:
    """tokenizer.json of the tiktoken.model of a model of Moonshot's, such as Moonlight or Kimi Linear. Raises
    CheckpointError."""
    config = _object(file.with_name("tokenizer_config.json"))
    kind, added = config.get("tokenizer_class"), config.get("added_tokens_decoder")
    if kind != MOONSHOT or not isinstance(added, dict):
        raise CheckpointError(
            f"{file} does not say how texts are split; infer knows it of Moonshot's models (tokenizer_class "
            f"{MOONSHOT!r}), and this one's is {kind!r}. Give model.tokenizer a tokenizer.json."
        )
    ids: dict[bytes, int] = {}
    try:
        for line in filter(None, file.read_bytes().splitlines()):
            token, rank = line.split()
            ids[base64.b64decode(token, validate=True)] = int(rank)
        specials = [
            Special(int(id), _text(about["content"]), about.get("special") is True) for id, about in added.items()
        ]
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} or tokenizer_config.json beside it is damaged: {error!r}.") from error
    pattern = SPLITS["kimi-k2"].pattern
    assert pattern is not None
    return _made(file, ids, pattern, specials, None)


def _made(
    file: Path, ids: Mapping[bytes, int], pattern: str, specials: Iterable[Special], begin: Special | None
) -> bytes:
    """A byte-level BPE of tokens whose ids are in the order of their ranks. Texts begin with ``begin``."""
    if (longest := max(map(len, ids), default=0)) > MAX_TOKEN:
        raise CheckpointError(f"{file} has a token of {longest} bytes; infer reads {MAX_TOKEN} at most.")
    letters = _letters()
    text = {token: "".join(map(letters.__getitem__, token)) for token in ids}
    merges = []
    for token in sorted(ids, key=ids.__getitem__):
        ways = [(token[:at], token[at:]) for at in range(1, len(token))]
        ways = [way for way in ways if way[0] in ids and way[1] in ids]
        ways.sort(key=lambda way: (ids[way[0]], ids[way[1]]))
        merges += [[text[left], text[right]] for left, right in ways]
        if len(merges) > MAX_WAYS * len(ids):
            raise CheckpointError(f"{file} has more than {MAX_WAYS} ways to make a token of two others, on average.")
    vocab = {text[token]: id for token, id in ids.items()} | {special.text: special.id for special in specials}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    made = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
                "id": special.id,
                "content": special.text,
                "special": special.control,
            }
            for special in sorted(specials, key=lambda special: special.id)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None if begin is None else _beginning(begin),
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            **dict.fromkeys(("fuse_unk", "byte_fallback"), False),
            "ignore_merges": True,
            "vocab": vocab,
            "merges": merges,
        },
    }
    return json.dumps(made).encode()


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _object(file: Path) -> dict[str, Any]:
    """A file's JSON. Raises CheckpointError."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds a JSON {type(found).__name__} instead of an object.")
    return found


def _beginning(begin: Special) -> dict[str, Any]:
    """Puts a token before every text."""
    first = {"SpecialToken": {"id": begin.text, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {begin.text: {"id": begin.text, "ids": [begin.id], "tokens": [begin.text]}},
    }


def _letters() -> list[str]:
    """The letter that stands for each byte (GPT-2; Radford et al., 2019): itself if it can be seen, and otherwise the
    next one from U+0100 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 256 + hidden.index(byte)) for byte in range(256)]
