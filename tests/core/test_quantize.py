"""Quantizing while loading: the error against float64, what is left out, and the bytes that are reported."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.test_weight import meaning
from tests.examples import examples, slowly
from tests.models.checkpoints import write_checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from infer import LLM, SamplingParams
from infer.checkpoint.quantize import Quantizer
from infer.errors import SettingsError
from infer.kernels.quantize import quantize_weight
from infer.kernels.reference import quantize
from infer.weight import GroupedWeight, Weight, quantize_rows


@given(
    st.sampled_from([4, 8]),
    st.integers(1, 5),
    st.sampled_from([8, 24, 32, 96, 128]),
    st.floats(1e-28, 1e4),
    st.integers(0, 2**32),
)
@settings(max_examples=examples(30, 10))
def test_no_value_is_further_from_its_code_than_half_a_step(bits: Any, n: int, k: int, size: float, seed: int) -> None:
    x = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * size
    x = x.bfloat16().float() if bits == 4 else x
    weight = quantize_weight(x, bits)
    found, group = meaning(weight), weight.group_size
    step = weight.scales_NG.double().abs().repeat_interleave(group, 1)
    error = (found - x.double()).abs()
    # Codes end at 7 or 127 steps, and the scale is chosen or rounded, so that values at the end may be cut off.
    inside = x.double().abs() < 0.98 * (2 ** (bits - 1) - 1) * step
    assert (error <= (0.5 + 1e-5) * step)[inside].all()
    top = x.double().view(n, -1, group).abs().amax(-1)
    assert (error.view(n, -1, group).amax(-1) <= top * (0.34 if bits == 4 else 0.01)).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_may_lie_in_memory_in_any_order(bits: Any) -> None:
    """gpt-oss has its experts' weights transposed."""
    x = torch.randn(96, 40, generator=torch.Generator().manual_seed(1)).T
    found, expected = quantize_weight(x, bits), quantize_weight(x.contiguous(), bits)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scales_NG, expected.scales_NG)


def test_the_scale_is_one_that_leaves_little_error() -> None:
    """Nearly as little on average as the best of 800 scales, and less than the one that keeps the greatest value."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).double()
    error = (meaning(quantize_weight(x, 4)) - x).square().sum(1)
    simple = x.gather(1, x.abs().argmax(1, keepdim=True)) / -8

    def left(scale_N1: Tensor) -> Tensor:
        return ((x / scale_N1).round().clamp(-8, 7) * scale_N1 - x).square().sum(1)

    parts = torch.linspace(0.5, 1.3, 400)
    best = torch.stack([left(simple * part * sign) for part in parts for sign in (1, -1)]).amin(0)
    assert best.mean() <= error.mean() < 1.05 * best.mean()
    assert error.mean() < 0.95 * left(simple).mean()


def test_groups_of_nothing_but_zeros_stay_so() -> None:
    x = torch.zeros(2, 64)
    x[1, 40] = 3
    for bits in (4, 8):
        found = meaning(quantize_weight(x, bits))
        assert (found[x == 0] == 0).all()
        assert found[1, 40].item() == pytest.approx(3, rel=0.01)


def test_values_that_are_not_finite_show_in_the_scales() -> None:
    for value in (torch.nan, torch.inf):
        x = torch.ones(1, 64)
        x[0, 3] = value
        for bits in (4, 8):
            assert not torch.isfinite(quantize_weight(x, bits).scales_NG).all()


@pytest.mark.parametrize("group", [8, 32])
def test_rounded_activations(group: int) -> None:
    x = torch.randn(3, 64, dtype=torch.float64) * torch.tensor([1e-3, 1, 1e20])[:, None]
    x[1, :group] = 0
    x[2, 0] = 1e-44
    q, scale = quantize_rows(x.float(), group)
    assert (q == q.round()).all()
    assert q.abs().max() <= 127
    step = x.view(3, -1, group).abs().amax(-1, keepdim=True) / 127
    assert ((q.double() * scale.double()) - x.view(3, -1, group)).abs().le(step * 0.50001 + 1e-40).all()
    x[0, 0] = torch.nan
    q, scale = quantize_rows(x.float(), group)
    assert torch.isnan(scale[0, 0]).all()
    assert torch.isfinite(scale[0, 1:]).all()


def weights() -> list[tuple[str, Weight]]:
    return [
        ("embed.weight", torch.randn(40, 32)),
        ("norm.weight", torch.ones(32)),
        ("layers.0.mlp.gate.weight", torch.randn(4, 32)),
        ("layers.0.up.weight", torch.randn(64, 32)),
        ("layers.0.odd.weight", torch.randn(2, 33)),
    ]


def test_which_weights_are_quantized() -> None:
    plain = ["*.mlp.gate.weight"]
    quantizer = Quantizer("int4", plain, "auto", 40, quantize_weight)
    found = dict(quantizer(weights()))
    kinds = {name: weight.bits if isinstance(weight, GroupedWeight) else None for name, weight in found.items()}
    assert kinds == {
        "embed.weight": 8, "norm.weight": None, "layers.0.mlp.gate.weight": None, "layers.0.up.weight": 4,
        "layers.0.odd.weight": 8,
    }  # fmt: skip
    assert quantizer.before == 4 * (40 * 32 + 32 + 4 * 32 + 64 * 32 + 2 * 33)
    assert quantizer.nbytes == {
        "8-bit weights in groups of 32": 40 * (32 + 2),
        "plain weights": 4 * (32 + 4 * 32),
        "4-bit weights in groups of 32": 64 * (16 + 2),
        "8-bit weights in groups of 1": 2 * (33 + 2 * 33),
    }
    assert {type(w) for w in dict(Quantizer(None, plain, "auto", 40, quantize_weight)(weights())).values()} == {Tensor}
    narrow = Quantizer(None, plain, "auto", 40, quantize_weight, torch.bfloat16)
    assert sum(1 for _ in narrow(weights())) == 5
    assert narrow.nbytes["plain weights"] * 2 == narrow.before, "a model holds fp32 norms in its own dtype"
    wide = dict(Quantizer("int8", [], "plain", 40, quantize_weight)(weights()))
    quantized = [weight for weight in wide.values() if isinstance(weight, GroupedWeight)]
    assert len(quantized) == 4
    assert not any(weight.int8_activations for weight in quantized)


def test_what_is_quantized_is_not_quantized_again() -> None:
    quantizer = Quantizer("int8", [], "auto", 40, quantize_weight)
    with pytest.raises(SettingsError, match=r"checkpoint's 'a' has 4-bit weights in groups of 32; leave it out"):
        list(quantizer([("a", quantize_weight(torch.randn(4, 32), 4))]))


@pytest.mark.parametrize("kernels", ["cpu", *slowly("reference")])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_served(kernels: str, quantization: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The answers are those of the weights that the codes mean, by transformers; with activations in int8, within their
    rounding. The log gives the bytes."""
    folder = write_checkpoint(tmp_path / "model", "qwen3", tied=False)
    prompt = list(range(5, 45))
    made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                bits: Any = 8 if quantization == "int8" or len(parameter) == made.vocab_size else 4
                parameter.copy_(meaning(quantize_weight(parameter.detach(), bits)))
        expected = made(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(prompt)[1:, None])
    for activations, close in ("plain", 1e-4), ("auto", 0.15):
        caplog.clear()
        model = {"dtype": "float32", "quantization": quantization, "activations": activations}
        with (
            caplog.at_level(logging.INFO),
            LLM(str(folder), model=model, kernels={"backend": kernels}) as llm,
        ):
            assert llm.served.quantization == quantization
            answer = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
        said = [r.getMessage() for r in caplog.records if r.getMessage().startswith(f"weights, {quantization}: ")]
        assert len(said) == 1
        assert "MiB of 8-bit weights in groups of " in said[0]
        assert "(unquantized: " in said[0]
        assert answer.prompt_logprobs is not None
        found = torch.tensor([entry.logprob for entry in answer.prompt_logprobs if entry is not None])
        torch.testing.assert_close(found, expected[:, 0], atol=close, rtol=0)
        assert (found - expected[:, 0]).abs().max() > (1e-4 if activations == "auto" else -1)


def test_codes_follow_from_a_quotient_that_is_rounded_once() -> None:
    """As numpy divides 127 by a group's greatest value. torch divides a number by a tensor in two steps, 1 by it, then
    times 127, and values in the middle between two codes would get the other one."""
    top = np.random.default_rng(1).uniform(0.5, 2, (64, 1)).astype(np.float32)
    inverse, twice = np.float32(127) / top, np.float32(1) / top * np.float32(127)
    middle = (np.arange(1, 127, dtype=np.float32) + np.float32(0.5)) / inverse
    beside = [np.nextafter(middle, np.float32(end)) for end in (0, 2)]
    x = np.concatenate([top, middle, *beside], axis=1)
    expected = np.rint(x * inverse)
    assert (np.rint(x * twice) != expected).any()
    codes, _ = quantize_rows(torch.from_numpy(x), x.shape[1])
    assert np.array_equal(codes[:, 0].numpy(), expected)


class DividingAsGPUs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dividing by a number is multiplying by its inverse, rounded to float32, as torch does on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.div.Tensor and not isinstance(args[1], Tensor):
            return args[0] * torch.tensor(1 / args[1]).float()
        return func(*args, **(kwargs or {}))


def test_scales_are_rounded_once_on_a_gpu_too() -> None:
    """As float64 divides: of some values, the quotient by 127 is not the product with its inverse."""
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(1))
    expected = (x.abs().amax(-1).double() / 127).float()
    # Of a weight, halfway between two bfloat16, so that they are rounded to the even one.
    middles = (129 + 2 * torch.arange(64.0)) / 256 * 127
    weight = torch.nn.functional.pad(middles[:, None], (0, 63))
    with DividingAsGPUs():  # type: ignore[no-untyped-call]
        assert (x.abs().amax(-1) / 127 != expected).any()
        assert torch.equal(quantize(x)[1], expected)
        codes, scales = quantize_rows(x, 64)
        assert torch.equal(scales[:, 0, 0], expected)
        assert torch.equal(quantize_weight(weight, 8).scales_NG[:, 0], (middles.double() / 127).bfloat16())
    assert torch.equal(codes, quantize_rows(x, 64)[0])
