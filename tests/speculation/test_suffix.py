"""Drafts from the answers to other requests."""

from __future__ import annotations

import random

import pytest

from infer.contracts.proposer import DraftRequest, LearningProposer
from infer.contracts.request import Request
from infer_speculation.suffix import LONGEST, SIZES, Answers, SuffixProposer, SuffixSettings


def searched(answers: list[list[int]], tokens: list[int]) -> tuple[list[int], int] | None:
    """What follows the last occurrence in an answer of the longest n-gram that the tokens end with, and how many tokens
    before it are the same."""
    for size in SIZES:
        if len(tokens) < size:
            continue
        for answer in reversed(answers):
            for at in range(len(answer) - 1, size - 1, -1):
                if answer[at - size : at] == tokens[-size:]:
                    same = size
                    while same < min(LONGEST, at, len(tokens)) and answer[at - same - 1] == tokens[-same - 1]:
                        same += 1
                    return answer[at:], same
    return None


@pytest.mark.parametrize("vocab", [2, 3, 200_000])
def test_answers_are_found_as_by_searching(vocab: int) -> None:
    draw = random.Random(vocab)
    answers, known = Answers(1 << 24), list[list[int]]()  # by this seed, no two keys are the same
    found = 0
    for _ in range(80):
        answer = [draw.randrange(vocab) for _ in range(draw.randint(0, 60))]
        if known and draw.random() < 0.5:  # a part of another one
            other = draw.choice(known)
            answer[5:5] = other[draw.randint(0, len(other)) :]
        answers.add(answer)
        known.append(answer)
        for _ in range(10):
            chosen = draw.choice(known)
            tokens = [1, 2, *chosen[: draw.randint(0, len(chosen))]]
            at, expected = answers.find(tokens), searched(known, tokens)
            assert (at is None) == (expected is None)
            if at is not None and expected is not None:
                found += 1
                assert (answers.after(at[0], 9), at[1]) == (expected[0][:9], expected[1])
    assert found > 200


def test_the_oldest_answers_are_forgotten() -> None:
    answers = Answers(256)
    known = [[i * 1000 + k for k in range(17 + i % 40)] for i in range(60)]
    for i, answer in enumerate(known):
        answers.add(answer)
        for j in range(i + 1):
            at = answers.find(known[j][:8])
            if at is not None:
                assert answers.after(at[0], 6) == known[j][8:14]
            assert (at is not None) or j < i, "the newest one"
            assert at is None or j > i - 16, "there is no room for so many"
    answers.add([*range(7, 3000)])
    assert answers.find([*range(2000, 2008)]) is None
    at = answers.find([*range(2980, 2990)])
    assert at is not None
    assert answers.after(at[0], 20) == [*range(2990, 3000)]


def propose(
    proposer: SuffixProposer, prompt: list[int], answer: list[int], most: int = 16, salt: str = ""
) -> list[int]:
    request = Request(tuple(prompt), id="r", cache_salt=salt)
    (drafts,) = proposer.propose([DraftRequest(request, [*prompt, *answer], most)])
    proposer.end("r")
    return drafts


def learn(proposer: SuffixProposer, prompt: list[int], answer: list[int], salt: str = "") -> None:
    proposer.learn(Request(tuple(prompt), id="old", cache_salt=salt), [*prompt, *answer])
    proposer.end("old")


def test_other_answers_are_copied_as_far_as_they_agree() -> None:
    proposer = SuffixProposer(SuffixSettings())
    assert isinstance(proposer, LearningProposer)
    learn(proposer, [1, 2, 3], [*range(100, 160)])
    assert propose(proposer, [7, 8], [*range(100, 103)]) == [], "three tokens say little"
    assert propose(proposer, [7, 8], [*range(100, 104)]) == [104, 105, 106, 107], "as many as agree"
    assert propose(proposer, [7, 8], [*range(100, 120)]) == [*range(120, 136)]
    assert propose(proposer, [7, 8], [*range(100, 120)], most=3) == [120, 121, 122]
    assert propose(proposer, [7, 8], [*range(100, 156)]) == [156, 157, 158, 159], "it ends there"
    assert propose(proposer, [1, 2, 3], []) == [], "prompts are not copied"


def test_the_text_itself_is_copied_where_more_of_it_agrees() -> None:
    proposer = SuffixProposer(SuffixSettings())
    learn(proposer, [1], [10, 11, 12, 13, 500, 501])
    own = [9, 10, 11, 12, 13, 600, 601, 602]
    assert propose(proposer, own, [9, 10, 11, 12, 13], most=2) == [600, 601]
    assert propose(proposer, own, [8, 10, 11, 12, 13], most=2) == [600, 601], "both agree in four"
    assert propose(proposer, own[2:], [10, 11, 12, 13], most=2) == [500, 501]


def test_answers_with_a_salt_are_nobody_elses() -> None:
    proposer = SuffixProposer(SuffixSettings())
    learn(proposer, [1], [*range(50, 90)], salt="mine")
    for salt in ("", "mine", "other"):
        assert propose(proposer, [2], [*range(50, 60)], salt=salt) == []
    learn(proposer, [1], [*range(50, 90)])
    assert propose(proposer, [2], [*range(50, 60)], most=1) == [60]
    assert propose(proposer, [2], [*range(50, 60)], salt="mine") == []


def test_what_was_overwritten_is_not_found() -> None:
    draw = random.Random(0)
    answers, known, found = Answers(64), list[str](), 0
    for _ in range(300):
        answer = [draw.randrange(3) for _ in range(draw.randint(0, 30))]
        answers.add(answer)
        known.append("".join(map(str, answer)))
        tokens = [draw.randrange(3) for _ in range(30)]
        if (at := answers.find(tokens)) is not None:
            found += 1
            assert at[1] >= SIZES[-1]
            after = answers.after(at[0], 5)
            assert any("".join(map(str, tokens[-at[1] :] + after)) in other for other in known)
    assert found > 50


def test_short_answers_displace_nothing() -> None:
    answers = Answers(256)
    answers.add([*range(10, 30)])
    for i in range(1000):
        answers.add([1000 + i] * (i % 5))
    assert answers.find([*range(10, 20)]) is not None
