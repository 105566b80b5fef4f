"""Single tokens as clients see them in log-probabilities."""

from __future__ import annotations

import functools
import json

from tokenizers import Tokenizer

from infer.text.detokenizer import BYTE_OF, FALLBACK_BYTE

LOWEST = -9999.0
"""What is said of a token that cannot come, as OpenAI says it: JSON has no infinity."""
KEPT = 1 << 16
"""Tokens whose text is remembered."""


class Tokens:
    """Text and bytes of a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._byte_level = "ByteLevel" in repr(tokenizer.decoder)
        self.text = functools.lru_cache(KEPT)(self._text)
        self.quoted = functools.lru_cache(KEPT)(self._quoted)
        self._entry = functools.lru_cache(KEPT)(self._around)

    def _text(self, token_id: int) -> str:
        """What the token says on its own, with replacement characters where it is a part of a character."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def _quoted(self, token_id: int) -> str:
        """``text`` as JSON."""
        return json.dumps(self.text(token_id), ensure_ascii=False)

    def bytes(self, token_id: int) -> list[int]:
        """What it stands for, exactly."""
        piece = self._tokenizer.id_to_token(token_id) or ""
        if token_id not in self._added:
            if self._byte_level:
                return [BYTE_OF[character] for character in piece if character in BYTE_OF]
            if found := FALLBACK_BYTE.fullmatch(piece):
                return [int(found[1], 16)]
        return list(self.text(token_id).encode())

    def entry(self, token_id: int, logprob: float, more: str = "") -> str:
        """As JSON: the token, its log-probability and its bytes; and ``more``, members that begin with a comma."""
        before, after = self._entry(token_id)
        return f"{before}{number(logprob)}{after}{more}}}"

    def _around(self, token_id: int) -> tuple[str, str]:
        return f'{{"token": {self.quoted(token_id)}, "logprob": ', f', "bytes": {self.bytes(token_id)}'


def number(logprob: float) -> str:
    """As JSON."""
    return repr(max(logprob, LOWEST))
