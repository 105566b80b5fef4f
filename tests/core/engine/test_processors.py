"""Penalties, biases and minimum lengths against independent computations, and without effect on other requests."""

from __future__ import annotations

import queue
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.core.engine.test_faults import Panic
from tests.support import VOCAB, make_engine, random_prompt, slotted_pool, tiny_model

from infer import LLM, Event, SamplingParams
from infer.contracts.grammar import MatcherProtocol
from infer.contracts.kernels import Draws
from infer.contracts.model import Pass
from infer.contracts.params import StructuredOutputs
from infer.contracts.request import Request, ThinkingTokens
from infer.engine.processors import LogitsProcessor, ThinkingBudget
from infer.engine.sampler import uniform, words
from infer.kernels.reference import ReferenceKernels

PROMPT = random_prompt(9, seed=3)
CASES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "rewarded": {"frequency_penalty": -0.4, "presence_penalty": -0.3},
    "repetition": {"repetition_penalty": 1.7},
    "bias": {"logit_bias": {5: 4.5, 7: -100.0, 11: 3.0}},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": tuple(range(0, VOCAB, 2))},
    "all": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {3: 2.0, 4: -3.0},
        "min_tokens": 4,
        "stop_token_ids": (3, 9, 50),
    },
}
NEW = 12


@torch.inference_mode()
def logits_after(tokens: list[int]) -> list[float]:
    """The model's own, of a pass over everything."""
    model = tiny_model("llama")
    pool = slotted_pool(model, torch.float32, 1)
    place = pool.allocate(tokens)
    assert place is not None
    view = pool.batched_chunked_prefill_view([place.slot], [0], [len(tokens)])
    hidden = model.forward(Pass(torch.tensor(tokens), torch.arange(len(tokens)), view))
    row: list[float] = model.logits(hidden[-1:])[0].tolist()
    return row


def edited(logits: list[float], answer: list[int], params: dict[str, Any]) -> list[float]:
    """OpenAI's formula for presence and frequency, CTRL's for repetition, token by token."""
    result = []
    stops = params.get("stop_token_ids", ()) if len(answer) < params.get("min_tokens", 0) else ()
    for token, logit in enumerate(logits):
        value = logit + params.get("logit_bias", {}).get(token, 0.0)
        if token in answer or token in PROMPT:
            penalty = params.get("repetition_penalty", 1.0)
            value = value / penalty if value > 0 else value * penalty
        count = answer.count(token)
        value -= count * params.get("frequency_penalty", 0.0) + (count > 0) * params.get("presence_penalty", 0.0)
        result.append(float("-inf") if token in stops else value)
    return result


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_follow_the_formulas(case: str, lag: int) -> None:
    params = CASES[case]
    engine = make_engine(tiny_model("llama"), torch.float32, lag=lag)
    engine.submit(PROMPT, "a", temperature=0, max_tokens=NEW, **params)
    engine.run()
    answer: list[int] = []
    while len(answer) < NEW:
        values = edited(logits_after(PROMPT + answer), answer, params)
        answer.append(max(range(VOCAB), key=values.__getitem__))
        if answer[-1] in params.get("stop_token_ids", ()):
            break
    assert engine.tokens("a") == answer


def test_a_prompt_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer to a prompt sees all of it in the engine's thread, so it must not take a turn per token."""
    placed: list[int] = []
    place = LogitsProcessor._place

    def counted(self: LogitsProcessor, token: int) -> int:
        placed.append(token)
        return place(self, token)

    monkeypatch.setattr(LogitsProcessor, "_place", counted)
    prompt = tuple(random_prompt(9, seed=3)) * 1000
    request = Request.make(
        prompt, SamplingParams(repetition_penalty=1.5), vocab_size=VOCAB, max_seq_len=len(prompt) + 10
    )
    biased = SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), 1.0))
    LogitsProcessor(Request.make(prompt, biased, vocab_size=VOCAB, max_seq_len=len(prompt) + 10), [])
    assert not placed, "biases are placed one by one"
    processor = LogitsProcessor(request, [])
    processor.see(prompt[:5000])
    processor.see([*prompt[5000:], prompt[0], prompt[0]])
    assert processor.fault is None
    assert len(placed) <= 2 * 9 + 2
    edit = processor.edit(None)
    assert edit is not None
    assert sorted(edit.ids_M.tolist()) == sorted(set(prompt))
    assert set(edit.repetition_M.tolist()) == {1.5}


OPENED, FREE = ThinkingTokens((), (7, 8), True), ThinkingTokens((5,), (7, 8), False)
AGAIN = ThinkingTokens((5, 6), (7, 8), True)
BUDGETS: list[tuple[ThinkingTokens, list[int], int, list[int | None]]] = [
    (OPENED, [1, 2, 3], 5, [None, None, None, None]),
    (OPENED, [7, 8], 0, [7, 8, None]),
    (OPENED, [1, 2, 7, 8, 1, 2], 2, [None, None, 7, 8, None, None, None]),
    (OPENED, [1, 7, 8, 1, 2, 3], 2, [None, None, None, None, None, None, None]),  # it ended by itself
    (OPENED, [7, 2, 7, 8], 1, [None, None, 7, 8, None]),  # a 7 alone ends nothing
    (OPENED, [7, 7, 8, 1], 1, [None, None, None, None, None]),
    (FREE, [5, 1, 7, 8, 1], 1, [None, None, 7, 8, None, None]),
    (FREE, [9, 5, 1, 7, 8, 1], 1, [None, None, None, 7, 8, None, None]),
    (FREE, [9, 9, 5, 1, 1, 1], 1, [None] * 7),  # an opening tag further on is text
    (FREE, [1, 2, 3], 0, [None] * 4),
    (FREE, [5, 7, 8, 5, 7, 8, 1], 0, [None, 7, 8, None, 7, 8, None, None]),  # what is opened again is closed at once
    (FREE, [5, 1, 7, 8, 9, 5, 1, 7, 8], 2, [None, None, None, None, None, None, None, 7, 8, None]),
    (FREE, [5, 7, 8, 9, 9, 5, 1], 0, [None, 7, 8, None, None, None, None, None]),  # that tag is text
    (AGAIN, [1, 7, 8, 9, 5, 6, 7, 8, 5, 6], 1, [None, 7, 8, None, None, None, 7, 8, None, None, 7]),
    (AGAIN, [7, 8, 9, 9, 5, 6, 1], 0, [7, 8, None, None, None, None, None, None]),
]


@pytest.mark.parametrize(("tags", "answer", "most", "expected"), BUDGETS)
def test_reasoning_is_closed_where_its_budget_ends(
    tags: ThinkingTokens, answer: list[int], most: int, expected: list[int | None]
) -> None:
    budget, forced = ThinkingBudget(tags, most), []
    for token in answer:
        forced.append(budget.forced)
        budget.see(token)
    assert [*forced, budget.forced] == expected


@pytest.mark.parametrize("most", [0, 1, 5])
def test_an_answer_goes_on_behind_its_budget_as_if_the_prompt_held_what_was_thought(most: int) -> None:
    """Draws depend on the seed and the position alone."""
    engine = make_engine(tiny_model("llama"), torch.float32)
    how: dict[str, Any] = {"temperature": 1.2, "seed": 5, "ignore_eos": True}
    engine.submit(PROMPT, "free", max_tokens=NEW, **how)
    engine.submit(PROMPT, "closed", max_tokens=NEW, thinking_token_budget=most, thinking=OPENED, **how)
    engine.run()
    thought = [*engine.tokens("free")[:most], 7, 8]
    assert not {7, 8} & set(thought[:most])
    engine.submit([*PROMPT, *thought], "prompted", max_tokens=NEW - len(thought), **how)
    engine.run()
    assert engine.tokens("closed") == [*thought, *engine.tokens("prompted")]


def test_drawn_tokens_are_drawn_from_what_the_formulas_leave() -> None:
    params = CASES["all"]
    engine = make_engine(tiny_model("llama"), torch.float32)
    engine.submit(PROMPT, "a", temperature=1.3, top_k=20, seed=8, max_tokens=NEW, **params)
    engine.run()
    answer = engine.tokens("a")
    for i, token in enumerate(answer):
        values = torch.tensor([edited(logits_after(PROMPT + answer[:i]), answer[:i], params)])
        draws = Draws(
            temperature_N=torch.tensor([1.3]),
            top_k_N=torch.tensor([20]),
            top_p_N=torch.tensor([1.0]),
            min_p_N=torch.tensor([0.0]),
            uniform_N=torch.from_numpy(uniform(words([8]), words([len(PROMPT) + i]))),
            greedy=False,
            top_k=True,
            top_p=False,
        )
        assert ReferenceKernels().sample(values, draws).tolist() == [token], i


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["slotted", "paged"])
def test_requests_with_edited_logits_and_others_do_not_disturb_each_other(dtype: torch.dtype, backend: str) -> None:
    model = tiny_model("qwen3", dtype)
    plans: list[dict[str, Any]] = [
        {"temperature": 0.9, "seed": 1, "logprobs": 3},
        {"temperature": 0.9, "seed": 2, "logprobs": 3, **CASES["all"]},
        {"temperature": 0, "logprobs": 3, **CASES["repetition"]},
        {"temperature": 1.5, "seed": 3, "top_p": 0.9, "logprobs": 3},
    ]

    def answers(together: bool) -> list[Any]:
        found = []
        engine = make_engine(model, dtype, backend=backend, prefill_chunk_size=5)
        for i, plan in enumerate(plans):
            engine.submit(random_prompt(10 + 7 * i, seed=i), str(i), max_tokens=14, **plan)
            if not together:
                engine.run()
        engine.run()
        for i in range(len(plans)):
            found.append([(e.token_ids, e.logprobs, e.finish_reason) for e in engine.answer(str(i))])
        return found

    assert answers(together=True) == answers(together=False)


@pytest.mark.parametrize("kind", [ValueError, Panic])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_processor_that_fails_ends_its_request_alone(
    lag: int, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    see = LogitsProcessor._see_all

    def fails(processor: LogitsProcessor, tokens: Sequence[int]) -> MatcherProtocol | None:
        if processor._params.seed == 0 and processor.num_seen + len(tokens) == len(PROMPT) + 3:
            raise kind("out of its depth")
        return see(processor, tokens)

    def run() -> Any:
        engine = make_engine(tiny_model("llama"), torch.float32, lag=lag)
        for i, plan in enumerate(({"presence_penalty": 1.0}, CASES["all"], {"logprobs": 3}, {"logit_bias": {3: 1.0}})):
            engine.submit(PROMPT, str(i), seed=i, max_tokens=NEW, **plan)
        engine.run()
        assert engine.pool.free_tokens() == engine.room
        return engine.events

    truth = run()
    monkeypatch.setattr(LogitsProcessor, "_see_all", fails)
    found = run()
    *before, end = found.pop("0")
    assert before == truth.pop("0")[:3]
    assert (end.finish_reason, end.error) == ("error", f"The request failed: {kind.__name__}: out of its depth")
    assert found == truth


def test_log_probabilities_are_those_of_the_model_whatever_is_done_to_them() -> None:
    engine = make_engine(tiny_model("llama"), torch.float32)
    engine.submit(PROMPT, "a", temperature=0, max_tokens=1, logprobs=5)
    engine.submit(PROMPT, "b", temperature=0, max_tokens=1, logprobs=5, logit_bias={17: 100.0})
    engine.run()
    (plain,), (biased,) = engine.answer("a"), engine.answer("b")
    assert biased.token_ids == (17,) != plain.token_ids
    assert biased.logprobs[0].top == plain.logprobs[0].top


def test_chosen_tokens_logprobs_are_reported_instead_of_the_likeliest() -> None:
    engine = make_engine(tiny_model("llama"), torch.float32)
    engine.submit(PROMPT, "a", temperature=0, max_tokens=2, logprob_token_ids=(90, 4, 5))
    engine.submit(PROMPT, "b", temperature=0, max_tokens=2, logprobs=20)
    engine.run()
    expected = torch.log_softmax(torch.tensor(logits_after(PROMPT)), dim=0)
    top = engine.answer("a")[0].logprobs[0].top
    assert [token for token, _ in top] == [90, 4, 5]
    assert torch.allclose(torch.tensor([p for _, p in top]), expected[[90, 4, 5]], atol=1e-5)


def test_a_request_of_higher_priority_goes_first() -> None:
    """And is preempted last: ``test_engine``."""
    engine = make_engine(tiny_model("llama"), torch.float32, max_batch_size=1)
    for id, priority in (("first", 0), ("late", 5), ("soon", -1), ("next", 0)):
        engine.submit(PROMPT, id, max_tokens=2, priority=priority)
    engine.run()
    assert [record.request_id for record in engine.finished] == ["soon", "first", "next", "late"]


def _run(llm: LLM, request: Request) -> tuple[list[int], str]:
    """The answer's tokens, and why it ended."""
    mailbox: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
    llm.loop.submit(request, mailbox.put)
    tokens: list[int] = []
    while True:
        for event in mailbox.get():
            tokens += event.token_ids
            if event.finish_reason is not None:
                return tokens, event.finish_reason


def test_a_grammar_may_wait_for_the_end_of_reasoning() -> None:
    """The answer is free up to a token, and formed behind it."""
    with LLM("demo", kernels={"threads": 1}, engine={"max_seq_len": 512}) as llm:
        end = llm.served.tokenizer.encode("\n").ids[-1]
        params = SamplingParams(max_tokens=400, seed=1, structured_outputs=StructuredOutputs(regex="[0-9]{3}x"))
        tokens, reason = _run(llm, llm.served.request("x = ", params, grammar_after=(end,)))
        decode = llm.served.tokenizer.decode
        cut = tokens.index(end)
        assert re.fullmatch("[0-9]{3}x", decode(tokens[cut + 1 :]))
        assert cut > 0
        assert not re.match("[0-9]{3}x", decode(tokens[:cut]))
        assert reason == "stop"


def test_reasoning_that_a_format_follows_is_not_the_end() -> None:
    """Not even of a model that would end there; a client may still end it with a token of its choice."""
    with LLM("demo", kernels={"threads": 1}, engine={"max_seq_len": 512}) as llm:
        encode = llm.served.tokenizer.encode
        tags = ThinkingTokens((), tuple(encode("\n").ids[-1:]), True)
        eos, own = 0, encode("7").ids[-1]

        def answered(likely: int, **more: Any) -> tuple[list[int], str]:
            more |= {"structured_outputs": StructuredOutputs(regex="[0-9]{3}x"), "logit_bias": {likely: 100.0}}
            params = SamplingParams(max_tokens=400, thinking_token_budget=9, **more)
            return _run(llm, llm.served.request("x = ", params, grammar_after=tags.closing, thinking=tags))

        tokens, reason = answered(eos)
        *formed, last = tokens[tokens.index(tags.closing[0]) + 1 :]
        assert re.fullmatch("[0-9]{3}x", llm.served.tokenizer.decode(formed))
        assert (last, reason) == (eos, "stop")
        assert answered(own, stop_token_ids=[own]) == ([own], "stop")


def test_no_reasoning_is_opened_in_what_a_grammar_describes() -> None:
    with LLM("demo", kernels={"threads": 1}, engine={"max_seq_len": 512}) as llm:
        encode = llm.served.tokenizer.encode
        tags = ThinkingTokens(tuple(encode("7").ids[-1:]), tuple(encode("\n").ids[-1:]), True)
        outputs = StructuredOutputs(regex="7{3}x")
        params = SamplingParams(max_tokens=400, seed=1, thinking_token_budget=2, structured_outputs=outputs)
        request = llm.served.request("x = ", params, grammar_after=tags.closing, thinking=tags)
        tokens, reason = _run(llm, request)
        assert llm.served.tokenizer.decode(tokens[tokens.index(tags.closing[0]) + 1 :]) == "777x"
        assert reason == "stop"
