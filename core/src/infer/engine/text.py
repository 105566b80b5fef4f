"""Tokens to text, as it comes: characters are never split, and nothing is shown that a stop string may take back."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

CONTEXT = 4
"""Prompt tokens decoded along with the first new one, for decoders that treat the start of a text differently."""
INCOMPLETE = "\ufffd"


class Detokenizer:
    """Text of a growing list of tokens.

    Keeps two offsets: what lies before ``_read`` is shown, and decoding starts at ``_prefix``, a little earlier, so
    that the decoder sees the new tokens in company.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_token_ids[-CONTEXT:])
        self._prefix, self._read = 0, len(self._ids)
        # A prompt may end inside a character; what completes it is new text.
        self._shown = self._decode(0).rstrip(INCOMPLETE)

    def push(self, token_id: int) -> str:
        """The text that the token completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        text = self._decode(self._prefix)
        if text.endswith(INCOMPLETE) or len(text) <= len(self._shown):
            return ""
        new = text[len(self._shown) :]
        self._prefix, self._read = self._read, len(self._ids)
        self._shown = self._decode(self._prefix)
        return new

    def flush(self) -> str:
        """What is left when no more tokens come, replacement characters and all."""
        text = self._decode(self._prefix)[len(self._shown) :]
        self._prefix = self._read = len(self._ids)
        self._shown = ""
        return text

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:], skip_special_tokens=True)


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

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids)
        self._stops = StopFinder(stops)

    def push(self, token_id: int) -> tuple[str, str | None]:
        """(text to show, the stop string that was met or None)."""
        return self._stops.push(self._detokenizer.push(token_id))

    def flush(self) -> tuple[str, str | None]:
        """The same for what is left at the end."""
        text, stop = self._stops.push(self._detokenizer.flush())
        return text + self._stops.flush(), stop
