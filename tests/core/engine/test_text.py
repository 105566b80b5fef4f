"""Text as it comes: never half a character, never what a stop string takes back."""

from __future__ import annotations

import functools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from infer.engine.text import Detokenizer, StopFinder, TextStream


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


def pieces(prompt: list[int], ids: list[int]) -> list[str]:
    stream = Detokenizer(tokenizer(), prompt)
    found = [stream.push(i) for i in ids]
    assert not any(piece.endswith("\ufffd") for piece in found)
    return [*found, stream.flush()]


texts = st.text(st.sampled_from("ab \n(é中文😀👩‍👧\u0301字"), max_size=30)


@settings(max_examples=200, deadline=None)
@given(texts, texts)
def test_pieces_of_text_add_up_and_no_character_is_split(before: str, text: str) -> None:
    prompt, ids = tokenizer().encode(before).ids, tokenizer().encode(text).ids
    assert "".join(pieces(prompt, ids)) == text


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
    stream = TextStream(tokenizer(), [], ["\ufffd"])
    shown = "".join(stream.push(i)[0] for i in ids[:-1])
    rest, stop = stream.flush()
    assert (shown + rest, stop) == ("a", "\ufffd")
