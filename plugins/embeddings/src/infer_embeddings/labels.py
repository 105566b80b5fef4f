"""The tokens of labels, for endpoints that answer from the probabilities of labels."""

from __future__ import annotations

from tokenizers import Tokenizer

from infer.errors import RequestError

TAIL_CHARS = 32
"""How many of a prompt's last characters say which token a label begins with."""


def label_ids(tokenizer: Tokenizer, tail: str, labels: tuple[str, ...]) -> tuple[int, ...]:
    """The first token of each label when it follows a text. Raises RequestError if two labels share one."""
    before = tokenizer.encode(tail, add_special_tokens=False).ids
    ids = []
    for label in labels:
        after = tokenizer.encode(tail + label, add_special_tokens=False).ids
        goes_on = after[: len(before)] == before and len(after) > len(before)
        ids.append(after[len(before)] if goes_on else tokenizer.encode(label, add_special_tokens=False).ids[0])
    if len(set(ids)) < len(ids):
        raise RequestError(f"This model's tokenizer begins several of the labels {', '.join(labels)} with one token.")
    return tuple(ids)
