"""Incremental decoding of tokens to text. Characters are never split, and text that may be the beginning of a stop
string is held back."""

from __future__ import annotations

import functools
import json
import re
from codecs import utf_8_decode
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tokenizers import Tokenizer

CONTEXT = 4
"""How many prompt tokens are decoded along with the first new one, since some decoders treat a text's start
differently."""
RECENT = 64
"""These are looked for among so many last tokens of the prompt; special tokens, which are not shown, do not count."""
INCOMPLETE = "\ufffd"
NOTHING: dict[int, str] = {}
MOST_BYTES = 4
"""The most bytes that a character has in UTF-8."""
FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token that stands for one byte where the vocabulary lacks a character."""


def _byte_characters() -> dict[str, int]:
    """The characters by which byte-level tokenizers (GPT-2, 2019) write bytes: printable ones stand for themselves, the
    others for characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_characters()


class TokenTexts:
    """A tokenizer's decoder. If the text of several tokens is the texts of the single tokens end to end
    (``end_to_end``), also a table of these."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self.decode = functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self.known: dict[int, str | bytes] = {}
        """The pieces of tokens looked up so far: text, or bytes that may be part of a character."""
        self.plain: dict[int, str] = {}
        """The texts of those that have the same text after any whole character."""
        self._token = tokenizer.id_to_token
        added = tokenizer.get_added_tokens_decoder().items()
        self.skipped = frozenset(i for i, token in added if token.special and skip_special_tokens)
        match _steps(tokenizer):
            case [{"type": "ByteLevel"}]:
                self.end_to_end, self.falls_back, self.stripped = True, False, ""
            case [
                {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *rest,
            ] if (stripped := _stripped(rest)) is not None:
                self.end_to_end, self.falls_back, self.stripped = True, True, stripped
                self._old, self._new = old, new
            case _:
                self.end_to_end = False

    def learn(self, token_id: int) -> str | bytes:
        """Look up a token's piece, and remember it in ``known``. Only if ``end_to_end``."""
        token = None if token_id in self.skipped else self._token(token_id)
        piece: str | bytes
        if not token:
            piece = ""
        elif self.falls_back:
            byte = FALLBACK_BYTE.fullmatch(token)
            piece = bytes.fromhex(byte[1]) if byte else token.replace(self._old, self._new)
        else:
            known = [BYTE_OF[c] for c in token if c in BYTE_OF]
            piece = bytes(known) if len(known) == len(token) else token.encode()
            with suppress(UnicodeDecodeError):  # the piece begins or ends inside a character
                piece = piece.decode()
        self.known[token_id] = piece
        if isinstance(piece, str):
            self.plain[token_id] = piece
        elif not self.falls_back:
            text, read = utf_8_decode(piece, "replace", False)
            if read == len(piece):
                self.plain[token_id] = text
        return piece

    def are_whole(self, token_ids: Sequence[int]) -> bool:
        """Whether these tokens' text has no replacement character but those that are tokens' own."""
        own = sum((self._token(token_id) or "").count(INCOMPLETE) for token_id in token_ids)
        return self.decode(token_ids).count(INCOMPLETE) == own

    def follow(self, prompt_token_ids: Sequence[int]) -> Detokenizer | ContextDetokenizer:
        """A detokenizer for the tokens that follow a prompt."""
        return (Detokenizer if self.end_to_end else ContextDetokenizer)(self, prompt_token_ids)


def _steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    steps: list[dict[str, Any]] = state.get("decoders", [state])
    return steps


def _stripped(steps: list[dict[str, Any]]) -> str | None:
    """The text that a decoder's last steps strip from the beginning; None if they do anything else."""
    match steps:
        case []:
            return ""
        case [{"type": "Strip", "content": str(content), "start": 1, "stop": 0}]:
            return content
    return None


class Detokenizer:
    """Decodes tokens whose pieces join end to end, in constant time per token.

    The result equals what the tokenizer makes of all tokens at once, with one exception: the tokenizers library
    replaces all characters of a run of fallback bytes that is not valid UTF-8, but those that were complete before the
    invalid byte have been shown by then."""

    __slots__ = ("_pending", "_spoiled", "_strip", "_texts", "begins", "length", "plain")

    def __init__(self, texts: TokenTexts, prompt_token_ids: Sequence[int]) -> None:
        self._texts = texts
        self._spoiled = False
        """The current run of fallback bytes is not valid UTF-8."""
        self._strip = texts.stripped
        if self._strip and any(self._piece(token_id) for token_id in prompt_token_ids):
            self._strip = ""
        self.length = 0
        """How many characters the text has so far."""
        self.begins = 0
        """The index at which the last token's text begins; if the token continues a character, that character's."""
        tail = b""  # a prompt may end inside a character; the whole character is then new text
        for token_id in reversed(prompt_token_ids):
            piece = self._piece(token_id)
            if len(tail) >= MOST_BYTES - 1 or (piece and isinstance(piece, str)):
                break
            tail = (piece or b"") + tail
        self._pending = tail[utf_8_decode(tail, "replace", False)[1] :]
        """The bytes of an incomplete character."""
        self.plain = NOTHING if self._pending or self._strip else texts.plain
        """The texts of tokens whose ``push`` would return just these and change only ``length`` and ``begins``. Empty
        if the next piece may need completing, replacing or stripping. Each ``push`` may change it."""

    def push(self, token_id: int) -> str:
        """The text that the token adds; empty while a character is incomplete."""
        self.begins = length = self.length
        piece = self.plain.get(token_id)
        if piece is None:
            found = self._piece(token_id)
            piece = (self._fall_back if self._texts.falls_back else self._complete)(found) if found else ""
        self.length = length + len(piece)
        return piece

    def flush(self) -> str:
        """The text that is left when no more tokens come: replacement characters for an incomplete character."""
        if self._texts.falls_back:
            return INCOMPLETE * len(self._pending)
        return utf_8_decode(self._pending, "replace", True)[0]  # each leading byte of a cut-off surrogate becomes one

    def _piece(self, token_id: int) -> str | bytes:
        piece = self._texts.known.get(token_id)
        return self._texts.learn(token_id) if piece is None else piece

    def _complete(self, piece: str | bytes) -> str:
        """The text that a byte-level token completes. Invalid UTF-8 becomes replacement characters as soon as it is
        certain to be invalid."""
        data = self._pending + (piece.encode() if isinstance(piece, str) else piece)
        if self._pending:
            self.begins += len(utf_8_decode(data[: len(self._pending) + 1], "replace", True)[0]) - 1
        text, read = utf_8_decode(data, "replace", False)
        self._pending = data[read:]
        self.plain = NOTHING if self._pending else self._texts.plain
        return text

    def _fall_back(self, piece: str | bytes) -> str:
        """The text that a token completes which is text or a single fallback byte. A run of bytes that is not valid
        UTF-8 becomes one replacement character per byte."""
        data = self._pending
        if isinstance(piece, str):
            text = INCOMPLETE * len(data) + piece
            self.begins += len(data)
            self._pending, self._spoiled = b"", False
        elif self._spoiled:
            text = INCOMPLETE
        else:
            try:
                text, read = utf_8_decode(data + piece, "strict", False)
                self._pending = (data + piece)[read:]
            except UnicodeDecodeError:
                text = INCOMPLETE * len(data + piece)
                self.begins += len(data)
                self._pending, self._spoiled = b"", True
        if text:
            text, self._strip = text.removeprefix(self._strip), ""
        self.plain = NOTHING if self._pending or self._spoiled or self._strip else self._texts.plain
        return text


class ContextDetokenizer:
    """A detokenizer for decoders that decode a token differently depending on the tokens around it.

    It keeps two offsets into the tokens: those before ``_read`` have been shown, and decoding starts at ``_prefix``, a
    little earlier, so that the decoder sees the tokens before the new ones.
    """

    plain = NOTHING

    def __init__(self, texts: TokenTexts, prompt_token_ids: Sequence[int]) -> None:
        self._decode = texts.decode
        self._skipped = texts.skipped
        # One invalid byte makes some decoders replace its neighbors, too, so decoding has to start where a character
        # begins. A prompt may also end inside a character; the whole character is then new text.
        last = [i for i in prompt_token_ids[-RECENT:] if i not in texts.skipped]
        parts = [last[-n:] for n in range(CONTEXT, CONTEXT + MOST_BYTES)]
        ends = [(ids, max(0, len(ids) - n)) for n in range(MOST_BYTES) for ids in parts]
        whole = ((ids, read) for ids, read in ends if texts.are_whole(ids[:read]))
        self._ids, self._read = next(whole, ends[0])
        self._prefix = 0
        self._shown = self._decode(self._ids[: self._read])
        """The text of the tokens from ``_prefix`` to ``_read``."""
        self.length = self.begins = 0

    def push(self, token_id: int) -> str:
        self.begins = self.length
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        if self._read < len(self._ids) - 2 * MOST_BYTES and self._incomplete(self._ids[-2 * MOST_BYTES :]):
            return ""  # still invalid after many bytes: do not decode all of them again for every token
        text = self._decode(self._ids[self._prefix :])
        if text.endswith(INCOMPLETE) or len(text) <= len(self._shown):
            return ""
        new = text[len(self._shown) :]
        self._prefix, self._read = self._read, len(self._ids)
        self._shown = self._decode(self._ids[self._prefix :])
        self.length += len(new)
        return new

    def flush(self) -> str:
        text = self._decode(self._ids[self._prefix :])
        if not text.startswith(self._shown):  # the decoder has replaced shown characters because of what follows them
            return self._decode(self._ids[self._read :])
        return text[len(self._shown) :]

    def _incomplete(self, token_ids: Sequence[int]) -> bool:
        return self._decode(token_ids).endswith(INCOMPLETE)


class StopFinder:
    """Looks for stop strings, and holds back text that may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to show, the stop string that was found or None). After a stop string nothing more is shown.

        The stop string that is complete first counts; of several that end together, the longest. So the outcome does
        not depend on how the text is cut into pieces."""
        if not self._stops:
            return text, None
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, stop = min(found)
            self._held = ""
            return text[:at], stop
        longest = max(map(len, self._stops)) - 1
        keep = next((n for n in range(min(longest, len(text)), 0, -1) if self._may_begin(text[-n:])), 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _may_begin(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self._stops)


class TextStream:
    """Detokenizer and stop strings of one request."""

    def __init__(self, texts: TokenTexts, prompt_token_ids: Sequence[int], stops: Sequence[str]) -> None:
        self._detokenizer = texts.follow(prompt_token_ids)
        self._stops = StopFinder(stops)
        self.decode = self._detokenizer.push
        """The text that a token adds."""
        self.find = self._stops.push if stops else None
        """(text to show, the stop string that was found or None), from the text that a token adds; None if all text is
        to be shown."""

    @property
    def plain(self) -> dict[int, str]:
        """The texts of tokens that need neither ``decode`` nor ``find``. Each call of these may change it."""
        return NOTHING if self.find else self._detokenizer.plain

    def flush(self) -> tuple[str, str | None]:
        """As ``find``, for the text that is left when no more tokens come."""
        text, stop = self._stops.push(self._detokenizer.flush())
        return text + self._stops.flush(), stop
