"""The layers: which tensors they take, which configs they refuse, and arithmetic that no model of ``tests/models``
covers."""

from __future__ import annotations

import copy
import math
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import transformers
from pydantic import BaseModel, PositiveInt
from torch import Tensor

from infer.contracts.attention import AttentionSpec
from infer.contracts.model import ModelContext
from infer.errors import CheckpointError
from infer.kernels.reference import ReferenceKernels
from infer_layers import (
    ROPE_KINDS,
    Attention,
    Decoder,
    DecoderConfig,
    Embedding,
    GatedMLP,
    Head,
    Linear,
    RMSNorm,
    RopeParameters,
    RotaryEmbedding,
    Weights,
    layer_windows,
    read_config,
)
from infer_layers.rotary import rotary_order
from infer_models.falcon_h1 import FalconH1Config, FalconH1Layer
from infer_models.gemma2 import Gemma2Config
from infer_models.gemma3 import Gemma3Config
from infer_models.glm4 import Glm4Config
from infer_models.granite import GraniteConfig
from infer_models.granite_hybrid import GraniteMoeHybridConfig, GraniteMoeHybridLayer
from infer_models.granite_swa import GraniteSWAConfig
from infer_models.kimi_linear import KimiLinearConfig, KimiLinearLayer
from infer_models.laguna import LagunaConfig, LagunaLayer
from infer_models.lfm2 import Lfm2Config, Lfm2Layer
from infer_models.lfm3 import Lfm3Config
from infer_models.llama import LlamaConfig, LlamaLayer
from infer_models.ministral import MinistralConfig
from infer_models.ministral3 import Ministral3Config
from infer_models.mistral import MistralConfig
from infer_models.multimodal import LanguageModel
from infer_models.nemotron_h import NemotronHConfig, NemotronHLayer
from infer_models.olmo2 import Olmo2Config
from infer_models.olmo_hybrid import OlmoHybridConfig, OlmoHybridLayer
from infer_models.phi3 import Phi3Config
from infer_models.qwen2 import Qwen2Config
from infer_models.qwen3 import Qwen3Config
from infer_models.smollm3 import SmolLM3Config

CPU = torch.device("cpu")


def context(dtype: torch.dtype = torch.float32, max_seq_len: int = 32) -> ModelContext:
    return ModelContext(ReferenceKernels(), dtype, CPU, max_seq_len)


def weights(dtype: torch.dtype = torch.float32) -> Weights:
    return Weights(context(dtype))


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Fitting tensors to layers


def one_norm(dtype: torch.dtype = torch.float32) -> tuple[Weights, RMSNorm]:
    w = weights(dtype)
    return w, RMSNorm(w, "norm", 4, 1e-6)


def test_what_is_expected() -> None:
    w = weights()
    Linear(w, ["q", "k"], 3, [4, 2], bias=True)
    Embedding(w, "embed", 5, 3)
    assert w.shapes() == {
        "q.weight": (4, 3),
        "q.bias": (4,),
        "k.weight": (2, 3),
        "k.bias": (2,),
        "embed.weight": (5, 3),
    }


def test_a_missing_tensor() -> None:
    w = weights()
    for name in "edcba":
        RMSNorm(w, name, 4, 1e-6)
    text = refused(lambda: w.load([("c.weight", torch.ones(4))]))
    assert text == "The checkpoint lacks 'a.weight', 'b.weight', 'd.weight' and 1 more."


def test_a_tensor_that_nobody_takes() -> None:
    w, _ = one_norm()
    assert "'other', which this model does not have" in refused(lambda: w.load([("other", torch.ones(4))]))
    w.load([("other", torch.ones(4)), ("norm.weight", torch.ones(4))], optional=["other"])


def test_a_tensor_that_comes_twice() -> None:
    w, _ = one_norm()
    assert "'norm.weight' twice" in refused(lambda: w.load([("norm.weight", torch.ones(4))] * 2))


@pytest.mark.parametrize("shape", [(5,), (1, 4), (4, 1), (), (0,)])
def test_a_tensor_of_another_shape(shape: tuple[int, ...]) -> None:
    w, _ = one_norm()
    text = refused(lambda: w.load([("norm.weight", torch.ones(shape))]))
    assert f"has shape {list(shape)}, but config.json asks for [4]" in text


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_a_tensor_of_another_type(dtype: torch.dtype) -> None:
    w, _ = one_norm()
    text = refused(lambda: w.load([("norm.weight", torch.ones(4).to(dtype))]))
    assert f"is of type {str(dtype).removeprefix('torch.')}; infer loads" in text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_that_is_not_finite(value: float, place: int, dtype: torch.dtype) -> None:
    w, _ = one_norm(dtype)
    bad = torch.ones(4)
    bad[place] = value
    assert "'norm.weight' holds values that are not finite" in refused(lambda: w.load([("norm.weight", bad)]))


def test_a_value_that_does_not_fit_the_type() -> None:
    w, _ = one_norm(torch.float16)
    large = [("norm.weight", torch.full((4,), 1e6))]
    assert "not finite as float16" in refused(lambda: w.load(large))
    w, _ = one_norm(torch.bfloat16)
    w.load(large)


def test_layers_keep_copies() -> None:
    """Whoever gives the tensors may map them from a file, which somebody replaces later."""
    w = weights()
    linear, norm = Linear(w, "linear", 4, 4), RMSNorm(w, "norm", 4, 1e-6)
    embedding = Embedding(w, "embed", 3, 4)
    head = Head(w, embedding, "head", 3, 4, tied=False)
    given = {name: random(*shape) for name, shape in w.shapes().items()}
    w.load(given.items())

    def results() -> list[Tensor]:
        x = random(2, 4, seed=1)
        return [linear(x), norm(x), embedding(torch.tensor([0, 2])), head(x)]

    before = results()
    for tensor in given.values():
        tensor.fill_(7)
    assert all(torch.equal(a, b) for a, b in zip(before, results(), strict=True))


@pytest.mark.parametrize("bias", [False, True])
def test_stacked_linear(bias: bool) -> None:
    w = weights()
    stacked = Linear(w, ["a", "b", "c"], 6, [4, 1, 3], bias)
    given = {name: random(*shape, seed=i) for i, (name, shape) in enumerate(w.shapes().items())}
    w.load(reversed(given.items()))
    x = random(5, 6, seed=9)
    parts = [x @ given[f"{n}.weight"].T + (given[f"{n}.bias"] if bias else 0) for n in "abc"]
    torch.testing.assert_close(stacked(x), torch.cat(parts, dim=-1))


@pytest.mark.parametrize("tied", [False, True])
def test_head(tied: bool) -> None:
    w = weights()
    embedding = Embedding(w, "embed", 7, 4)
    head = Head(w, embedding, "head", 7, 4, tied)
    assert ("head.weight" in w.shapes()) is not tied
    given = {name: random(*shape, seed=i) for i, (name, shape) in enumerate(w.shapes().items())}
    w.load(given.items())
    x = random(3, 4, seed=9)
    torch.testing.assert_close(head(x), x @ given["embed.weight" if tied else "head.weight"].T)


def test_embedding_scale_is_rounded_to_the_weights_type() -> None:
    """Gemma was trained so: in bf16 the square root of 1152 is 34, not 33.94."""
    w = weights(torch.bfloat16)
    embedding = Embedding(w, "embed", 2, 500, scale=1152**0.5)
    table = random(2, 500).bfloat16()
    w.load([("embed.weight", table)])
    assert torch.equal(embedding(torch.tensor([1])), table[1:] * 34)


def test_first_norm_has_no_residual() -> None:
    w, norm = one_norm()
    w.load([("norm.weight", random(4))])
    x = random(2, 4, seed=1)
    normed, residual = norm.add(x, None)
    assert torch.equal(normed, norm(x))
    assert torch.equal(residual, x)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gated_mlp(activation: Any) -> None:
    w = weights()
    mlp = GatedMLP(w, "mlp", 4, 6, activation)
    given = {name: random(*shape, seed=i) for i, (name, shape) in enumerate(w.shapes().items())}
    w.load(given.items())
    x = random(3, 4, seed=9)
    functional = torch.nn.functional
    gate, up = (x @ given[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    activated = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    torch.testing.assert_close(mlp(x), (activated * up) @ given["mlp.down_proj.weight"].T)


# Rotary embeddings


def rope(config: dict[str, Any], layer_type: str | None = None, **options: Any) -> RopeParameters:
    return RopeParameters.read(config, layer_type, **options)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_scaling": None},
        {"rope_theta": 500.0, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 1.0}},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 500.0},
    ],
)
def test_the_ways_to_write_a_base(config: dict[str, Any]) -> None:
    expected = 500.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(rope(config).inverse_frequencies(8), expected)


def test_defaults_of_the_base() -> None:
    assert rope({}).rope_theta == 10_000
    assert rope({}, "full_attention", default_theta=1_000_000.0).rope_theta == 1_000_000
    assert rope({"rope_parameters": None}, "sliding_attention").rope_theta == 10_000


def test_a_base_per_layer_type() -> None:
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    old = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    for config in (new, old):
        full = rope(config, "full_attention").inverse_frequencies(4)
        local = rope(config, "sliding_attention", theta_key="rope_local_base_freq").inverse_frequencies(4)
        torch.testing.assert_close(full, torch.tensor([1 / 8, 1e-3 / 8]))
        torch.testing.assert_close(local, torch.tensor([1.0, 1e-2]))


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    plain = rope({"rope_theta": 500_000.0}).inverse_frequencies(128)
    scaled = rope({"rope_theta": 500_000.0, "rope_scaling": LLAMA3}).inverse_frequencies(128)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    assert short.any()
    assert long.any()
    assert torch.equal(scaled[short], plain[short])
    assert torch.equal(scaled[long], plain[long] / 8)
    between = scaled[~short & ~long]
    assert len(between) > 1
    assert ((between < plain[~short & ~long]) & (between > plain[~short & ~long] / 8)).all()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"rope_scaling": {"type": "axial", "factor": 2}},
            "rope_type 'axial'; infer knows 'default', 'linear', 'dynamic'",
        ),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "factor: Field required"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "short_factor: Field required"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [0], "long_factor": [1]}}, "short_factor: 0: Input"),
        ({"rope_scaling": {"rope_type": None}}, "rope_type None"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "rope_type ['linear']"),
        ({"rope_scaling": {"type": "linear"}}, "factor: Field required"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": None}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "much"}}, "factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, "low_freq_factor"),
        (
            {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}},
            "low_freq_factor has to be below high_freq_factor",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', which is not a table"),
        ({"rope_parameters": [1]}, "rope_parameters is [1], which is not a table"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_theta": math.inf}, "rope_theta"),
        ({"rope_theta": None}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_rotary_parameters_that_are_refused(config: dict[str, Any], says: str) -> None:
    assert says in refused(lambda: rope(config))


def test_heads_that_no_model_has() -> None:
    """Frequencies are made before any weight is read."""
    assert "a head of 1099511627776 values" in refused(lambda: rope({}).inverse_frequencies(1 << 40))


def test_llama3_takes_the_models_length_for_the_original() -> None:
    given = {"max_position_embeddings": 8192, "rope_scaling": {k: v for k, v in LLAMA3.items() if k[:4] != "orig"}}
    expected = rope({"rope_scaling": LLAMA3}).inverse_frequencies(128)
    assert torch.equal(rope(given).inverse_frequencies(128), expected)


def test_layer_types_need_a_table_each() -> None:
    flat = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert "a table per layer type" in refused(lambda: rope(flat, "full_attention"))


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "llama3": {k: v for k, v in LLAMA3.items() if k != "rope_type"} | {"original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-by-length": {"factor": None, "original_max_position_embeddings": 64},
    "yarn-all": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 20,
        "beta_slow": 0.5,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn-flat": {"factor": 4.0, "original_max_position_embeddings": 2, "attention_factor": 0.7},
    "longrope": {
        "short_factor": [1.0 + i / 10 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 64,
    },
    "longrope-factor": {
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 128,
        "factor": 6.0,
    },
    "longrope-attention": {
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.5,
    },
}


@pytest.mark.parametrize("partial", [1.0, 0.75, 0.45])
@pytest.mark.parametrize("case", ROPES)
def test_every_kind_of_rope_is_that_of_transformers(case: str, partial: float) -> None:
    """Of a sequence of the longest length, where its length matters."""
    if case.startswith("yarn") and partial == 0.45:
        partial = 0.5  # of an odd number of values, transformers makes ramps and frequencies that do not fit
    kind, head_size = case.split("-")[0], 16
    pairs = (int(head_size * partial) + 1) // 2
    own = {k: v[:pairs] if isinstance(v, list) else v for k, v in ROPES[case].items()}
    table = {"rope_type": kind, "rope_theta": 5000.0, "partial_rotary_factor": partial} | own
    config = transformers.LlamaConfig(
        head_dim=head_size, max_position_embeddings=128, rope_parameters=copy.deepcopy(table)
    )
    function = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind]
    found = RopeParameters.read({"max_position_embeddings": 128, "rope_parameters": table}, partial=True)
    for length in (40, 100, 300):
        expected, magnitude = function(config, torch.device("cpu"), seq_len=length)
        torch.testing.assert_close(found.inverse_frequencies(head_size, length), expected, rtol=1e-6, atol=0)
    assert found.rotated(head_size) == 2 * pairs
    assert found.magnitude() == pytest.approx(magnitude, rel=1e-12)


def test_the_models_own_original_length_goes_before_the_ropes() -> None:
    """As in transformers, for Phi-3's files have it there."""
    table = ROPES["longrope"] | {"rope_type": "longrope", "rope_theta": 5000.0}
    found = rope({"original_max_position_embeddings": 32, "max_position_embeddings": 128, "rope_parameters": table})
    assert found.magnitude() == pytest.approx((1 + math.log(4) / math.log(32)) ** 0.5)


def test_a_plugin_may_add_a_kind_of_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    class Still(RopeParameters, frozen=True):
        def inverse_frequencies(self, head_size: int, max_seq_len: int = 1) -> Tensor:
            return torch.zeros(head_size // 2)

    monkeypatch.setitem(ROPE_KINDS, "still", Still)
    assert rope({"rope_parameters": {"rope_type": "still"}}).inverse_frequencies(8).sum() == 0


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rotated", "head_size"), [(12, 16), (4, 16), (2, 4), (8, 8)])
def test_the_rest_of_a_partly_rotated_head_stays(rotated: int, head_size: int, interleaved: bool) -> None:
    parameters = rope({"partial_rotary_factor": rotated / head_size}, partial=True)
    table = RotaryEmbedding(context(), parameters, head_size)(torch.tensor([3, 7]))
    order = rotary_order(parameters.rotated(head_size), head_size, interleaved)
    assert (order is None) == (rotated == head_size and not interleaved)
    x = random(2, 3, head_size)
    turned, _ = ReferenceKernels().rope(x if order is None else x[..., order], x[:, :1], table)
    if order is not None:
        turned = turned[..., order.argsort()]
    angles = torch.tensor([3.0, 7.0])[:, None] * parameters.inverse_frequencies(head_size)
    part = x[..., :rotated]
    pairs = part.reshape(*part.shape[:-1], -1, 2) if interleaved else torch.stack(part.chunk(2, -1), -1)
    expected = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    whole = expected.flatten(-2) if interleaved else torch.cat(expected.unbind(-1), -1)
    torch.testing.assert_close(turned[..., :rotated], whole)
    assert torch.equal(turned[..., rotated:], x[..., rotated:])


def test_rotary_table_does_not_depend_on_its_length() -> None:
    parameters = rope({"rope_theta": 10_000.0})
    short = RotaryEmbedding(context(max_seq_len=5), parameters, 12)
    long = RotaryEmbedding(context(max_seq_len=333), parameters, 12)
    positions = torch.tensor([4, 0, 3])
    one, other = short(positions), long(positions)
    for a, b in ((one.cos, other.cos), (one.sin, other.sin)):
        assert a.shape == (3, 6)
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


def test_layers_of_one_rope_share_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RopeParameters] = []

    class Counted(RotaryEmbedding):
        def __init__(self, context: ModelContext, rope: RopeParameters, head_size: int) -> None:
            made.append(rope)
            super().__init__(context, rope, head_size)

    monkeypatch.setattr("infer_layers.decoder.RotaryEmbedding", Counted)
    assert len(set(llama(SMALL | {"num_hidden_layers": 5}).rotary)) == len(made) == 1
    made.clear()
    assert len(set(gemma3(SMALL | {"num_hidden_layers": 12}).rotary)) == len(made) == 2


# Configs


class Example(BaseModel):
    size: PositiveInt
    sizes: list[int] = []


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "config.json: size: Field required."),
        ({"size": 0}, "config.json: size: Input should be greater than 0 (it is 0)."),
        ({"size": 1, "sizes": [1, "x"]}, "config.json: sizes: 1: Input should be a valid integer"),
    ],
)
def test_a_config_names_its_first_fault(values: dict[str, Any], says: str) -> None:
    assert says in refused(lambda: read_config(Example, values))


def test_windows_of_layers() -> None:
    assert layer_windows(["full_attention", "sliding_attention"], 7, 2) == [None, 7]
    assert layer_windows(["full_attention"], None, 1) == [None]
    assert "2 entries, but num_hidden_layers is 3" in refused(lambda: layer_windows(["full_attention"] * 2, 7, 3))
    assert "no sliding_window" in refused(lambda: layer_windows(["sliding_attention"], None, 1))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (AttentionSpec(4, 3, 8, 1.0), "num_attention_heads, 4, is not a multiple of num_key_value_heads, 3"),
        (AttentionSpec(4, 2, 7, 1.0), "head_dim is 7"),
    ],
)
def test_heads_that_do_not_fit(spec: AttentionSpec, says: str) -> None:
    assert says in refused(lambda: Attention(weights(), "attention", 0, 8, spec, rope({})))


LONG: dict[str, Any] = {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [1.0, 2.0]}
SMALL: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}


def like_llama(schema: type[LlamaConfig]) -> Callable[[dict[str, Any]], Decoder]:
    return lambda config: Decoder(config, context(), schema, LlamaLayer)


llama, qwen2, qwen3, mistral, phi3 = map(like_llama, (LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig, Phi3Config))


def hybrid(schema: type[LlamaConfig], layer: Any, **own: Any) -> Callable[[dict[str, Any]], Decoder]:
    return lambda config: Decoder(MAMBA | own | config, context(), schema, layer)


MAMBA = {"mamba_n_heads": 2, "mamba_d_state": 4, "mamba_n_groups": 2}
granite4 = hybrid(GraniteMoeHybridConfig, GraniteMoeHybridLayer, layer_types=["mamba", "attention"])
lfm2 = hybrid(Lfm2Config, Lfm2Layer, layer_types=["conv", "full_attention"])
lfm3 = hybrid(Lfm3Config, Lfm2Layer, layer_types=["conv", "full_attention"])
laguna = hybrid(LagunaConfig, LagunaLayer)
nemotron = hybrid(NemotronHConfig, NemotronHLayer, hybrid_override_pattern="M*", mamba_num_heads=8, mamba_head_dim=4)
falcon = hybrid(FalconH1Config, FalconH1Layer, mamba_d_ssm=8)
olmo_hybrid = hybrid(OlmoHybridConfig, OlmoHybridLayer, layer_types=["linear_attention", "full_attention"])
KIMI = {"head_dim": 4, "num_heads": 2, "short_conv_kernel_size": 4, "full_attn_layers": [2], "kda_layers": [1]}
kimi_linear = hybrid(KimiLinearConfig, KimiLinearLayer, kv_lora_rank=8, qk_rope_head_dim=4, linear_attn_config=KIMI)


def olmo2(config: dict[str, Any]) -> Decoder:
    return Decoder(config, context(), Olmo2Config, LlamaLayer)


def gemma3(config: dict[str, Any]) -> LanguageModel:
    return LanguageModel(config, context(), Gemma3Config, LlamaLayer)


@pytest.mark.parametrize(
    ("family", "changed", "says"),
    [
        (llama, {"hidden_act": "gelu"}, "hidden_act: Input should be 'silu' or 'gelu_pytorch_tanh' (it is 'gelu')"),
        (llama, {"head_dim": None, "num_attention_heads": 3}, "a multiple of num_attention_heads"),
        (llama, {"num_hidden_layers": 0}, "num_hidden_layers"),
        (llama, {"rms_norm_eps": 0}, "rms_norm_eps"),
        (llama, {"vocab_size": None}, "vocab_size"),
        (qwen3, {"hidden_act": "relu"}, "hidden_act"),
        (qwen3, {"sliding_window": 4, "layer_types": ["sliding_attention"] * 2}, "no sliding_window"),
        (
            qwen3,
            {"layer_types": ["linear_attention"] * 2},
            "layer_types: 0: Input should be 'full_attention'",
        ),
        (qwen2, {"hidden_act": "gelu"}, "hidden_act"),
        (qwen2, {"sliding_window": 4, "layer_types": ["sliding_attention"] * 2}, "no sliding_window"),
        (qwen2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, but models of this architecture"),
        (mistral, {"hidden_act": "gelu"}, "hidden_act"),
        (mistral, {"sliding_window": 0}, "sliding_window: Input should be greater than 0 (it is 0)"),
        (mistral, {"layer_types": ["full_attention"] * 2}, "layer_types: Input should be None"),
        (phi3, {"hidden_act": "gelu"}, "hidden_act"),
        (phi3, {"sliding_window": -1}, "sliding_window"),
        (phi3, {"partial_rotary_factor": 1.5}, "partial_rotary_factor: Input should be less than or equal to 1"),
        (phi3, {"partial_rotary_factor": 0.1}, "partial_rotary_factor is 0.1, which leaves nothing to rotate"),
        (phi3, {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type 'linear'; infer knows 'default'"),
        (phi3, {"rope_scaling": LONG | {"long_factor": [1.0]}}, "long_factor has 1 values, but 2 are rotated pairs"),
        (phi3, {"rope_scaling": LONG | {"type": "su"}}, "this rope_type needs max_position_embeddings"),
        (olmo2, {"hidden_act": "gelu"}, "hidden_act"),
        (olmo2, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        (gemma3, {"hidden_activation": "gelu"}, "hidden_activation: Input should be 'silu' or 'gelu_pytorch_tanh'"),
        (
            like_llama(SmolLM3Config),
            {"no_rope_layers": [1]},
            "no_rope_layers has 1 entries, but",
        ),
        (like_llama(SmolLM3Config), {"no_rope_layers": [1, 2]}, "no_rope_layers: 1: Input should be 0 or 1 (it is 2)"),
        (like_llama(GraniteConfig), {"residual_multiplier": 0}, "residual_multiplier"),
        (like_llama(GraniteSWAConfig), {"layer_rope_theta": [1.0]}, "layer_rope_theta has 1 entries, but num_hidden"),
        (like_llama(GraniteSWAConfig), {"layer_rope_theta": [1.0, -1.0]}, "layer_rope_theta: 1: Input should be great"),
        (
            like_llama(Ministral3Config),
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta: Input should be less than or equal to 0",
        ),
        (like_llama(Ministral3Config), {"rope_scaling": {"type": "linear", "factor": 2}}, "knows 'default', 'yarn'"),
        (
            like_llama(MinistralConfig),
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": None},
            "no sliding_",
        ),
        (like_llama(Glm4Config), {"partial_rotary_factor": 0.001}, "leaves nothing to rotate"),
        (like_llama(Gemma2Config), {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        (gemma3, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (gemma3, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (gemma3, {"final_logit_softcapping": -1}, "final_logit_softcapping"),
        (gemma3, {"layer_types": ["full_attention"]}, "1 entries, but num_hidden_layers is 2"),
        (gemma3, {"text_config": [1]}, "text_config is [1], which is not a table"),
        (granite4, {"layer_types": ["mamba"]}, "layer_types has 1 entries, but num_hidden_layers is 2"),
        (granite4, {"layer_types": None}, "config.json: no layer has attention; infer serves models in which one has"),
        (granite4, {"layer_types": ["conv"] * 2}, "layer_types: 0: Input should be 'mamba' or 'attention'"),
        (granite4, {"mamba_n_heads": 3}, "mamba_n_heads is 3 and mamba_d_head 5; their product has to be"),
        (granite4, {"mamba_n_groups": 4}, "Mamba has 2 heads, which is not a multiple of its 4 groups"),
        (granite4, {"mamba_d_conv": 1}, "a causal convolution has a width of 1; it has to be 2 at least"),
        (granite4, {"time_step_limit": [0, "x"]}, "time_step_limit: 1: Input should be a valid number"),
        (lfm2, {"layer_types": ["conv"]}, "layer_types has 1 entries, but num_hidden_layers is 2"),
        (lfm2, {"layer_types": ["conv"] * 2}, "no layer has attention"),
        (lfm2, {"layer_types": ["mamba"] * 2}, "layer_types: 0: Input should be 'conv' or 'full_attention'"),
        (laguna, {"num_attention_heads_per_layer": [2]}, "num_attention_heads_per_layer has 1 entries, but num_hidden"),
        (laguna, {"moe_router_logit_softcapping": 3.0}, "moe_router_logit_softcapping: Input should be less than or"),
        (laguna, {"gating": "per-row"}, "gating"),
        (lfm3, {"layer_types": ["conv", "mamba"]}, "layer_types: 1: Input should be 'conv', 'full_attention' or"),
        (lfm3, {"layer_types": ["sliding_attention"] * 2, "sliding_window": None}, "no sliding_window"),
        (lfm3, {"use_sandwich_norm": False}, "use_sandwich_norm: Input should be True (it is False)"),
        (
            nemotron,
            {"hybrid_override_pattern": "M*X"},
            "'full_attention', 'mlp' or 'moe'",
        ),
        (nemotron, {"hybrid_override_pattern": None}, "layers_block_type: Field required"),
        (nemotron, {"tie_word_embeddings": True}, "tie_word_embeddings: Input should be False"),
        (nemotron, {"mlp_hidden_act": "silu"}, "mlp_hidden_act: Input should be 'relu2'"),
        (falcon, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act: Input should be 'silu'"),
        (falcon, {"ssm_multipliers": [1.0]}, "ssm_multipliers: 1: Field required"),
        (falcon, {"mamba_d_ssm": 9}, "their product has to be the size of Mamba's x, 9"),
        (olmo_hybrid, {"linear_num_key_heads": 400, "linear_num_value_heads": 400}, "has 0 values, 400 heads of 0"),
        (kimi_linear, {"linear_attn_config": KIMI | {"head_dim": 10**30}}, "head_dim: Input should be less than or"),
        (kimi_linear, {"linear_attn_config": KIMI | {"head_dim": 10**6}}, "it has to have from 1 to 2147483647"),
        (kimi_linear, {"linear_attn_config": KIMI | {"kda_layers": [1, 2]}}, "has to name each layer from 1 to 2 once"),
        (kimi_linear, {"mla_use_nope": False}, "mla_use_nope: Input should be True"),
    ],
)
def test_configs_that_are_refused(family: Callable[..., object], changed: dict[str, Any], says: str) -> None:
    family(SMALL)
    assert says in refused(lambda: family(SMALL | changed))


@pytest.mark.parametrize("bare", [False, True])
def test_a_family_names_the_parts_around_its_layers(bare: bool) -> None:
    class Renamed(LlamaConfig):
        embedding_name: ClassVar[str] = "transformer.wte"
        layers_name: ClassVar[str] = "transformer.h"
        norm_name: ClassVar[str] = "transformer.ln_f"
        head_name: ClassVar[str] = "embed_out"

    plain, renamed = (like_llama(config)(SMALL) for config in (LlamaConfig, Renamed))
    tensors = {name: random(*shape, seed=at) for at, (name, shape) in enumerate(plain.expected().items())}
    plain.load(tensors.items())
    others = {"model.embed_tokens": "wte", "model.layers": "h", "model.norm": "ln_f"}
    outer = "" if bare else "transformer."
    mine = {"lm_head": "embed_out"} | {theirs: f"{outer}{ours}" for theirs, ours in others.items()}
    names = {name: f"{mine[part]}{name.removeprefix(part)}" for name in tensors for part in mine if part in name}
    renamed.load((names[name], tensor) for name, tensor in tensors.items())
    assert {name for name in renamed.expected() if not name.startswith("transformer.")} == {"embed_out.weight"}
    ids_T = torch.arange(4)
    assert torch.equal(renamed.embedding(ids_T), plain.embedding(ids_T))
    assert torch.equal(renamed.logits(random(2, 8)), plain.logits(random(2, 8)))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("logits_divisor", "a property"), ("norm", "a method"), ("default_theta", "a class variable (ClassVar)")],
)
@pytest.mark.filterwarnings("ignore:Field name")
def test_a_field_does_not_hide_what_follows_from_the_config(name: str, kind: str) -> None:
    """pydantic warns, and then nobody reads the field of a property, and any checkpoint sets that of a class
    variable."""
    with pytest.raises(TypeError, match=rf"Mine\.{name} is a field.* in DecoderConfig it is {re.escape(kind)}"):
        type("Mine", (DecoderConfig,), {"__annotations__": {name: float}, name: 2.0})


def test_which_layers_slide() -> None:
    assert [spec.window for spec in mistral(SMALL).attention] == [4096] * 2
    assert [spec.window for spec in mistral(SMALL | {"sliding_window": None}).attention] == [None] * 2
    assert [spec.window for spec in phi3(SMALL).attention] == [None] * 2
    assert [spec.window for spec in phi3(SMALL | {"sliding_window": 7}).attention] == [7] * 2


def test_qwen3_slides_from_a_layer_on() -> None:
    config = SMALL | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    assert [spec.window for spec in qwen3(config).attention] == [None, 5]
    assert [spec.window for spec in qwen3(config | {"use_sliding_window": False}).attention] == [None, None]


def test_gemma3_has_every_default() -> None:
    """Google's 4B checkpoint says no more than this of its language model."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    model = gemma3({"text_config": text})
    assert model.vocab_size == 262_208
    assert [spec.window for spec in model.attention[:7]] == [1024] * 5 + [None, 1024]
    first = model.attention[0]
    assert (first.num_heads, first.num_kv_heads, first.head_size, first.scale) == (8, 4, 256, 1 / 16)
    assert model.expected()["model.embed_tokens.weight"] == (262_208, 2560)
    assert model.head.tied
    one = torch.tensor([1])
    frequencies = 1e6 ** -(torch.arange(0, 256, 2) / 256) / 8
    full, sliding = model.rotary[5], model.rotary[0]
    assert full is not None
    assert sliding is not None
    torch.testing.assert_close(full(one)[1], frequencies.sin()[None], atol=1e-6, rtol=1e-5)
    frequencies = 1e4 ** -(torch.arange(0, 256, 2) / 256)
    torch.testing.assert_close(sliding(one)[1], frequencies.sin()[None], atol=1e-6, rtol=1e-5)


class SinkConfig(LlamaConfig):
    attention_sinks = True


def test_a_weight_is_let_go_once_its_layer_has_it() -> None:
    """A view of a mapped file keeps all that has been read of it in memory."""
    model = Decoder(SMALL, context(torch.float32), LlamaConfig, LlamaLayer)
    given: dict[str, Callable[[], object]] = {}

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, shape in model.expected().items():
            alive = [name for name, weight in given.items() if weight() is not None]
            assert alive == [*given][-1:], "loops hold the last one"
            given[name] = weakref.ref(weight := torch.ones(shape))
            yield name, weight
            del weight

    model.load(weights())
    assert len(given) > 10


def test_sinks_come_from_the_checkpoint() -> None:
    model = Decoder(SMALL, context(torch.bfloat16), SinkConfig, LlamaLayer)
    sinks = {f"model.layers.{i}.self_attn.sinks": torch.tensor([0.3 + i, -2.5]) for i in range(2)}
    assert {name: model.expected()[name] for name in sinks} == dict.fromkeys(sinks, (2,))
    specs = list(model.attention)
    model.load((name, sinks.get(name, torch.ones(shape))) for name, shape in model.expected().items())
    for spec, sinks_H in zip(specs, sinks.values(), strict=True):
        assert spec.sinks_H is not None
        assert torch.equal(spec.sinks_H, sinks_H.bfloat16().float())
