"""Tokens to text, as it comes: characters are never split, and nothing is shown that a stop string may take back."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

from tokenizers import Tokenizer

CONTEXT = 4
"""Prompt tokens decoded along with the first new one, for decoders that treat the start of a text differently."""
INCOMPLETE = "\ufffd"
MOST_BYTES = 4
"""Of a character in UTF-8."""


class TokenTexts:
    """A tokenizer's decoder, and what it makes of single tokens where the text of many is theirs end to end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
        self._end_to_end = _steps(tokenizer) in (["ByteLevel"], ["Replace", "ByteFallback", "Fuse"])
        self.known: dict[int, str] = {}
        """What tokens add after whole characters, so far as it is known."""

    def learn(self, token_id: int) -> str | None:
        """What the token adds after whole characters; None where only decoding it in company can say."""
        text = self.decode([token_id]) if self._end_to_end else INCOMPLETE
        if INCOMPLETE in text:
            return None
        self.known[token_id] = text
        return text


def _steps(tokenizer: Tokenizer) -> list[str]:
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    return [step["type"] for step in state.get("decoders", [state])]


class Detokenizer:
    """Text of a growing list of tokens.

    Keeps two offsets: what lies before ``_read`` is shown, and decoding starts at ``_prefix``, a little earlier, so
    that the decoder sees the new tokens in company.
    """

    def __init__(self, texts: TokenTexts, prompt_token_ids: Sequence[int]) -> None:
        self._decode = texts.decode
        self._known = texts.known
        self._learn = texts.learn
        # One bad byte makes some decoders replace its neighbours too: the part begins where a character does.
        starts = range(CONTEXT, CONTEXT + MOST_BYTES)
        parts = [list(prompt_token_ids[-n:]) for n in starts]
        self._ids = next((ids for ids in parts if not self._decode(ids).startswith(INCOMPLETE)), parts[0])
        self._prefix, self._read = 0, len(self._ids)
        # A prompt may end inside a character; what completes it is new text.
        ends = (self._decode(self._ids[: len(self._ids) - n]) for n in range(MOST_BYTES))
        found = next(((n, text) for n, text in enumerate(ends) if not text.endswith(INCOMPLETE)), (MOST_BYTES, ""))
        self._whole, self._shown = found[0] == 0, found[1]
        """Whether no character is incomplete; the text of what lies from ``_prefix`` to ``_read``."""

    def push(self, token_id: int) -> str:
        """The text that the token completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        if self._whole:
            alone = self._known.get(token_id)
            if alone is not None or (alone := self._learn(token_id)) is not None:
                self._prefix, self._read, self._shown = self._read, len(self._ids), alone
                return alone
        text = self._decode(self._ids[self._prefix :])
        self._whole = not text.endswith(INCOMPLETE)
        if not self._whole or len(text) <= len(self._shown):
            return ""
        new = text[len(self._shown) :]
        self._prefix, self._read = self._read, len(self._ids)
        self._shown = self._decode(self._ids[self._prefix :])
        return new

    def flush(self) -> str:
        """What is left when no more tokens come, replacement characters and all."""
        text = self._decode(self._ids[self._prefix :])
        if not text.startswith(self._shown):  # replaced along with what came after it
            return self._decode(self._ids[self._read :])
        return text[len(self._shown) :]


class StopFinder:
    """Holds back text that may turn out to begin a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to show, the stop string that was met or None). After a stop nothing more is shown.

        The stop that completes first counts, the longest of those that end together: so the outcome does not depend on
        how the text comes in pieces.
        """
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
        self._detokenizer = Detokenizer(texts, prompt_token_ids)
        self._detokenize = self._detokenizer.push
        self._stops = StopFinder(stops)
        self._stoppable = bool(stops)

    def push(self, token_id: int) -> tuple[str, str | None]:
        """(text to show, the stop string that was met or None)."""
        text = self._detokenize(token_id)
        return self._stops.push(text) if self._stoppable else (text, None)

    def flush(self) -> tuple[str, str | None]:
        """The same for what is left at the end."""
        text, stop = self._stops.push(self._detokenizer.flush())
        return text + self._stops.flush(), stop
