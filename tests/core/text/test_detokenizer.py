"""Streamed text never contains half a character, nor anything that a stop string removes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from infer.text.detokenizer import StopFinder, TextStream, TokenTexts


@functools.cache
def tokenizer() -> Tokenizer:
    """Byte-level, so small that most characters outside ASCII take several tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        ["def f(x): return x\n" * 5, "the quick brown fox"],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return made


@functools.cache
def with_byte_fallback(strip: bool) -> Tokenizer:
    """Characters, and bytes for those that it does not know; Llama 2's decoder strips a text's first space."""
    words = ["<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdef()", "ab", "▁a"]
    merges = [("a", "b"), ("▁", "a")]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    made.add_special_tokens(["<eos>"])
    return made


@functools.cache
def in_company() -> Tokenizer:
    """The same in an order that nobody uses, so that single tokens say nothing of many."""
    made = Tokenizer.from_str(with_byte_fallback(False).to_str())
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")])
    return made


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": tokenizer,
    "byte fallback": lambda: with_byte_fallback(False),
    "stripping": lambda: with_byte_fallback(True),
    "in company": in_company,
}
every_kind = pytest.mark.parametrize("kind", TOKENIZERS)


@functools.cache
def texts_of(kind: str = "byte-level") -> TokenTexts:
    return TokenTexts(TOKENIZERS[kind]())


def pieces(prompt: list[int], ids: list[int], kind: str = "byte-level") -> list[str]:
    stream = texts_of(kind).follow(prompt)
    found = [stream.push(i) for i in ids]
    return [*found, stream.flush()]


def clean(kind: str, ids: list[int]) -> str:
    """The whole decode of as many of the first tokens as are whole characters."""
    decode = TOKENIZERS[kind]().decode
    ends = (decode(ids[:n]) for n in range(len(ids), -1, -1))
    return next(text for text in ends if "\ufffd" not in text)


texts = st.text(st.sampled_from("ab \n(é中文😀👩‍👧\u0301字"), max_size=30)


@every_kind
@settings(max_examples=examples(300, 75))
@example("a中", 2, [])
@example("中文字字", 11, [])
@example(" a b", 0, [])
@given(texts, st.integers(0, 60), st.lists(st.integers(0, 60), max_size=3))
def test_a_stream_is_the_whole_decode_wherever_the_prompt_ends(
    kind: str, text: str, cut: int, specials: list[int]
) -> None:
    """Characters are never split, and a token begins where its character does in the text of the stream."""
    ids = TOKENIZERS[kind]().encode(text).ids
    for at in specials:
        ids.insert(min(at, len(ids)), 0)
    cut = min(cut, len(ids))
    whole, before = TOKENIZERS[kind]().decode(ids), clean(kind, ids[:cut])
    stream = texts_of(kind).follow(ids[:cut])
    found = ""
    for i in range(cut, len(ids)):
        found += stream.push(ids[i])
        assert "\ufffd" not in found
        assert stream.begins == len(clean(kind, ids[:i])) - len(before)
        assert stream.length == len(found)
    assert stream.flush() == ""
    assert before + found == whole


def runs(ids: list[int]) -> list[list[int]]:
    """Tokens of the tokenizers with byte fallback, bytes that follow upon each other together."""
    found: list[list[int]] = []
    for i in filter(None, ids):
        if found and 1 <= i <= 256 and 1 <= found[-1][0] <= 256:
            found[-1].append(i)
        else:
            found.append([i])
    return found


def first_fault(run: list[int]) -> int:
    """How many bytes of a run are whole characters."""
    data = bytes(i - 1 for i in run)
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(data)


BYTES = [*(1 + byte for byte in "a中é😀\ufffd".encode()), 0x81, 0xC1, 0xF9]


@pytest.mark.parametrize("kind", ["byte fallback", "stripping", "in company"])
@settings(max_examples=examples(500, 125))
@given(st.lists(st.sampled_from([0, 257, 258, *BYTES]), max_size=24))
def test_bytes_that_are_no_text_are_replaced_as_the_whole_decode_does(kind: str, ids: list[int]) -> None:
    """Of a run that is no UTF-8 it replaces every byte; what the stream has shown of it by then stays."""
    found, expected, whole = "".join(pieces([], ids, kind)), "", True
    for run in runs(ids):
        if run[0] <= 256:
            data = bytes(i - 1 for i in run)
            good = first_fault(run)
            expected += data[:good].decode() + "\ufffd" * (len(data) - good)
            whole = whole and good in (0, len(data))
        else:
            expected += " a"[run[0] - 257]
    if whole:
        assert found == TOKENIZERS[kind]().decode(ids)
    if kind != "in company":
        assert found == (expected.removeprefix(" ") if kind == "stripping" else expected)


@settings(max_examples=examples(500, 125))
@example([1 + 0xE4, 1 + 0xB8, 1 + 0xE4])
@given(st.lists(st.integers(0, 299), max_size=40))
def test_any_byte_level_tokens_are_the_whole_decode_and_begin_where_their_first_byte_is(ids: list[int]) -> None:
    made = tokenizer()
    stream = texts_of().follow([])
    found = ""
    for i, token in enumerate(ids):
        found += stream.push(token)
        if token and (piece := made.id_to_token(token)):
            byte = made.token_to_id(piece[0])
            assert byte is not None
            assert stream.begins == len(made.decode([*ids[:i], byte])) - 1
    assert found + stream.flush() == made.decode(ids)


@every_kind
def test_a_long_run_of_invalid_bytes_takes_no_longer_per_token(kind: str) -> None:
    texts = TokenTexts(TOKENIZERS[kind]())
    decode, decoded = texts.decode, 0

    def count(ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids)

    texts.decode = count  # type: ignore[assignment]
    (bad,) = [i for i in range(300) if TOKENIZERS[kind]().id_to_token(i) in ("<0x80>", "\u0122")]
    (end,) = TOKENIZERS[kind]().encode("a").ids
    ids = [*[bad] * 2000, end]
    stream = texts.follow([])
    assert "".join(map(stream.push, ids)) + stream.flush() == decode(ids)
    assert decoded < 30 * len(ids)


def test_which_decoders_join_texts_end_to_end() -> None:
    ends = {kind: texts_of(kind).end_to_end for kind in TOKENIZERS}
    assert ends == {"byte-level": True, "byte fallback": True, "stripping": True, "in company": False}
    assert not TokenTexts(Tokenizer(models.BPE({"a": 0}, []))).end_to_end, "no decoder puts spaces between tokens"
    assert texts_of("byte fallback").learn(1 + 0xE2) == b"\xe2", "part of a character"
    assert texts_of("stripping").learn(with_byte_fallback(True).encode(" a").ids[0]) == " a"


def test_tokens_that_were_added_and_ids_that_the_tokenizer_lacks() -> None:
    """A decoder takes an added token's characters for bytes where all of them might be."""
    made = Tokenizer.from_str(tokenizer().to_str())
    made.add_tokens(["<call>", "é", "é x"])
    ids = [*made.encode("fox").ids, *range(300, 303), 999, *made.encode("fox").ids]
    stream = TokenTexts(made).follow([])
    assert "".join(map(stream.push, ids)) == made.decode(ids)


def test_special_tokens_are_not_shown_unless_asked_for() -> None:
    ids = [*tokenizer().encode("fox").ids, 0]
    assert "".join(pieces([], ids)) == "fox"
    stream = TokenTexts(tokenizer(), skip_special_tokens=False).follow([])
    assert "".join(map(stream.push, ids)) == "fox<eos>"


WHOLE: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "WordPiece": (models.WordPiece, decoders.WordPiece(), ("a", "##b", "\ufffd", "##\ufffd")),
    "Metaspace": (models.WordLevel, decoders.Metaspace(), ("▁a", "b", "\ufffd", "▁\ufffd")),
    "bytes": (
        *(models.WordLevel, decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")])),
        ("▁a", "b", "\ufffd", "▁\ufffd"),
    ),
}
"""Models and decoders of vocabularies that have U+FFFD as a token."""


@pytest.mark.parametrize("kind", WHOLE)
def test_a_replacement_character_of_the_prompt_is_not_repeated(kind: str) -> None:
    model, decoder, words = WHOLE[kind]
    made = Tokenizer(model({word: i for i, word in enumerate(("[UNK]", *words))}, unk_token="[UNK]"))
    made.decoder = decoder
    texts = TokenTexts(made)
    for prompt in itertools.chain.from_iterable(itertools.product(range(1, 5), repeat=n) for n in range(5)):
        for ids in ([1, 2], [3, 2], [1, 4]):
            stream = texts.follow(prompt)
            found = "".join(map(stream.push, ids)) + stream.flush()
            assert found == made.decode([*prompt, *ids])[len(made.decode(list(prompt))) :], prompt


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the stop that completes first; of those that end together, the one that began first."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=examples(500, 125))
@example("aabcc", ["abc", "b"], [5])
@example("aabcc", ["ab", "b"], [5])
@given(
    st.text("abc", max_size=25),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=4, unique=True),
    st.lists(st.integers(1, 5), min_size=1, max_size=25),
)
def test_the_stop_does_not_depend_on_how_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    finder = StopFinder(stops)
    shown, at, stop = "", 0, None
    for cut in [*cuts, len(text)]:
        more, stop = finder.push(text[at : at + cut])
        shown, at = shown + more, at + cut
        assert text.startswith(shown)
        if stop:
            break
    if stop is None:
        shown += finder.flush()
    assert (shown, stop) == first_stop(text, stops)


@pytest.mark.parametrize(("stops", "held"), [(["xyz"], "xy"), (["zz", "xyq"], "xy"), (["y"], None)])
def test_only_what_may_begin_a_stop_is_held_back(stops: list[str], held: str | None) -> None:
    shown, stop = StopFinder(stops).push("abxy")
    if held is None:
        assert (shown, stop) == ("abx", "y")
    else:
        assert (shown, stop) == ("ab", None)


def test_nothing_is_held_that_cannot_begin_a_stop_any_more() -> None:
    assert StopFinder(["xyz"]).push("abxq") == ("abxq", None)
    finder = StopFinder(["xyz"])
    assert [finder.push(text) for text in ("abxy", "q", "xy", "z")] == [
        ("ab", None),
        ("xyq", None),
        ("", None),
        ("", "xyz"),
    ]


def test_a_stop_that_only_the_flush_completes() -> None:
    ids = tokenizer().encode("a中").ids
    stream = TextStream(texts_of(), [], ["\ufffd"])
    assert stream.find is not None
    shown = "".join(stream.find(stream.decode(i))[0] for i in ids[:-1])
    rest, stop = stream.flush()
    assert (shown + rest, stop) == ("a", "\ufffd")


some_stops = st.lists(st.text(st.sampled_from("ab( :xé中"), min_size=1, max_size=3), max_size=3, unique=True)


@settings(max_examples=examples(1000, 250))
@example([170, 95], "", [])  # two bytes of a surrogate: no beginning of a character
@given(st.lists(st.integers(1, 299), max_size=30), st.text(st.sampled_from("ab (x:é中😀"), max_size=12), some_stops)
def test_what_is_streamed_is_what_the_whole_would_be(noise: list[int], text: str, stops: list[str]) -> None:
    """Any bytes, characters of several tokens, and stops across all of it."""
    ids = [*noise, *tokenizer().encode(text).ids]
    stream = TextStream(texts_of(), [], stops)
    shown, stop = "", None
    for token in ids:
        more = stream.decode(token)
        if stream.find is not None:
            more, stop = stream.find(more)
        shown += more
        if stop is not None:
            break
    else:
        more, stop = stream.flush()
        shown += more
    assert (shown, stop) == first_stop(tokenizer().decode(ids), stops)
