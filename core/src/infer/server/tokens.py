"""Single tokens as clients see them in log-probabilities."""

from __future__ import annotations

import functools
import re

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


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
                return [_BYTE_OF[character] for character in piece if character in _BYTE_OF]
            if found := _BYTE.fullmatch(piece):
                return [int(found[1], 16)]
        return list(self.text(token_id).encode())


def _byte_characters() -> dict[str, int]:
    """The characters by which byte-level tokenizers (GPT-2, 2019) write bytes: printable ones stand for themselves, the
    others for characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
