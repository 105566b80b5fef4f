"""Draft tokens change no answer: not its tokens, text, log-probabilities, nor how and where it ends. What they change
is how many passes it takes."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.core.engine.test_faults import Panic
from tests.core.engine.test_processors import CASES
from tests.examples import seeds
from tests.support import (
    QUANTIZED,
    VOCAB,
    Always,
    Knowing,
    Stepper,
    make_engine,
    paged_pool,
    random_prompt,
    slotted_pool,
    tiny_model,
)
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from infer.contracts.attention import KVDtype
from infer.contracts.grammar import GrammarProtocol
from infer.contracts.model import ModelProtocol, Pass
from infer.contracts.params import SamplingParams, StructuredOutputs
from infer.contracts.proposer import Computed, DraftRequest
from infer.contracts.request import Event, Request, ThinkingTokens
from infer.engine.answer import NOT_FINITE
from infer.engine.payoff import Plan
from infer.engine.processors import LogitsProcessor
from infer.text.grammars import Grammars, vocabulary
from infer_llguidance.backend import LLGuidance, Matcher

F32, BF16 = torch.float32, torch.bfloat16
EOS = 95
FAMILIES = ("llama", "qwen3", "gemma3", "mistral")
WEIGHTS = (*((family, dtype) for family in FAMILIES for dtype in (F32, BF16)), *((f"{f} int8", BF16) for f in FAMILIES))
assert {f"{family} int8" for family in FAMILIES} <= set(QUANTIZED)
REGEX = "([a-m]{2,5}!){1,9}"


@functools.cache
def ascii() -> Tokenizer:
    """A tokenizer whose tokens are single characters, from ! on, in the form that grammars need: its decoder knows
    bytes."""
    vocab = {chr(33 + id) if id < 94 else chr(0x100 + id): id for id in range(VOCAB)}
    made = Tokenizer(models.WordLevel(vocab, unk_token=chr(0x100 + EOS)))
    made.decoder = decoders.ByteLevel()
    return made


@functools.cache
def grammar(regex: str = REGEX) -> GrammarProtocol:
    return Grammars(LLGuidance(vocabulary(ascii(), VOCAB, frozenset({EOS})))).compile(StructuredOutputs(regex=regex))


def some_request(draw: random.Random, id: str) -> Request:
    """With any of the parameters that decide about tokens and the end."""
    params: dict[str, Any] = {"max_tokens": draw.randint(1, 40), "temperature": draw.choice([0, 0.7, 1.0, 1.6])}
    if draw.random() < 0.5:
        params["logprobs"] = draw.choice([0, 3])
    elif draw.random() < 0.3:
        params["logprob_token_ids"] = (4, 90)
    if draw.random() < 0.3:
        params |= draw.choice([{"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.02}])
    formed = draw.random() < 0.2
    if formed:
        params["structured_outputs"] = StructuredOutputs(regex=REGEX)
    elif draw.random() < 0.5:
        params |= draw.choice(list(CASES.values()))
        params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
    if draw.random() < 0.3:
        params["stop"] = [chr(33 + draw.randrange(94)) for _ in range(6)] + ["AB"]
    if draw.random() < 0.2:
        params["prompt_logprobs"] = 1
    thinking = (
        ThinkingTokens((5,), draw.choice([(7,), (7, 8, 7)]), draw.random() < 0.7) if draw.random() < 0.2 else None
    )
    if thinking is not None:
        params["thinking_token_budget"] = draw.choice([0, 1, 5, 12])
    prompt = random_prompt(260)[: draw.choice([1, 15, 40, 100])] + random_prompt(3, seed=draw.randrange(4))
    return Request.make(
        prompt,
        SamplingParams(seed=draw.randrange(100), **params),
        vocab_size=VOCAB,
        max_seq_len=320,
        id=id,
        cache_salt=draw.choice(["", "", "s"]),
        group=draw.choice(["", "g"]),
        grammar=grammar() if formed else None,
        grammar_after=draw.choice([(), (), (7,)]) if formed else (),
        thinking=thinking,
    )


def answers(stepper: Stepper, requests: Sequence[Request], wait: int = 0) -> dict[str, list[Event]]:
    """All events, in order; ``wait`` steps pass between two arrivals. How many tokens were cached depends on
    company."""
    for request in requests:
        stepper.engine.submit(request)
        for _ in range(wait):
            stepper.engine.step()
    stepper.run()
    assert stepper.pool.free_tokens() == stepper.room
    return {id: [event._replace(num_cached=0) for event in events] for id, events in stepper.events.items()}


def tokens(events: Sequence[Event]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def mix(seed: int) -> None:
    draw = random.Random(seed)
    family, dtype = draw.choice(WEIGHTS)
    model, batch = tiny_model(family, dtype), draw.randint(1, 5)
    requests = [some_request(draw, str(i)) for i in range(draw.randint(1, 6))]
    keys: dict[str, Any] = {
        "max_batch_size": batch,
        "prefill_chunk_size": draw.choice([7, 33, 512]),
        "max_tokens_per_step": draw.choice([None, batch, batch + 5, 60]),
        "mixed_batches": draw.random() < 0.5,
        "lag": draw.randint(0, 2),
        "tokenizer": ascii(),
        "eos": frozenset({EOS}),
    }
    wait, paged = draw.randint(0, 4), draw.choice([None, 20, 23, 200])

    def stepper(**more: Any) -> Stepper:
        kv_dtype: KVDtype = "int8" if seed % 4 == 3 else "auto"
        if paged is None:
            pool: Any = slotted_pool(model, dtype, batch, kv_dtype)
        else:
            pool = paged_pool(model, dtype, batch, kv_dtype, num_blocks=paged)
        return make_engine(model, dtype, pool=pool, **keys, **more)

    truth = answers(stepper(), requests)
    proposer = Knowing({id: tokens(events) for id, events in truth.items()}, draw.choice([0.0, 0.6, 0.9, 1.0]), seed)
    payoff = Always(random.Random(seed) if draw.random() < 0.7 else None)
    speculating = stepper(proposer=proposer, payoff=payoff)
    assert answers(speculating, requests, wait) == truth
    limit = keys["max_tokens_per_step"]
    assert all(limit is None or step.computed_tokens <= limit for step in speculating.steps)
    assert sorted(proposer.ended) == sorted(truth)
    for step in speculating.steps:
        assert [*step.work] == [step.work[i] for i in range(len(step.work))]
    accepted = sum(work.accepted for step in speculating.steps for work in step.work)
    assert accepted == sum(step.accepted for step in speculating.steps)
    assert accepted == sum(record.accepted for record in speculating.finished)
    assert accepted <= sum(right for _, right in payoff.right)
    proposed = sum(work.proposed for step in speculating.steps for work in step.work)
    assert proposed == sum(step.proposed for step in speculating.steps) == sum(many for many, _ in payoff.right)
    assert proposed == sum(record.proposed for record in speculating.finished)


@pytest.mark.draws
@pytest.mark.parametrize("seed", [*seeds(8), *(pytest.param(i, marks=pytest.mark.slow) for i in seeds(40)[8:])])
def test_any_mix_of_requests_has_the_same_events_with_drafts(seed: int) -> None:
    mix(seed)


PROMPT = random_prompt(9, seed=3)


def run(*, proposer: Any = None, payoff: Any = None, lag: int = 0, **params: Any) -> Stepper:
    stepper = make_engine(
        tiny_model("llama"), F32, tokenizer=ascii(), proposer=proposer, payoff=payoff, lag=lag, max_batch_size=2
    )
    stepper.submit(PROMPT, "a", **{"max_tokens": 21, "temperature": 1.0, "seed": 5} | params)
    stepper.run()
    return stepper


@pytest.mark.parametrize("lag", [0, 1])
def test_right_drafts_save_passes_and_are_counted(lag: int) -> None:
    plain = run()
    stepper = run(proposer=Knowing({"a": plain.tokens("a")}, right=1.0), lag=lag)
    assert stepper.events == plain.events
    decodes = [work for step in stepper.steps for work in step.work if work.kind == "decode"]
    # With a lag, the first decode is planned before the first token is known.
    expected = [(10, 9, 8, 8), (19, 9, 8, 8)] if lag else [(9, 9, 8, 8), (18, 9, 8, 8), (27, 2, 1, 1)]
    found = [(work.start, work.length, work.proposed, work.accepted) for work in decodes]
    assert found == ([(9, 1, 0, 0), *expected, (28, 1, 0, 0)] if lag else expected)
    (finished,) = stepper.finished
    count = 16 if lag else 17
    assert (finished.num_generated, finished.proposed, finished.accepted) == (21, count, count)
    assert finished.totals[2:] == (21, count, count)
    assert sum(step.proposed for step in stepper.steps) == sum(step.accepted for step in stepper.steps) == count


class Guessing(Always):
    """A payoff that guesses and verifies nothing."""

    def plan(self, rows: int, most: Mapping[Any, int]) -> Plan:
        return Plan({}, [*super().plan(rows, most).counts])


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("right", [True, False])
def test_guesses_are_compared_with_what_is_drawn_and_never_computed(right: bool, lag: int) -> None:
    plain, payoff = run(), Guessing()
    stepper = run(proposer=Knowing({"a": plain.tokens("a")}, right=float(right)), payoff=payoff, lag=lag)
    assert stepper.events == plain.events
    assert {(work.length, work.proposed) for step in stepper.steps for work in step.work[1:]} <= {(1, 0)}
    assert payoff.guesses == [("a", right)] * (18 if lag else 19), "none for the last token, of 20 that are decoded"
    assert payoff.right == []


def test_the_guess_of_an_aborted_sequence_is_dropped() -> None:
    stepper = make_engine(tiny_model("llama"), F32, proposer=Knowing({"a": [1] * 30}), payoff=Guessing())
    stepper.submit(PROMPT, "a", max_tokens=21, temperature=1.0, seed=5)
    for _ in range(3):
        stepper.engine.step()
    speculation = stepper.engine._speculation
    assert speculation is not None
    assert len(speculation._guesses) == 1
    stepper.engine.fail_all("abort", None)
    assert not speculation._guesses


@pytest.mark.parametrize("kind", ["stop", "stop_token_ids", "max_tokens"])
def test_an_answer_ends_inside_an_accepted_run(kind: str) -> None:
    """The drafts know how the answer would have gone on. Those that go beyond its end count as not accepted, and so
    does one that equals its last token: without it, the answer would have ended there as well."""
    whole = run().tokens("a")
    at = next(i for i in range(3, 9) if whole[i] not in whole[:i])
    ends = {"stop": [chr(33 + whole[at])], "stop_token_ids": (whole[at],), "max_tokens": 6}
    end: dict[str, Any] = {kind: ends[kind]}
    plain = run(**end)
    proposer = Knowing({"a": whole}, right=1.0)
    stepper = run(proposer=proposer, **end)
    assert stepper.events == plain.events
    assert stepper.events["a"][-1].finish_reason == ("length" if "max_tokens" in end else "stop")
    (finished,) = stepper.finished
    assert finished.num_generated == len(stepper.tokens("a")) < 10
    assert finished.accepted == finished.num_generated - 2
    assert finished.proposed == (4 if kind == "max_tokens" else 8)
    assert proposer.ended == ["a"]
    assert stepper.pool.free_tokens() == stepper.room


@pytest.mark.parametrize("case", ["frequency", "repetition", "all", "grammar", "late grammar"])
def test_drafts_are_processed_as_if_they_were_right(case: str) -> None:
    """Whether they are or not, the rows behind them, and those of later steps, are edited as without drafts."""
    formed = "grammar" in case
    params = {"structured_outputs": StructuredOutputs(regex=REGEX)} if formed else CASES[case]
    keys: dict[str, Any] = {"tokenizer": ascii(), "eos": frozenset({EOS})}
    truth: dict[str, list[Event]] = {"a": []}
    seed = 0
    while len(truth["a"]) < 6:  # an answer that ends at once would show little
        seed += 1
        request = Request.make(
            PROMPT,
            SamplingParams(max_tokens=30, temperature=1.2, seed=seed, **params),
            vocab_size=VOCAB,
            max_seq_len=320,
            id="a",
            grammar=grammar() if formed else None,
        )
        if case == "late grammar":
            free = make_engine(tiny_model("llama"), F32, **keys)
            alone = SamplingParams(temperature=1.2, seed=2, ignore_eos=True)
            events = answers(free, [replace(request, grammar=None, params=alone)])
            request = replace(request, grammar_after=(tokens(events["a"])[5],))
        truth = answers(make_engine(tiny_model("llama"), F32, **keys), [request])
    for right in (1.0, 0.7, 0.0):
        payoff = Always()
        proposer = Knowing({"a": tokens(truth["a"])}, right)
        stepper = make_engine(tiny_model("llama"), F32, proposer=proposer, payoff=payoff, **keys)
        assert answers(stepper, [request]) == truth
        # An answer may end before the drafts of its last pass do.
        assert right < 1 or all(proposed == good for proposed, good in payoff.right[:-1])


@pytest.mark.parametrize("kind", [ValueError, Panic])
@pytest.mark.parametrize("where", ["accepts", "fork"])
def test_a_grammar_that_fails_over_drafts_ends_its_request_alone(
    where: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any) -> None:
        raise kind("out of its depth")

    params = SamplingParams(max_tokens=12, seed=1, structured_outputs=StructuredOutputs(regex="[a-m]{40}"))
    formed = Request.make(PROMPT, params, vocab_size=VOCAB, max_seq_len=320, id="a", grammar=grammar("[a-m]{40}"))
    free = replace(formed, params=SamplingParams(max_tokens=12, seed=2), id="b", grammar=None)
    keys: dict[str, Any] = {"tokenizer": ascii(), "eos": frozenset({EOS})}
    truth = answers(make_engine(tiny_model("llama"), F32, **keys), [formed, free])
    monkeypatch.setattr(Matcher, where, fails)
    proposer = Knowing({id: tokens(events) for id, events in truth.items()}, right=1.0)
    found = answers(make_engine(tiny_model("llama"), F32, proposer=proposer, **keys), [formed, free])
    assert found["b"] == truth["b"]
    *before, end = found["a"]
    assert before == truth["a"][: len(before)]
    assert (end.finish_reason, end.error) == ("error", f"The request failed: {kind.__name__}: out of its depth")


def test_drafts_keep_to_the_limit_of_a_step() -> None:
    found = []
    for proposer in (None, Knowing({id: [1] * 30 for id in "abc"})):
        stepper = make_engine(tiny_model("llama"), F32, max_tokens_per_step=11, proposer=proposer)
        for id in "abc":
            stepper.submit(PROMPT, id, max_tokens=12, temperature=1.0, seed=5)
        stepper.run()
        found.append(stepper.events)
    assert found[0] == found[1]
    assert max(step.computed_tokens for step in stepper.steps) == 11
    assert 8 in {step.proposed for step in stepper.steps}


def test_what_was_computed_for_wrong_drafts_is_never_shared() -> None:
    """Wherever an answer ends, the next request finds what was computed for its tokens, not for the drafts."""
    model = tiny_model("llama")
    for length in range(12, 24, 3):
        plain = make_engine(model, F32, backend="paged")
        plain.submit(PROMPT, "a", max_tokens=length, temperature=1.0, seed=5)
        plain.run()
        follow = PROMPT + plain.tokens("a")
        plain.submit([*follow, 1, 2], "b", max_tokens=3, temperature=0, logprobs=2)
        plain.run()
        proposer = Knowing({"a": plain.tokens("a"), "b": plain.tokens("b")}, right=0.7, seed=length)
        stepper = make_engine(model, F32, backend="paged", proposer=proposer)
        stepper.submit(PROMPT, "a", max_tokens=length, temperature=1.0, seed=5)
        stepper.run()
        stepper.submit([*follow, 1, 2], "b", max_tokens=3, temperature=0, logprobs=2)
        stepper.run()
        assert stepper.events == plain.events


class Faulty:
    """A proposer that goes wrong at the third call."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.calls = 0

    def propose(self, draft_requests: Sequence[DraftRequest]) -> Any:
        self.calls += 1
        if self.calls < 3:
            return [[1]] * len(draft_requests)
        if self.how == "raises":
            raise ValueError("no idea")
        if self.how == "exits":
            sys.exit(3)
        return {
            "endless": [itertools.count()],
            "too many": [[1] * 9],
            "too few": [],
            "no ids": [["x"]],
            "no list": None,
            "reading": [[1]] * len(draft_requests),
        }[self.how]

    def end(self, request_id: str) -> None:
        raise KeyError(request_id)


@pytest.mark.parametrize(
    "how", ["raises", "exits", "endless", "too many", "too few", "no ids", "no list", "reading", "at the end"]
)
def test_a_proposer_that_fails_is_not_asked_again(how: str, caplog: pytest.LogCaptureFixture) -> None:
    class Ends(Knowing):
        end = Faulty.end

    class Reads(Faulty):
        def read(self, computed: Sequence[Computed], hidden_TD: Tensor) -> None:
            if self.calls == 3:
                raise ValueError("cannot read")

    proposer = Ends({"a": [1] * 30}) if how == "at the end" else Reads(how) if how == "reading" else Faulty(how)
    stepper = run(proposer=proposer)
    assert stepper.events == run().events
    stepper.submit(PROMPT, "b", max_tokens=9)
    stepper.run()
    assert len(stepper.tokens("b")) == 9
    assert getattr(proposer, "calls", 3) == 3
    assert caplog.text.count("The proposer failed; the engine goes on without speculation") == 1


def test_drafts_that_the_model_does_not_know_are_left_out() -> None:
    class Strange(Faulty):
        def propose(self, draft_requests: Sequence[DraftRequest]) -> Any:
            return [[1, VOCAB, 2] if len(draft_request.token_ids) % 2 else [-1] for draft_request in draft_requests]

        def end(self, request_id: str) -> None: ...

    stepper = run(proposer=Strange(""))
    assert stepper.events == run().events
    assert {step.proposed for step in stepper.steps} == {0, 1}


def test_a_row_without_a_token_is_left_to_the_next_step() -> None:
    """Whatever makes the model's output not finite, its request ends as it does without drafts."""

    class Broken:
        """A model whose output is not finite after some position."""

        def __init__(self, model: ModelProtocol) -> None:
            self.model = model
            self.attention, self.vocab_size = model.attention, model.vocab_size

        def forward(self, batch: Pass) -> torch.Tensor:
            hidden = self.model.forward(batch)
            positions = batch.positions_T if batch.rows_N is None else batch.positions_T[batch.rows_N]
            return torch.where(positions[:, None] >= 15, torch.nan, hidden)

        def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
            return self.model.logits(hidden_ND)

        def expected(self) -> Any: ...

        def load(self, tensors: Any) -> None: ...

    model: Any = Broken(tiny_model("llama"))
    found = []
    for proposer in (None, Knowing({"a": run().tokens("a")}, right=1.0)):
        stepper = make_engine(model, F32, tokenizer=ascii(), proposer=proposer)
        stepper.submit(PROMPT, "a", max_tokens=21, temperature=1.0, seed=5)
        stepper.run()
        found.append(stepper.events["a"])
    assert found[0] == found[1]
    assert (found[0][-1].error, len(tokens(found[0]))) == (NOT_FINITE, 7)
    *_, last = [work for step in stepper.steps for work in step.work]
    assert (last.start, last.accepted) == (15, 0), "the row at fault is its step's first"


@pytest.mark.slow
def test_sampled_text_has_the_models_distribution() -> None:
    """Chi-square of the second and third token of many answers, drawn with drafts of which half are right."""
    model, count = tiny_model("llama"), 3000
    drawn: dict[str, list[int]] = {}
    for proposer in (None, Knowing(drawn, right=0.5)):
        stepper = make_engine(model, F32, max_batch_size=16, max_waiting_requests=count, proposer=proposer)
        for seed in range(count):
            stepper.submit(PROMPT, str(seed), max_tokens=3, temperature=1.0, seed=seed)
        stepper.run()
        drawn |= {str(seed): stepper.tokens(str(seed)) for seed in range(count)}
    assert sum(record.accepted for record in stepper.finished) > count // 3
    pool = slotted_pool(model, F32, 1)

    @functools.cache
    def after(*more: int) -> torch.Tensor:
        place = pool.allocate([*PROMPT, *more])
        assert place is not None
        with torch.inference_mode():
            ids = torch.tensor([*PROMPT, *more])
            view = pool.batched_chunked_prefill_view([place.slot], [0], [len(ids)])
            hidden = model.forward(Pass(ids, torch.arange(len(ids)), view))
            row = torch.softmax(model.logits(hidden[-1:])[0].double(), dim=0)
        pool.free(place.slot)
        return row

    for position in (1, 2):
        expected = sum(after(*answer[:position]) for answer in drawn.values())
        assert isinstance(expected, torch.Tensor)
        seen = torch.bincount(torch.tensor([answer[position] for answer in drawn.values()]), minlength=VOCAB)
        often = expected >= 5
        statistic = (((seen - expected) ** 2 / expected)[often]).sum().item()
        degrees = int(often.sum()) - 1
        assert statistic < degrees + 5 * (2 * degrees) ** 0.5


def test_the_tokens_a_grammar_waits_for_come_in_order_and_begin_anew_with_the_first() -> None:
    """Others may stand between them. What was passed under another beginning does not count."""
    request = Request.make(
        PROMPT,
        SamplingParams(structured_outputs=StructuredOutputs(regex=REGEX)),
        vocab_size=VOCAB,
        max_seq_len=320,
        grammar=grammar(),
        grammar_after=(7, 8, 9),
    )
    processor = LogitsProcessor(request, ())
    assert processor.see(PROMPT) is None
    for token in (8, 7, 5, 9, 8, 7, 5, 9, 8, 5):
        assert processor.see([token]) is None
    assert processor.see([9]) is not None
