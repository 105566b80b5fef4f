"""The text and bytes of single tokens, as clients get them with log-probabilities."""

from __future__ import annotations

import builtins
import functools
import json

from tokenizers import Tokenizer

from infer.contracts.request import TokenLogprobs
from infer.text.detokenizer import BYTE_OF, FALLBACK_BYTE
from infer_server.http.streams import one_line

LOWEST = -9999.0
"""The log-probability reported for impossible tokens, as by OpenAI, because JSON has no infinity."""
KEPT = 1 << 16
"""How many tokens' texts are cached."""


class Tokens:
    """The texts and bytes of a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._byte_level = "ByteLevel" in repr(tokenizer.decoder)
        self.text = functools.lru_cache(KEPT)(self._text)
        self.quoted = functools.lru_cache(KEPT)(self._quoted)
        self._entry = functools.lru_cache(KEPT)(self._around)

    def _text(self, token_id: int) -> str:
        """The text of the token alone, with replacement characters for incomplete characters."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def _quoted(self, token_id: int) -> str:
        """``text`` as JSON."""
        return one_line(json.dumps(self.text(token_id), ensure_ascii=False))

    def bytes(self, token_id: int) -> list[int]:
        """The exact bytes that the token stands for."""
        piece = self._tokenizer.id_to_token(token_id) or ""
        if token_id not in self._added:
            if self._byte_level:
                return [BYTE_OF[character] for character in piece if character in BYTE_OF]
            if byte := FALLBACK_BYTE.fullmatch(piece):
                return [int(byte[1], 16)]
        return list(self.text(token_id).encode())

    def entry(self, token_id: int, logprob: float, more: str = "") -> str:
        """A JSON object with the token, its log-probability and its bytes. ``more`` are further members, each after a
        comma."""
        before, after = self._entry(token_id)
        return f"{before}{number(logprob)}{after}{more}}}"

    def ranked(self, entry: TokenLogprobs) -> builtins.bytes:
        """An entry as JSON, with those of the most likely tokens in it, as chat completions have them."""
        top = ", ".join([self.entry(t, p) for t, p in entry.top])
        return self.entry(entry.token_id, entry.logprob, f', "top_logprobs": [{top}]').encode()

    def _around(self, token_id: int) -> tuple[str, str]:
        return f'{{"token": {self.quoted(token_id)}, "logprob": ', f', "bytes": {self.bytes(token_id)}'


def number(logprob: float) -> str:
    """A log-probability as JSON."""
    return repr(max(logprob, LOWEST))
