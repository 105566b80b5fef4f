"""Texts become the tokenizer's token ids, or are refused before they are encoded."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, Encoding, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from infer.text.encoding import Encoder, TooLongError

DEMO = Path(__file__).parents[3] / "plugins/demo/src/infer_demo/checkpoint/tokenizer.json"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(**model: object) -> Tokenizer:
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("a", "b"), ("ab", "ab"), ("\u0120", "\u0120")]
    vocab = alphabet | {a + b: len(alphabet) + i for i, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, **model))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    vocab = {letter: i for i, letter in enumerate([*BYTES, "<unk>", "\u2581", "a", "b", "ab"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("a", "b")], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return tokenizer


def composed() -> Tokenizer:
    """Its longest token is one character of three bytes, which may be written as four that compose."""
    (word,) = [piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("\u1f82")]
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [(word[0], word[1]), (word[:2], word[2])]
    tokenizer = Tokenizer(models.BPE(vocab | {a + b: 256 + i for i, (a, b) in enumerate(merges)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


TEXTS = [
    "",
    "ab" * 50,
    " " * 99,
    "ab ab\n",
    "\u00e9\u20ac\U0001f600" * 9,
    "e\u0301" * 40,
    "\u1100\u1161\u11a8" * 30,
    "\u03b1\u0313\u0300\u0345" * 25,
    "\x00",
]


@pytest.mark.parametrize("make", [byte_level, byte_fallback, composed, lambda: Tokenizer.from_file(str(DEMO))])
def test_what_is_refused_early_is_too_long(make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    encoder = Encoder(tokenizer)
    draw = random.Random(0)
    refused = 0
    for text in [*TEXTS, *("".join(draw.choices(TEXTS, k=5)) for _ in range(100))]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        for most in (0, 1, len(ids) - 1, len(ids), len(ids) + 1):
            if len(ids) <= most:
                assert encoder(text, special=False, most=most) == ids
            else:
                with pytest.raises(TooLongError) as raised:
                    encoder(text, special=False, most=most)
                early = raised.value.count.startswith("at least")
                refused += early
                assert early or raised.value.count == str(len(ids))
    assert refused > 50


def test_ids_may_have_gaps() -> None:
    letters = {letter: 7 * i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters | {"ab": 5000, "abab": 9000}, [("a", "b"), ("ab", "ab")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder = Encoder(tokenizer)
    assert encoder("abab" * 3, special=False, most=3) == [9000] * 3
    with pytest.raises(TooLongError, match="at least 4 tokens"):
        encoder("abab" * 4, special=False, most=3)


def test_no_start_waits_for_the_longest_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.text.encoding._tokens", None)
    assert len(Encoder(byte_level())("ab" * 4, special=False, most=8)) == 2


def unknown() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def swallowing() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|x|>", rstrip=True)])
    return tokenizer


def removing() -> Tokenizer:
    tokenizer = byte_level()
    steps = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def stripping() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("  ", " "), normalizers.Strip()])
    return tokenizer


def dropping() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def cutting() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    return tokenizer


def fusing() -> Tokenizer:
    return Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], fuse_unk=True, unk_token="<unk>"))


@pytest.mark.parametrize("make", [unknown, swallowing, removing, stripping, dropping, cutting, fusing])
def test_where_a_token_may_stand_for_any_text_nothing_is_refused_early(make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    text = "<|x|>" * (make is swallowing) + ("z" * 5000 if make in (unknown, dropping, fusing) else " " * 5000)
    encoder = Encoder(tokenizer)
    ids = tokenizer.encode(text).ids
    assert encoder(text, special=True, most=max(4999, len(ids))) == ids
    if len(ids) < 10:
        assert encoder(text, special=True, most=10) == ids


def test_special_tokens_are_as_asked() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<s>"])
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    encoder = Encoder(tokenizer)
    assert encoder("abab", special=True, most=9) == [start, *encoder("abab", special=False, most=9)]


def test_what_is_refused_does_not_stay_in_the_errors_traceback() -> None:
    encode = Encoder(byte_level())
    with pytest.raises(TooLongError, match="30 tokens") as caught:
        encode("b" * 30, special=False, most=29)
    held = [value for entry in caught.traceback for value in entry.frame.f_locals.values()]
    assert not [value for value in held if isinstance(value, Encoding)]
