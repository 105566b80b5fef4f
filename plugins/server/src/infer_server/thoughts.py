"""Which tokens of an answer are reasoning."""

from __future__ import annotations

import codecs

from infer.contracts.text import ReasoningTags
from infer_server.tokens import Tokens


class Thoughts:
    """Tells which tokens of an answer are reasoning, including its tags, however the tokens divide the tags. As in
    ``make_parser``, reasoning comes before everything else. ``within`` means that the prompt ends with the opening
    tag."""

    def __init__(self, tokens: Tokens, tags: ReasoningTags, within: bool) -> None:
        self.count = 0
        """How many tokens were reasoning so far."""
        self._tokens = tokens
        self._opening, self._closing = tags.opening.encode(), tags.closing.encode()
        self._within = within
        self._over = False
        self._tail = b""
        self._reader = None if tags.reader is None else tags.reader({})
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> bool:
        """Whether ``token_id``, the answer's next token, is reasoning."""
        if self._reader is not None:
            for piece in self._reader.push(self._decode(bytes(self._tokens.bytes(token_id)))):
                self._within = piece.kind == "reasoning"
            self.count += self._within
            return self._within
        thought = self._within
        self._tail += b"" if self._over else bytes(self._tokens.bytes(token_id))
        while not self._over:
            if self._within:
                _, closed, rest = self._tail.partition(self._closing)
                if not closed:
                    self._tail = self._tail[1 - len(self._closing) :]
                    break
                self._within, self._tail = False, rest
            else:
                text = self._tail = self._tail.lstrip()
                if not text.startswith(self._opening):
                    self._over = not self._opening.startswith(text)
                    break
                self._within, self._tail = True, text.removeprefix(self._opening)
                thought = True
        self.count += thought
        return thought
