"""Single tokens as clients see them in log-probabilities."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer

from infer.engine.text import BYTE_OF, FALLBACK_BYTE


class Tokens:
    """Text and bytes of a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._byte_level = "ByteLevel" in repr(tokenizer.decoder)
        self.text = functools.lru_cache(1 << 16)(self._text)

    def _text(self, token_id: int) -> str:
        """What the token says on its own, with replacement characters where it is a part of a character."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def bytes(self, token_id: int) -> list[int]:
        """What it stands for, exactly."""
        piece = self._tokenizer.id_to_token(token_id) or ""
        if token_id not in self._added:
            if self._byte_level:
                return [BYTE_OF[character] for character in piece if character in BYTE_OF]
            if found := FALLBACK_BYTE.fullmatch(piece):
                return [int(found[1], 16)]
        return list(self.text(token_id).encode())
