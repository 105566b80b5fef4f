"""POST /v1/embeddings, beside transformers' hidden states, pooled and normalized as sentence-transformers do."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.serving import Running, running
from tokenizers import Tokenizer

import infer_demo

CHECKPOINT = Path(infer_demo.__file__).parent / "checkpoint"
TEXTS = ["def f(x):", "    return x + 1\n", "import os", "class A:\n    pass\n" * 20, "é"]
PATH = "/v1/embeddings"


def by_transformers(texts: list[str], pooling: str = "last") -> np.ndarray[Any, Any]:
    """[texts, D], normalized, fp32."""
    tokenizer: Any = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    model = transformers.AutoModel.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    rows = []
    for text in texts:
        with torch.inference_mode():
            hidden = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
        rows.append(torch.nn.functional.normalize(hidden.mean(0) if pooling == "mean" else hidden[-1], dim=0))
    return torch.stack(rows).numpy()


def vectors(answer: Any) -> np.ndarray[Any, Any]:
    assert answer["object"] == "list"
    assert [row["index"] for row in answer["data"]] == list(range(len(answer["data"])))
    assert {row["object"] for row in answer["data"]} == {"embedding"}
    rows = [row["embedding"] for row in answer["data"]]
    if isinstance(rows[0], str):
        return np.stack([np.frombuffer(base64.b64decode(row), dtype="<f4") for row in rows])
    return np.array(rows, dtype=np.float32)


async def embedded(server: Running, **body: Any) -> Any:
    status, answer, _ = await server.post(body, PATH)
    assert status == 200, answer
    return answer


SERVED: dict[str, Any] = {"model": {"path": "demo", "dtype": "float32"}, "engine": {"max_batch_size": 4}}


async def test_embeddings_are_those_of_transformers() -> None:
    """Of texts and token ids, one or many, in both encodings; more inputs than run at a time."""
    async with running(**SERVED) as server:
        answer = await embedded(server, input=TEXTS)
        whole = vectors(answer)
        np.testing.assert_allclose(whole, by_transformers(TEXTS), atol=1e-5)
        packed = await embedded(server, input=TEXTS, encoding_format="base64", model=answer["model"], user="u")
        assert np.array_equal(vectors(packed), whole)
        ids = [(await server.post({"prompt": text}, "/tokenize"))[1]["tokens"] for text in TEXTS]
        again = await embedded(server, input=ids)
        assert np.array_equal(vectors(again), whole)
        for one in (TEXTS[3], ids[3]):
            assert np.array_equal(vectors(await embedded(server, input=one))[0], whole[3])
        for each in (answer, packed, again):
            count = sum(map(len, ids))
            assert each["usage"] == {"prompt_tokens": count, "total_tokens": count}
        short = vectors(await embedded(server, input=TEXTS, dimensions=5))
        cut = whole[:, :5].astype(np.float64)
        np.testing.assert_allclose(short, cut / np.linalg.norm(cut, axis=1, keepdims=True), rtol=1e-6)
        many = vectors(await embedded(server, input=TEXTS * 5))
        assert np.array_equal(many, np.tile(whole, (5, 1)))


async def test_what_is_refused() -> None:
    async with running(**SERVED) as server:
        for body, says, param in (
            ({"input": []}, "empty", "input"),
            ({"input": [[]]}, "empty", "input"),
            ({"input": [[10**6]]}, "holds token id 1000000", "input"),
            ({"input": "a", "dimensions": 0}, "greater than or equal to 1", "dimensions"),
            ({"input": ["a"] * 2048, "dimensions": 257}, "this model's embeddings have 256", "dimensions"),
            ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format"),
            ({"input": "a", "temperature": 1}, "temperature", "temperature"),
            ({"input": ["a"] * 2049}, "2049 inputs; at most 2048", "input"),
            ({"input": [[1] * 1500] * 201}, "more than 300000 tokens", "input"),
            ({"input": [1] * 10**5}, "maximum context length", "input"),
            ({"model": "demo"}, "'input' is missing", "input"),
        ):
            status, answer, _ = await server.post(body, PATH)
            assert status == 400, (body, answer)
            assert says in answer["error"]["message"]
            assert answer["error"]["param"] == param
        await server.idle()
        assert await computed(server) == 0


async def computed(server: Running) -> int:
    """How many tokens have been computed, as /metrics says."""
    async with server.session.get(server.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    (line,) = [line for line in lines if line.startswith("infer_prompt_tokens_total")]
    return int(float(line.split()[-1]))


def pooled(folder: Path, config: object, modules: object = None) -> str:
    shutil.copytree(CHECKPOINT, folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
    return str(folder)


async def test_a_mean_and_its_company(tmp_path: Path) -> None:
    """Beside answers that generate, and when the prompt is cached."""
    path = pooled(tmp_path / "mean", {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True})
    async with running(model={"path": path, "dtype": "float32"}, engine={"prefill_chunk_size": 16}) as server:
        bodies = [{"prompt": text, "max_tokens": 30, "temperature": 0} for text in TEXTS]
        others = [asyncio.create_task(server.post(body)) for body in bodies]
        found = vectors(await embedded(server, input=TEXTS))
        assert all(status == 200 for status, _, _ in await asyncio.gather(*others))
        np.testing.assert_allclose(found, by_transformers(TEXTS, "mean"), atol=1e-5)
        assert np.array_equal(vectors(await embedded(server, input=TEXTS)), found)


@pytest.mark.parametrize(
    ("config", "modules", "says"),
    [
        ({"pooling_mode_cls_token": True}, None, "'cls_token'"),
        (
            {"pooling_mode": "lasttoken"},
            [{"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling", "Dense")],
            "'Dense'",
        ),
    ],
)
async def test_other_ways_to_pool_are_refused(config: object, modules: object, says: str, tmp_path: Path) -> None:
    async with running(model={"path": pooled(tmp_path / "other", config, modules)}) as server:
        status, answer, _ = await server.post({"input": "a"}, PATH)
        assert status == 400
        assert f"makes embeddings by {says}" in answer["error"]["message"]
        status, _, _ = await server.post({"prompt": "a", "max_tokens": 1})
        assert status == 200
