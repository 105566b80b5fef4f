"""Text as it comes: never half a character, never what a stop string takes back."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from infer.engine.text import Detokenizer, StopFinder, TextStream, TokenTexts


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


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": tokenizer,
    "byte fallback": lambda: with_byte_fallback(False),
    "stripping": lambda: with_byte_fallback(True),
}
every_kind = pytest.mark.parametrize("kind", TOKENIZERS)


@functools.cache
def texts_of(kind: str = "byte-level") -> TokenTexts:
    return TokenTexts(TOKENIZERS[kind]())


def pieces(prompt: list[int], ids: list[int], kind: str = "byte-level") -> list[str]:
    stream = Detokenizer(texts_of(kind), prompt)
    found = [stream.push(i) for i in ids]
    assert not any(piece.endswith("\ufffd") for piece in found)
    return [*found, stream.flush()]


texts = st.text(st.sampled_from("ab \n(é中文😀👩‍👧\u0301字"), max_size=30)


@every_kind
@settings(max_examples=200, deadline=None)
@given(texts, texts)
def test_pieces_of_text_add_up_and_no_character_is_split(kind: str, before: str, text: str) -> None:
    encode = TOKENIZERS[kind]().encode
    prompt, ids = encode(before).ids, encode(text).ids
    found = "".join(pieces(prompt, ids, kind))
    assert found == text if kind != "stripping" else found.lstrip(" ") == text.lstrip(" ")


@every_kind
@settings(max_examples=200, deadline=None)
@given(texts, st.lists(st.booleans()))
def test_tokens_alone_stand_for_what_they_are_in_company(kind: str, text: str, skip: list[bool]) -> None:
    """A stream that may take tokens one by one yields what one does that decodes them in company."""
    ids = TOKENIZERS[kind]().encode(text).ids
    for at in range(min(len(skip), len(ids)), 0, -1):
        if skip[at - 1]:
            ids.insert(at, 0)  # a special token
    in_company = TokenTexts(TOKENIZERS[kind]())
    in_company._end_to_end = False
    one, other = (Detokenizer(texts, []) for texts in (texts_of(kind), in_company))
    assert [one.push(i) for i in ids] == [other.push(i) for i in ids]
    assert one.flush() == other.flush()


def test_which_decoders_join_texts_end_to_end() -> None:
    ids = {kind: make().encode("ab").ids[0] for kind, make in TOKENIZERS.items()}
    assert {kind: texts_of(kind).learn(i) for kind, i in ids.items()} == {
        "byte-level": "a",
        "byte fallback": "ab",
        "stripping": None,
    }
    assert TokenTexts(Tokenizer(models.BPE({"a": 0}, []))).learn(0) is None, "no decoder puts spaces between tokens"
    assert texts_of("byte fallback").learn(1 + 0xE2) is None, "part of a character"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 299), max_size=40))
def test_pieces_of_any_tokens_add_up_to_the_whole(ids: list[int]) -> None:
    """Random bytes are no UTF-8; the stream shows the replacement characters that the whole has."""
    assert "".join(pieces([], ids)) == tokenizer().decode(ids)


def test_a_prompt_that_ends_inside_a_character() -> None:
    ids = tokenizer().encode("é").ids
    assert len(ids) == 2
    assert "".join(pieces([*tokenizer().encode("ab").ids, ids[0]], [ids[1]])) == "é"


def test_special_tokens_are_not_shown() -> None:
    assert "".join(pieces([], [*tokenizer().encode("fox").ids, 0])) == "fox"


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the stop that completes first; of those that end together, the one that began first."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
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


def test_a_stop_that_only_the_flush_completes() -> None:
    ids = tokenizer().encode("a中").ids
    stream = TextStream(texts_of(), [], ["\ufffd"])
    shown = "".join(stream.push(i)[0] for i in ids[:-1])
    rest, stop = stream.flush()
    assert (shown + rest, stop) == ("a", "\ufffd")


some_stops = st.lists(st.text(st.sampled_from("ab( :xé中"), min_size=1, max_size=3), max_size=3, unique=True)


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.integers(1, 299), max_size=30), st.text(st.sampled_from("ab (x:é中😀"), max_size=12), some_stops)
def test_what_is_streamed_is_what_the_whole_would_be(noise: list[int], text: str, stops: list[str]) -> None:
    """Any bytes, characters of several tokens, and stops across all of it."""
    ids = [*noise, *tokenizer().encode(text).ids]
    stream = TextStream(texts_of(), [], stops)
    shown, stop = "", None
    for token in ids:
        more, stop = stream.push(token)
        shown += more
        if stop is not None:
            break
    else:
        more, stop = stream.flush()
        shown += more
    assert (shown, stop) == first_stop(tokenizer().decode(ids), stops)
