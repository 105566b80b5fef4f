"""Encoding texts as token ids, with a bound on the work. A text that is certainly too long is refused before it is
encoded, and any other text that turns out too long before its ids become Python integers."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from infer.errors import RequestError


class TooLongError(RequestError):
    """The text has more tokens than are allowed. ``sure`` means that ``least`` is their exact number."""

    def __init__(self, least: int, *, sure: bool) -> None:
        self.count = str(least) if sure else f"at least {least}"
        super().__init__(f"The text has {self.count} tokens, which is too many.", param="prompt")


class Encoder:
    """Encodes texts without holding the GIL."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str, *, special: bool, most: int) -> list[int]:
        """The token ids of ``text``, after the tokenizer's own leading special tokens if ``special``. Raises
        TooLongError if there are more than ``most``."""
        if len(text) > most and self._longest and (least := -(-len(text) // self._longest)) > most:
            raise TooLongError(least, sure=False)
        # ``encode`` would hold the GIL for as long as it takes. Reading the ids holds it too, for 20 ns per id.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        if (count := len(encoding)) > most:
            del encoding  # the error's traceback would keep it, a hundred bytes for each token
            raise TooLongError(count, sure=True)
        ids: list[int] = encoding.ids
        return ids

    @cached_property
    def _longest(self) -> int:
        """Only texts that may be too long need it, and no start waits for it."""
        return _longest(self._tokenizer)


def _longest(tokenizer: Tokenizer) -> int:
    """The most characters of a text that one token can stand for; 0 if there is no bound."""
    if "ByteLevel" in [step["type"] for step in _steps(tokenizer.pre_tokenizer)]:
        letters = ByteLevel.alphabet()
    else:
        letters = [f"<0x{byte:02X}>" for byte in range(256)] if getattr(tokenizer.model, "byte_fallback", 0) else [""]
    if (
        type(tokenizer.model).__name__ != "BPE"
        # Unknown text is dropped, or becomes one token however long it is.
        or None in map(tokenizer.token_to_id, letters)
        or tokenizer.truncation is not None
        or any(added.lstrip or added.rstrip for added in tokenizer.get_added_tokens_decoder().values())
        or not all(map(_keeps, _steps(tokenizer.pre_tokenizer)))
    ):
        return 0
    shrinks = 1
    for step in _steps(tokenizer.normalizer):
        if step["type"] == "NFC":
            shrinks *= 4  # characters that compose into one, at most
        elif step["type"] != "Prepend" and not _replaces_a_character(step):
            return 0
    return shrinks * max(map(len, _tokens(tokenizer)))


def _tokens(tokenizer: Tokenizer) -> list[str]:
    """All tokens, one by one unless their ids have gaps, so that other threads compute in between."""
    size = tokenizer.get_vocab_size()
    found = [token for token in map(tokenizer.id_to_token, range(size)) if token is not None]
    return found if len(found) == size else [*tokenizer.get_vocab()]


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, as the tokenizers library serializes them."""
    if part is None:
        return []
    state: dict[str, Any] = json.loads(part.__getstate__())
    steps: list[dict[str, Any]] = state.get("normalizers") or state.get("pretokenizers") or [state]
    return steps


def _keeps(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer keeps every character."""
    if step["type"] in ("Split", "Punctuation"):
        return step.get("behavior") != "Removed"
    return step["type"] in ("ByteLevel", "Digits", "Metaspace")


def _replaces_a_character(step: dict[str, Any]) -> bool:
    """Whether a normalizer only replaces one character with one or more others."""
    pattern = step.get("pattern", {}).get("String", "")
    return step["type"] == "Replace" and len(pattern) == 1 and bool(step["content"])
