"""EAGLE-3 heads against the same in plain torch, in float64, from hidden states of transformers' models."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.examples import slowly
from tests.models.checkpoints import (
    HEADS,
    VOCAB,
    Family,
    as_speculators,
    edit_tensors,
    write_checkpoint,
    write_eagle,
)
from tests.support import Always
from torch import Tensor
from torch.nn.functional import linear, silu, softmax

from infer import LLM, InferError, SamplingParams
from infer.assemble import drafts
from infer.assemble.assembly import Assembly
from infer.assemble.weights import Weights as Model
from infer.contracts.proposer import DraftRequest
from infer.engine import speculation
from infer.engine.payoff import Costs, Payoff
from infer.engine.runner import Launched, Runner
from infer.errors import CheckpointError, SettingsError
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer_models.eagle3 import Eagle3Config
from infer_speculation.heads import HeadProposer

Tensors = dict[str, Tensor]
IDS = "eagle_aux_hidden_state_layer_ids"
PLAIN: dict[str, Any] = {"kernels": {"threads": 1, "backend": "reference"}, "cache": {"backend": "slotted"}}
PROMPTS = ["The kettle began it.", "x = 1", "an acre of imaginary grass, cut down by the small mower"]


def speculating(head: Path, **engine: Any) -> dict[str, Any]:
    return {"speculation": "eagle3", "eagle3": {"path": str(head)}, "max_batch_size": 2, "max_seq_len": 256} | engine


# The arithmetic of the paper and of its authors' code


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rotated(x_THE: Tensor, positions_T: Tensor, theta: float) -> Tensor:
    half = x_THE.shape[-1] // 2
    angles = positions_T[:, None].double() * theta ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x_THE[..., :half], x_THE[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def joined(t: Tensors, c: dict[str, Any], read: Sequence[Tensor]) -> Tensor:
    eps = c["rms_norm_eps"]
    if c.get("fc_norm"):
        read = [norm(x, t[f"fc_norm.{i}.weight"], eps) for i, x in enumerate(read)]
    x_TA = torch.cat([*read], dim=-1)
    if c.get("norm_before_fc"):
        x_TA = norm(x_TA, t["input_norm.weight"], eps)
    return linear(x_TA, t["fc.weight"])


def layer(t: Tensors, c: dict[str, Any], embedded_TD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
    """What the head goes on from, and its logits over the tokens that it drafts."""
    T, D, H, K = *hidden_TD.shape, HEADS, c["num_key_value_heads"]
    E, eps, name = D // H, c["rms_norm_eps"], "midlayer."
    normed_TD = norm(hidden_TD, t[f"{name}hidden_norm.weight"], eps)
    residual_TD = normed_TD if c.get("norm_before_residual") else hidden_TD
    x_TD = torch.cat((norm(embedded_TD, t[f"{name}input_layernorm.weight"], eps), normed_TD), dim=-1)

    def projected(part: str, x: Tensor) -> Tensor:
        return linear(x, t[f"{name}self_attn.{part}_proj.weight"], t.get(f"{name}self_attn.{part}_proj.bias"))

    q, k, v = (projected(part, x_TD).view(T, -1, E) for part in "qkv")
    theta, positions = c.get("rope_theta", 10_000.0), torch.arange(T)
    q, k = rotated(q, positions, theta), rotated(k, positions, theta)
    k, v = (x.repeat_interleave(H // K, dim=1) for x in (k, v))
    scores_HTT = torch.einsum("the,she->hts", q, k) / math.sqrt(E)
    scores_HTT = scores_HTT.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    out_TD = torch.einsum("hts,she->the", softmax(scores_HTT, dim=-1), v).flatten(1)
    x_TD = residual_TD + projected("o", out_TD)
    y_TD = norm(x_TD, t[f"{name}post_attention_layernorm.weight"], eps)
    gate, up = (linear(y_TD, t[f"{name}mlp.{part}_proj.weight"]) for part in ("gate", "up"))
    x_TD = x_TD + linear(silu(gate) * up, t[f"{name}mlp.down_proj.weight"])
    normed_TD = norm(x_TD, t["norm.weight"], eps)
    return (normed_TD if c.get("norm_output") else x_TD), linear(normed_TD, t["lm_head.weight"])


def entering(folder: Path, token_ids: Sequence[int], layers: Sequence[int]) -> list[Tensor]:
    """The hidden states that enter the layers of transformers' model, or its final norm."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model.eval().double()
    found: dict[int, Tensor] = {}
    parts = [*model.model.layers, model.model.norm]
    for i in layers:
        parts[i].register_forward_pre_hook(lambda module, args, i=i: found.update({i: args[0][0]}))
    model(torch.tensor([list(token_ids)]))
    return [found[i] for i in layers]


@torch.no_grad()
def reference(
    model: Path, head: Path, layers: Sequence[int], token_ids: Sequence[int], most: int
) -> list[tuple[int, float]]:
    """The head's greedy drafts, each with the distance of its logit to the second largest."""
    t = {name: x.double() if x.is_floating_point() else x for name, x in load_file(head / "model.safetensors").items()}
    c = json.loads((head / "config.json").read_text())
    whole = load_file(model / "model.safetensors")
    embedding = t.get("embed_tokens.weight", whole["model.embed_tokens.weight"].double())
    hidden_TD, following = joined(t, c, entering(model, token_ids[:-1], layers)), list(token_ids[1:])
    found: list[tuple[int, float]] = []
    while len(found) < most:
        out_TD, logits_TW = layer(t, c, embedding[following], hidden_TD)
        (first, second), (best, _) = logits_TW[-1].topk(2)
        token = int(best) + (int(t["d2t"][best]) if "d2t" in t else 0)
        found.append((token, float(first - second)))
        hidden_TD, following = torch.cat((hidden_TD, out_TD[-1:])), [*following, token]
    return found


Proposed = list[tuple[tuple[int, ...], int, list[int]]]
"""Tokens of a sequence, how many drafts were asked for, and the drafts."""


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> Proposed:
    """What is drafted, always as much as may be."""
    found: Proposed = []
    propose = HeadProposer.propose

    def watched(self: HeadProposer, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        proposals = propose(self, draft_requests)
        for each, proposal in zip(draft_requests, proposals, strict=True):
            found.append((tuple(each.token_ids), each.most, proposal))
        return proposals

    monkeypatch.setattr(HeadProposer, "propose", watched)
    monkeypatch.setattr(drafts, "Payoff", lambda costs, waits: Always())
    return found


def answers(
    path: Path, engine: dict[str, Any], max_tokens: int = 24, sections: Mapping[str, Any] = PLAIN
) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with LLM(str(path), engine=engine, **sections) as llm:
        return [list(out.token_ids) for out in llm.generate(PROMPTS, params)]


HEADS_OF: dict[str, tuple[Family, dict[str, Any], tuple[int, ...]]] = {
    "llama": ("llama", {"attention_bias": True, "rope_theta": 500_000.0}, (2, 2, 1)),
    "qwen3": ("qwen3", {"eagle_config": {IDS: [1, 2, 3]}, "kv_heads": 4}, (2, 3, 4)),
    "normalized": (
        "granite",
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True, IDS: [0, 2, 4]},
        (0, 2, 4),
    ),
    "two sizes": ("llama", {"size": 32, "fc_norm": True, "drafted": None, "reads": 2, IDS: [3, 4]}, (3, 4)),
    "own embedding": ("qwen3", {"embed_requires_grad": True, IDS: [2, 3, 1]}, (2, 3, 1)),
}
"""Of each head, the family of its model, what ``write_eagle`` is given, and the layers whose input it reads."""


@pytest.mark.parametrize(
    ("case", "speculators"),
    [
        *(("llama", False), ("qwen3", False), ("normalized", True), ("two sizes", False), ("own embedding", True)),
        *slowly(("llama", True), ("qwen3", True), ("normalized", False), ("two sizes", True), ("own embedding", False)),
    ],
)
def test_drafts_are_those_of_plain_torch(case: str, speculators: bool, proposed: Proposed, tmp_path: Path) -> None:
    family, config, layers = HEADS_OF[case]
    model, head = write_checkpoint(tmp_path / "model", family), write_eagle(tmp_path / "head", **config)
    served = head
    if speculators:
        served = as_speculators(Path(shutil.copytree(head, tmp_path / "served")))
        if "eagle_config" in config:  # is not among the fields of theirs
            edit_config(served, **config["eagle_config"])
    plain = answers(model, {"max_batch_size": 2, "max_seq_len": 256})
    assert answers(model, speculating(served)) == plain
    compared = 0
    for token_ids, most, found in proposed[:: len(proposed) // 5]:
        assert len(found) == most
        for token, (expected, margin) in zip(found, reference(model, head, layers, token_ids, most), strict=True):
            if margin < 1e-3:
                break  # either may be the largest in float32
            assert token == expected
            compared += 1
    assert compared > 20


def edit_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


# A head that is right


def successors(tensors: Tensors) -> None:
    """Make token t + 1 follow token t: the layers add nothing, and the output head has each token's embedding in the
    next one's place."""
    for name, x in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            x.zero_()
        elif "norm" in name:
            x.fill_(1)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].roll(1, 0)


def knowing(model: Path) -> Callable[[Tensors], None]:
    """Make a head's drafts right: a token attends to itself alone, since equal queries and keys are the nearer the
    less they are rotated, and what it sees there is its embedding."""
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]

    def change(tensors: Tensors) -> None:
        size, attention = len(tensors["norm.weight"]), "midlayer.self_attn."
        for name, x in tensors.items():
            if name.endswith(("_proj.weight", "_proj.bias", "hidden_norm.weight")):
                x.zero_()
            elif name.endswith("norm.weight"):
                x.fill_(1)
        for part in "qk":
            tensors[f"{attention}{part}_proj.bias"].fill_(30)
        tensors[f"{attention}v_proj.weight"][:, :size] = torch.eye(size)
        tensors[f"{attention}o_proj.weight"].copy_(torch.eye(size))
        rows = torch.arange(len(tensors["lm_head.weight"]))
        tensors["lm_head.weight"] = embedding[(rows + tensors.get("d2t", torch.zeros_like(rows)) - 1) % VOCAB]

    return change


def without_fifths(tensors: Tensors) -> None:
    """The head drafts all tokens but those whose number 5 divides."""
    chosen = torch.tensor([token for token in range(VOCAB) if token % 5])
    tensors["d2t"] = chosen - torch.arange(len(chosen))


@pytest.fixture(scope="module")
def predictable(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, and heads: one that is always right, one that is in four of five tokens, and one that is not."""
    folder = tmp_path_factory.mktemp("eagle3")
    model = write_checkpoint(folder / "model", "llama", tied=False)
    edit_tensors(model, successors)
    fields: dict[str, Any] = {"attention_bias": True, "norm_before_residual": True, "kv_heads": HEADS, IDS: [4, 0, 2]}
    found = {"model": model, "wrong": write_eagle(folder / "wrong", **fields)}
    for name, drafted in (("right", None), ("often", VOCAB * 4 // 5)):
        found[name] = write_eagle(folder / name, drafted=drafted, **fields)
        if drafted:
            edit_tensors(found[name], without_fifths)
        edit_tensors(found[name], knowing(model))
    return found


@pytest.mark.parametrize("sections", [{}, {"model": {"quantization": "int8"}, "cache": {"backend": "paged"}}])
def test_a_head_that_is_right_saves_passes(
    sections: dict[str, Any], predictable: dict[str, Path], proposed: Proposed
) -> None:
    plain = answers(predictable["model"], {"max_batch_size": 2, "max_seq_len": 256}, 25, PLAIN | sections)
    assert all(ids == [(ids[0] + i) % VOCAB for i in range(25)] for ids in plain)
    found = answers(predictable["model"], speculating(predictable["right"], max_draft_tokens=5), 25, PLAIN | sections)
    assert found == plain
    for token_ids, most, drafted in proposed:
        assert drafted == [(token_ids[-1] + 1 + i) % VOCAB for i in range(most)]
    assert len(proposed) == 5 * len(PROMPTS) - len(PROMPTS)


class Clock:
    """A time in which passes take what their rows cost, and drafts what each costs."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    @staticmethod
    def passes(rows: int) -> float:
        return 1 + 0.03 * (rows - 1)


@pytest.mark.parametrize(("name", "least"), [("right", 4.5), ("often", 2.5), ("wrong", 0.99)])
def test_drafts_of_a_head_pay_if_they_are_right_and_are_given_up_if_not(
    name: str, least: float, predictable: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, costs = Clock(), {rows: Clock.passes(rows) for rows in (1, 2, 4, 8, 16)}
    launch, propose = Runner.launch, HeadProposer.propose

    def timed(self: Runner, batch: Any) -> Launched:
        clock.now += clock.passes(len(batch.token_ids_T))
        return launch(self, batch)

    def drafted(self: HeadProposer, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        clock.now += 0.05 * max(each.most for each in draft_requests)
        return propose(self, draft_requests)

    monkeypatch.setattr(Runner, "launch", timed)
    monkeypatch.setattr(HeadProposer, "propose", drafted)
    monkeypatch.setattr(drafts, "Payoff", lambda _, waits: Payoff(Costs(costs, costs), waits=waits))
    monkeypatch.setattr(speculation, "time", SimpleNamespace(perf_counter=clock))
    params, new = SamplingParams(temperature=0, max_tokens=220, ignore_eos=True), 220
    with LLM(str(predictable["model"]), engine=speculating(predictable[name], max_batch_size=1), **PLAIN) as llm:
        began = clock.now
        (out,) = llm.generate(["a"], params)
    assert list(out.token_ids) == [(out.token_ids[0] + i) % VOCAB for i in range(new)]
    assert new * clock.passes(1) / (clock.now - began) > least


# What is read, and what is refused


@pytest.mark.parametrize(
    ("ids", "count", "layers"),
    [
        (None, 32, (2, 16, 29)),
        ([2, 16, 29], 32, (2, 16, 29)),
        ([1, 15, 28], 32, (2, 16, 29)),
        ([24, 30, 36], 36, (24, 30, 36)),
        ([0, 1, 2], 2, (0, 1, 2)),
    ],
)
def test_layers_are_numbered_in_two_ways(ids: list[int] | None, count: int, layers: tuple[int, ...]) -> None:
    """By what enters them, or, if the first is 1, by what leaves them; both name the same three of EAGLE's authors."""
    fields = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config, _ = Eagle3Config.read({**fields, "num_hidden_layers": 1, "eagle_config": {IDS: ids}})
    assert config.layers(count) == layers


def refused(model: Path, engine: dict[str, Any], kind: type[InferError], *, late: bool = False) -> str:
    """Why a model does not start: before weights are loaded, unless it is ``late``."""
    with pytest.MonkeyPatch.context() as patch:
        if not late:
            patch.setattr(Model, "load", lambda *_: pytest.fail("weights are loaded"))
        with pytest.raises(kind) as caught:
            LLM(str(model), engine=engine, **PLAIN)
    return str(caught.value)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"vocab_size": 300}, "vocab_size is 300, but that of the model that is served is 320"),
    "size": ({"target_hidden_size": 64}, "target_hidden_size is 64, but that of the model that is served is 48"),
    "layers": ({IDS: [2, 4, 5]}, f"{IDS} is [2, 4, 5], so that the head reads what enters layers 2, 4, 5, but the"),
    "outputs": ({IDS: [1, 2, 4]}, f"{IDS} is [1, 2, 4], so that the head reads what enters layers 2, 3, 5, but the"),
    "more layers": ({"num_hidden_layers": 2}, "num_hidden_layers is 2; infer knows EAGLE-3 heads of 1 layer"),
    "final": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false; infer knows"),
    "windows": ({"layer_types": ["sliding_attention"]}, "layer_types has 'sliding_attention'; infer knows"),
    "another layer": ({"model_type": "qwen3"}, "model_type is 'qwen3'; infer knows EAGLE-3 heads of 'llama'"),
    "parallel": ({"speculators_model_type": "peagle"}, "speculators_model_type is 'peagle'; infer knows 'eagle3'"),
    "too many": ({"draft_vocab_size": 321}, "draft_vocab_size is 321, more than vocab_size, which is 320"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_head_that_does_not_fit_is_refused_by_its_field(case: str, tmp_path: Path) -> None:
    fields, why = REFUSED[case]
    model, head = write_checkpoint(tmp_path / "model", "llama"), write_eagle(tmp_path / "head")
    edit_config(head, **fields)
    assert f"{head / 'config.json'}: {why}" in refused(model, speculating(head), CheckpointError)


def test_what_is_no_head_is_refused(tmp_path: Path) -> None:
    model, head = write_checkpoint(tmp_path / "model", "llama"), write_eagle(tmp_path / "head")
    assert "engine.eagle3.path names no draft head" in refused(model, {"speculation": "eagle3"}, SettingsError)
    why = f"{model} is no draft head, but a model (LlamaForCausalLM); give the checkpoint of a head"
    assert why in refused(model, speculating(model), SettingsError)
    why = f"{head / 'config.json'} is that of a draft head, which cannot answer by itself: set model.path"
    assert why in refused(head, {}, CheckpointError, late=True)
    sections = {"engine": speculating(head), "model": {"family": "transformers"}}
    with pytest.raises(SettingsError, match=r"the model plugin 'transformers' of .* does not yield them"):
        LLM(str(model), **PLAIN | sections)
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    why = f"{head} has no model.safetensors and no model.safetensors.index.json; it has pytorch_model.bin, but infer"
    assert why in refused(model, speculating(head), CheckpointError)


def lacking(tensors: Tensors) -> None:
    del tensors["d2t"]


def beyond(tensors: Tensors) -> None:
    tensors["d2t"][-1] = VOCAB


def double(tensors: Tensors) -> None:
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def short(tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"][:-1].clone()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lacking,
            "lacks 'd2t', which says which tokens the head drafts, since draft_vocab_size is 64 and vocab_size",
        ),
        (beyond, "The tensor 'd2t' does not lead to 64 different tokens from 0 to 319"),
        (double, "The tensor 'd2t' does not lead to 64 different tokens from 0 to 319"),
        (short, "The tensor 'd2t' has shape [63], but config.json asks for [64]"),
    ],
)
def test_tokens_that_are_drafted_have_to_be_there(change: Callable[[Tensors], None], why: str, tmp_path: Path) -> None:
    model, head = write_checkpoint(tmp_path / "model", "llama"), write_eagle(tmp_path / "head")
    edit_tensors(head, change)
    late = change in (beyond, double)  # which only values show
    found = refused(model, speculating(head), CheckpointError, late=late)
    assert why.replace("config.json", str(head / "config.json")) in found


def test_a_head_may_be_made_up(tmp_path: Path) -> None:
    """For measurements, as its model."""
    model, head = write_checkpoint(tmp_path / "model", "llama"), write_eagle(tmp_path / "head")
    sections = {"engine": speculating(head), "model": {"load_format": "dummy"}}
    with LLM(str(model), **PLAIN | sections) as llm:
        (out,) = llm.generate(["a"], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(out.token_ids) == 4


def test_a_head_is_quantized_as_its_model_is(tmp_path: Path) -> None:
    model, head = write_checkpoint(tmp_path / "model", "llama"), write_eagle(tmp_path / "head")
    plugins, sizes = Plugins.discover(), list[int]()
    for quantization in ("int8", None):
        sections = {"engine": speculating(head), "model": {"path": str(model), "quantization": quantization}}
        assembly = Assembly(load_settings(plugins, env={}, overrides=sections, read_file=False).settings, plugins)
        without = assembly.weights.sketch(assembly.context).nbytes
        sizes.append(assembly.sketch(assembly.context).nbytes - without)
    assert 0 < sizes[0] < 0.5 * sizes[1]
