"""Heads for multi-token prediction against the same in plain torch, since transformers does not run them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests import support
from tests.models.checkpoints import VOCAB, Family, edit_tensors, stacked, with_head, with_next_layer
from torch import Tensor
from torch.nn.functional import linear, silu, softmax

from infer.assemble.assembly import Assembly
from infer.assemble.sizes import Meter
from infer.checkpoint.quantize import Quantizer
from infer.contracts.adapters import LowRank
from infer.contracts.cache import CacheContext
from infer.contracts.model import DraftingModel, ModelContext, Pass
from infer.contracts.sections import Settings
from infer.errors import CheckpointError, SettingsError
from infer.kernels.reference import ReferenceKernels
from infer.plugins.discovery import Plugins
from infer.weight import GroupedWeight, Weight
from infer_cache_slotted import SlottedPool
from infer_kernels_cpu.provider import CpuKernels
from infer_layers import CoarseHead, Embedding, Head, Weights
from infer_models.glm4_moe import Glm4MoeConfig, Glm4MoeLayer
from infer_models.mtp import NextLayerModel

FAMILIES: tuple[Family, ...] = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
Tensors = dict[str, Tensor]
LAYER = "mtp.layers.0."


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight)


def rotated(x_THE: Tensor, positions_T: Tensor, theta: float, size: int) -> Tensor:
    """The first ``size`` values of each head rotated, half against half."""
    angles = positions_T[:, None].double() * theta ** (-torch.arange(0, size, 2).double() / size)
    cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
    a, b, rest = x_THE[..., : size // 2], x_THE[..., size // 2 : size], x_THE[..., size:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def mlp(t: Tensors, name: str, x: Tensor) -> Tensor:
    gate, up = (linear(x, t[f"{name}.{part}_proj.weight"]) for part in ("gate", "up"))
    return linear(silu(gate) * up, t[f"{name}.down_proj.weight"])


def feed_forward(t: Tensors, x_TD: Tensor, top: int) -> Tensor:
    name = f"{LAYER}mlp"
    if f"{name}.gate.weight" not in t:
        return mlp(t, name, x_TD)
    shares, experts = softmax(linear(x_TD, t[f"{name}.gate.weight"]), dim=-1).topk(top)
    shares = shares / shares.sum(-1, keepdim=True)
    out_TD = torch.zeros_like(x_TD)
    for row, x in enumerate(x_TD):
        for share, expert in zip(shares[row], experts[row].tolist(), strict=True):
            out_TD[row] += share * mlp(t, f"{name}.experts.{expert}", x)
    shared = torch.sigmoid(linear(x_TD, t[f"{name}.shared_expert_gate.weight"]))
    return out_TD + shared * mlp(t, f"{name}.shared_expert", x_TD)


def reference(
    t: Tensors, config: dict[str, Any], token_ids_T: Tensor, hidden_TD: Tensor, positions_T: Tensor
) -> tuple[Tensor, Tensor]:
    """The head's hidden states and its logits, of hidden states at these positions and of the tokens after them."""
    eps, H, K, E = (config[key] for key in ("rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim"))
    T = len(token_ids_T)
    embedded = t["model.embed_tokens.weight"][token_ids_T]
    parts = (
        norm(embedded, t["mtp.pre_fc_norm_embedding.weight"], eps),
        norm(hidden_TD, t["mtp.pre_fc_norm_hidden.weight"], eps),
    )
    x_TD = linear(torch.cat(parts, dim=-1), t["mtp.fc.weight"])
    y_TD = norm(x_TD, t[f"{LAYER}input_layernorm.weight"], eps)
    q, k, v = (linear(y_TD, t[f"{LAYER}self_attn.{part}_proj.weight"]) for part in "qkv")
    q_THE, gate_THE = q.view(T, H, 2 * E).chunk(2, dim=-1)
    theta, size = config["rope_parameters"]["rope_theta"], int(E * 0.25)
    q_THE = rotated(norm(q_THE, t[f"{LAYER}self_attn.q_norm.weight"], eps), positions_T, theta, size)
    k_TKE = rotated(norm(k.view(T, K, E), t[f"{LAYER}self_attn.k_norm.weight"], eps), positions_T, theta, size)
    k_THE, v_THE = (x.repeat_interleave(H // K, dim=1) for x in (k_TKE, v.view(T, K, E)))
    scores_HTT = torch.einsum("the,she->hts", q_THE, k_THE) / math.sqrt(E)
    scores_HTT = scores_HTT.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    out_THE = torch.einsum("hts,she->the", softmax(scores_HTT, dim=-1), v_THE) * torch.sigmoid(gate_THE)
    x_TD = x_TD + linear(out_THE.flatten(1), t[f"{LAYER}self_attn.o_proj.weight"])
    y_TD = norm(x_TD, t[f"{LAYER}post_attention_layernorm.weight"], eps)
    x_TD = x_TD + feed_forward(t, y_TD, config.get("num_experts_per_tok", 0))
    hidden_TD = norm(x_TD, t["mtp.norm.weight"], eps)
    return hidden_TD, linear(hidden_TD, t.get("lm_head.weight", t["model.embed_tokens.weight"]))


def coarse(found: Tensor, exact: Tensor) -> None:
    """Logits of weights that have 4 bits, beside exact ones."""
    apart = torch.linalg.norm(found - exact) / torch.linalg.norm(exact)
    assert 1e-3 < apart < 0.15


def loaded(folder: Path, *, draft_head: bool = True) -> Any:
    """The checkpoint's model, and its config."""
    assembly = Assembly(Settings.model_validate({"model": {"path": str(folder), "device": "cpu"}}), Plugins.discover())
    family = assembly.chosen("model").registration
    context = ModelContext(support.KERNELS, torch.float32, support.CPU, 128, draft_head)
    model = family.factory(assembly.checkpoint.config, context, family.settings())
    plain = Quantizer(None, [], "plain", model.vocab_size, support.KERNELS.quantize)
    model.load(plain(model.unstack(assembly.weights.read())))
    return model, assembly.checkpoint.config


@torch.inference_mode()
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_computes_what_it_computes_in_plain_torch(family: Family, tied: bool, tmp_path: Path) -> None:
    """From hidden states, in two chunks with a gap between their positions, and from its own."""
    folder = with_head(tmp_path, family, tied=tied)
    model, config = loaded(folder)
    logits = model.logits
    assert isinstance(model, DraftingModel)
    head = model.draft_head
    assert head is not None
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    token_ids_T = torch.randint(VOCAB, (40,), generator=generator)
    hidden_TD = torch.randn(40, head.hidden_size, generator=generator)
    positions_T = torch.cat((torch.arange(17), torch.arange(30, 53)))
    expected_TD, expected_TV = reference(tensors, config, token_ids_T, hidden_TD, positions_T)

    pool = SlottedPool(CacheContext(head.attention, 1, 128, torch.float32, support.CPU, support.KERNELS))
    pool.allocate(token_ids_T.tolist())
    found = []
    for begin, end in ((0, 17), (17, 40)):
        view = pool.batched_chunked_prefill_view([0], [begin], [end - begin])
        rows_N = torch.arange(end - begin) if begin else None
        part = token_ids_T[begin:end], positions_T[begin:end], view, rows_N, hidden_TD[begin:end]
        found.append(head.forward(Pass(*part)))
    found_TD = torch.cat(found)
    torch.testing.assert_close(found_TD, expected_TD, atol=1e-4, rtol=1e-4)
    coarse(head.logits(found_TD), expected_TV)
    weight_VD = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    coded = support.KERNELS.pack(support.KERNELS.quantize(weight_VD, 4))
    assert torch.equal(head.logits(found_TD), support.KERNELS.linear(found_TD, coded))
    torch.testing.assert_close(logits(found_TD), expected_TV, atol=1e-3, rtol=1e-4)

    own = head.forward(Pass(torch.tensor([5]), torch.tensor([53]), pool.decode_view([0]), None, found_TD[-1:]))
    token_ids_T, positions_T = torch.cat((token_ids_T, torch.tensor([5]))), torch.cat((positions_T, torch.tensor([53])))
    hidden_TD = torch.cat((hidden_TD, found_TD[-1:]))
    expected_TD, _ = reference(tensors, config, token_ids_T, hidden_TD, positions_T)
    torch.testing.assert_close(own, expected_TD[-1:], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_heads_experts_may_be_stacked(tmp_path: Path) -> None:
    """As Qwen3.5's published checkpoints have them."""
    folder = with_head(tmp_path, "qwen3_5_moe")
    given = torch.arange(9), torch.arange(9), None, torch.randn(9, 48, generator=torch.Generator().manual_seed(2))

    def hidden() -> Tensor:
        head = loaded(folder)[0].draft_head
        pool = SlottedPool(CacheContext(head.attention, 1, 128, torch.float32, support.CPU, support.KERNELS))
        pool.allocate([0] * 9)
        view = pool.batched_chunked_prefill_view([0], [0], [9])
        found: Tensor = head.forward(Pass(*given[:2], view, *given[2:]))
        return found

    before = hidden()
    edit_tensors(folder, stacked)
    assert f"{LAYER}mlp.experts.gate_up_proj" in load_file(folder / "model.safetensors")
    assert torch.equal(hidden(), before)


@torch.inference_mode()
def test_a_coarse_head_is_made_of_what_the_head_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of plain weights, and of those of 8 bits, some rows at a time; those of 4 bits, and of no whole groups,
    stand for themselves."""
    monkeypatch.setattr("infer_layers.linear.DEQUANTIZED", 500)
    kernels, x_ND = support.KERNELS, torch.randn(5, 48, generator=torch.Generator().manual_seed(1))

    def logits(weight_NK: Weight, tied: bool) -> tuple[Tensor, Tensor]:
        weights = Weights(ModelContext(kernels, torch.float32, support.CPU, 128))
        embedding = Embedding(weights, "embed", VOCAB, weight_NK.shape[1])
        head = Head(weights, embedding, "head", VOCAB, weight_NK.shape[1], tied)
        made = CoarseHead(weights, head)
        weights.load([("embed.weight", weight_NK)] + ([] if tied else [("head.weight", weight_NK)]))
        x = x_ND[:, : weight_NK.shape[1]]
        return made(x), head(x)

    plain = torch.randn(VOCAB, 48, generator=torch.Generator().manual_seed(2))
    for tied in (False, True):
        coarse(*logits(plain, tied))
        eight = kernels.quantize(plain, 8)
        found, exact = logits(eight, tied)
        coarse(found, exact)
        assert torch.equal(found, logits(eight.dequantize(), tied)[0])
        assert torch.equal(*logits(kernels.quantize(plain, 4), tied))
        for narrow in (40, 47):
            assert torch.equal(*logits(plain[:, :narrow].contiguous(), tied))


def test_a_coarse_head_without_values_counts_what_it_takes() -> None:
    """As `infer doctor` sees it."""
    kernels, device = CpuKernels(), torch.device("meta")

    def peak(copied: bool) -> int:
        with Meter() as meter:
            weights = Weights(ModelContext(kernels, torch.float32, device, 128))
            head = Head(weights, Embedding(weights, "embed", VOCAB, 64), "head", VOCAB, 64, tied=True)
            made = CoarseHead(weights, head) if copied else None
            weights.load([("embed.weight", torch.empty(VOCAB, 64, device=device))])
            del made
        return int(meter.peak)

    assert 0 < peak(True) - peak(False) < VOCAB * 64 * 4 / 2


def test_kernels_without_grouped_weights_draft_by_the_head_itself() -> None:
    class Plain(ReferenceKernels):
        def pack(self, weight_NK: Weight, bias_N: Tensor | None = None) -> Any:
            if isinstance(weight_NK, GroupedWeight):
                raise SettingsError("these kernels have no codes.")
            return super().pack(weight_NK, bias_N)

    weights = Weights(ModelContext(Plain(), torch.float32, support.CPU, 128))
    head = Head(weights, Embedding(weights, "embed", VOCAB, 48), "head", VOCAB, 48, tied=True)
    made = CoarseHead(weights, head)
    generator = torch.Generator().manual_seed(1)
    weights.load([("embed.weight", torch.randn(VOCAB, 48, generator=generator))])
    x_ND = torch.randn(5, 48, generator=generator)
    assert torch.equal(made(x_ND), head(x_ND))


def test_a_head_is_left_out_unless_it_is_asked_for(tmp_path: Path) -> None:
    folder = with_head(tmp_path, "qwen3_next")
    whole, _ = loaded(folder)
    model, _ = loaded(folder, draft_head=False)
    assert model.draft_head is None
    assert whole.expected().keys() - model.expected().keys() == whole.draft_head.expected().keys()
    assert {name for name in load_file(folder / "model.safetensors") if name.startswith("mtp.")} == {
        *whole.draft_head.expected()
    }


def test_a_head_of_several_layers_is_refused(tmp_path: Path) -> None:
    folder = with_head(tmp_path, "qwen3_5", mtp_num_hidden_layers=2)
    loaded(folder, draft_head=False)
    with pytest.raises(CheckpointError, match="mtp_num_hidden_layers is 2; infer knows draft heads of 1 layer"):
        loaded(folder)


NEXT: tuple[Family, ...] = ("glm4_moe", "glm4_moe_lite", "deepseek_v3")


@torch.inference_mode()
@pytest.mark.parametrize("family", NEXT)
def test_a_head_behind_the_last_layer_computes_what_transformers_layer_computes(family: Family, tmp_path: Path) -> None:
    """The layer is transformers'; what stands around it is plain torch."""
    whole = with_next_layer(tmp_path, family)
    model, config = loaded(tmp_path)
    head, tensors = model.draft_head, load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    token_ids_T = torch.randint(VOCAB, (30,), generator=generator)
    hidden_TD = torch.randn(30, head.hidden_size, generator=generator)
    positions_T = torch.cat((torch.arange(17), torch.arange(20, 33)))

    def normed(x: Tensor, name: str) -> Tensor:
        weight = tensors[f"model.layers.3.{name}.weight"]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weight

    embedded = normed(tensors["model.embed_tokens.weight"][token_ids_T], "enorm")
    x_TD = linear(torch.cat((embedded, normed(hidden_TD, "hnorm")), dim=-1), tensors["model.layers.3.eh_proj.weight"])
    angles = whole.model.rotary_emb(x_TD[None], positions_T[None])
    mask = torch.full((30, 30), -torch.inf).triu(1)[None, None]
    out = whole.model.layers[3](x_TD[None], attention_mask=mask, position_embeddings=angles)
    expected_TD = normed((out if isinstance(out, Tensor) else out[0])[0], "shared_head.norm")

    pool = SlottedPool(CacheContext(head.attention, 1, 128, torch.float32, support.CPU, support.KERNELS))
    pool.allocate(token_ids_T.tolist())
    found = []
    for begin, end in ((0, 17), (17, 30)):
        view = pool.batched_chunked_prefill_view([0], [begin], [end - begin])
        part = token_ids_T[begin:end], positions_T[begin:end], view, None, hidden_TD[begin:end]
        found.append(head.forward(Pass(*part)))
    torch.testing.assert_close(torch.cat(found), expected_TD, atol=1e-4, rtol=1e-4)
    logits = linear(expected_TD, tensors["lm_head.weight"])
    coarse(head.logits(torch.cat(found)), logits)
    assert loaded(tmp_path, draft_head=False)[0].draft_head is None


def test_a_head_of_several_layers_behind_the_last_is_refused(tmp_path: Path) -> None:
    with_next_layer(tmp_path, "glm4_moe")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_nextn_predict_layers": 2}))
    edit_tensors(tmp_path, lambda tensors: tensors.update({"model.layers.4.enorm.weight": torch.ones(48)}))
    loaded(tmp_path, draft_head=False)
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers is 2; infer knows draft heads of 1 layer"):
        loaded(tmp_path)


@pytest.mark.parametrize("draft_head", [True, False])
def test_adapters_do_not_change_a_head_behind_the_last_layer(draft_head: bool, tmp_path: Path) -> None:
    with_next_layer(tmp_path, "glm4_moe")
    config = json.loads((tmp_path / "config.json").read_text())
    context = ModelContext(support.KERNELS, torch.float32, support.CPU, 128, draft_head, adapter_slots=1)
    model = NextLayerModel(config, context, Glm4MoeConfig, Glm4MoeLayer)
    assert model.adapters is not None
    change = LowRank(torch.ones(2, 48), torch.ones(48, 2), 1.0)
    for layer, why in ((3, "a layer of the draft head"), (4, "which this model does not have")):
        with pytest.raises(CheckpointError, match=rf"'model.layers.{layer}.self_attn.q_proj', {why}"):
            model.adapters.prepare({f"model.layers.{layer}.self_attn.q_proj": change})
