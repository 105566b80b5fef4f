"""POST /v1/rerank and /v1/score, beside transformers' probabilities of "yes" and "no"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.serving import Running, chatty, running
from tokenizers import Tokenizer

import infer_demo
from infer_embeddings.rerank import INSTRUCTION, SYSTEM
from infer_server.events import LONG_CHARS
from infer_server.rendering import Renderer

CHECKPOINT = Path(infer_demo.__file__).parent / "checkpoint"
QUERY = "How do I open a file?"
DOCUMENTS = ["with open(path) as file:", "é", "import os\n" * 30, "class A:", "import os\n" * 30]


def by_transformers(pairs: list[tuple[str, str]], instruction: str = INSTRUCTION) -> list[float]:
    tokenizer: Any = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    scores = []
    for query, document in pairs:
        asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        prompt = f"# system: {SYSTEM}\n# user: {asked}\n# assistant: "
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        yes, no = (tokenizer.encode(word, add_special_tokens=False).ids[0] for word in ("yes", "no"))
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        scores.append(torch.softmax(logits[[yes, no]], 0)[0].item())
    return scores


async def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    """Ranked, in the forms that clients know; more documents than run at a time."""
    wanted = by_transformers([(QUERY, document) for document in DOCUMENTS])
    model = chatty(tmp_path, dtype="float32")
    async with running(model=model, engine={"max_batch_size": 2}) as server:
        status, answer, _ = await server.post({"query": QUERY, "documents": DOCUMENTS}, "/v1/rerank")
        assert status == 200, answer
        found = {entry["index"]: entry["relevance_score"] for entry in answer["results"]}
        assert [found[i] for i in range(len(DOCUMENTS))] == pytest.approx(wanted, abs=1e-5)
        order = [entry["index"] for entry in answer["results"]]
        assert order == sorted(range(len(DOCUMENTS)), key=lambda i: -found[i])
        assert all(entry["document"]["text"] == DOCUMENTS[entry["index"]] for entry in answer["results"])
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 100
        body = {
            "model": answer["model"],
            "query": QUERY,
            "documents": [{"text": text} for text in DOCUMENTS],
            "top_n": 2,
            "return_documents": False,
        }
        _, short, _ = await server.post(body, "/v1/rerank")
        assert short["results"] == [{"index": i, "relevance_score": found[i]} for i in order[:2]]
        _, scored, _ = await server.post({"text_1": QUERY, "text_2": DOCUMENTS}, "/v1/score")
        assert [entry["score"] for entry in scored["data"]] == [found[i] for i in range(len(DOCUMENTS))]
        _, scored, _ = await server.post({"text_1": ["a", "b"], "text_2": ["c", "d"], "instruction": "x"}, "/v1/score")
        pairs = by_transformers([("a", "c"), ("b", "d")], "x")
        assert [entry["score"] for entry in scored["data"]] == pytest.approx(pairs, abs=1e-5)


async def refused(server: Running, body: dict[str, Any], path: str) -> tuple[str, str]:
    status, answer, _ = await server.post(body, path)
    assert status == 400, (body, answer)
    return answer["error"]["message"], answer["error"]["param"]


async def test_what_is_refused(tmp_path: Path) -> None:
    async with running(model=chatty(tmp_path)) as server:
        for body, says, param in (
            ({"query": "a", "documents": []}, "at least 1", "documents"),
            ({"query": "a", "documents": ["a"] * 2049}, "2049 inputs; at most 2048", "documents"),
            ({"query": "a", "documents": ["a " * 10**5]}, "maximum context length", "documents"),
            ({"query": "a", "documents": ["a"], "top_n": -1}, "greater than or equal to 0", "top_n"),
            ({"documents": ["a"]}, "'query' is missing", "query"),
        ):
            message, named = await refused(server, body, "/v1/rerank")
            assert (says in message, named) == (True, param), message
        for body, says, param in (
            ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1 has 2 texts and text_2 1", "text_1"),
            ({"text_1": [], "text_2": ["c"]}, "must not be empty", "text_1"),
        ):
            message, named = await refused(server, body, "/v1/score")
            assert (says in message, named) == (True, param), message
        await server.idle()


async def test_few_documents_are_inside_at_a_time(tmp_path: Path) -> None:
    engine = {"max_batch_size": 2, "max_waiting_requests": 6}
    async with running(model=chatty(tmp_path), engine=engine) as server:
        most, submit = 0, server.engine_loop.submit_all

        def watched(*given: Any) -> Any:
            nonlocal most
            accepted = submit(*given)
            most = max(most, server.engine_loop.num_open)
            return accepted

        server.engine_loop.submit_all = watched
        status, _, _ = await server.post({"query": "a", "documents": ["b"] * 12}, "/v1/rerank")
        assert (status, most) == (200, 2)


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the length of every conversation that is rendered."""
    lengths: list[int] = []
    render = Renderer.__call__

    async def counted(self: Renderer, messages: bytes, /, **form: Any) -> str:
        lengths.append(len(messages))
        return await render(self, messages, **form)

    monkeypatch.setattr(Renderer, "__call__", counted)
    return lengths


async def test_a_long_query_is_not_put_before_every_document_first(tmp_path: Path, rendered: list[int]) -> None:
    """The prompts of one body are made as their turn comes, since all of them may be a thousand times as long."""
    async with running(model=chatty(tmp_path), engine={"max_batch_size": 2}) as server:
        for path, body in (
            ("/v1/rerank", {"query": "a " * 5000, "documents": ["b"] * 500}),
            ("/v1/score", {"text_1": "a " * 5000, "text_2": ["b"] * 500}),
        ):
            rendered.clear()
            status, answer, _ = await server.post(body, path)
            assert status == 400
            assert answer["error"]["code"] == "context_length_exceeded"
            assert len(rendered) <= 3  # the first by itself, then as many as run together


@pytest.mark.slow
async def test_no_prompt_is_made_beside_a_long_one(tmp_path: Path, rendered: list[int]) -> None:
    """As many prompts as run at a time may be too much if each is as long as a body."""
    async with running(model=chatty(tmp_path), engine={"max_batch_size": 16}) as server:
        body = {"text_1": "a" * (LONG_CHARS + 1), "text_2": ["b"] * 16}
        status, answer, _ = await server.post(body, "/v1/score")
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert len(rendered) == 2  # the first by itself, for the labels
