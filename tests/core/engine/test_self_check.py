"""The check at start-up: kernels that are broken in one way only are found, and the log names what varies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.examples import slowly
from tests.support import CONFIGS, CPU, DTYPES, build_model, random_tensors
from torch import Tensor

from infer import LLM
from infer.contracts.attention import KV, AttentionSpec, Ragged, Rotary
from infer.contracts.cache import CacheContext
from infer.contracts.kernels import Draws, KernelsRegistration
from infer.contracts.model import ModelContext, ModelProtocol, Pass
from infer.contracts.registration import hookimpl
from infer.engine import exactness
from infer.engine.exactness import self_check
from infer.engine.graphs import DecodeGraphs
from infer.engine.trial_rows import ALWAYS, ROWS, row_counts
from infer_cache_paged import PagedPool, PagedSettings
from infer_kernels_cpu.memory import Buffers
from infer_kernels_cpu.provider import CpuKernels
from infer_layers import Decoder
from infer_models.llama import LlamaConfig, LlamaLayer

MAX_BATCH, MAX_SEQ_LEN = 20, 1200


def nudged(x: Tensor) -> Tensor:
    """By about an ulp."""
    return x * (1 + (2**-7 if x.dtype == torch.bfloat16 else 2**-20))


class Broken(CpuKernels):
    """Where ``when`` says so of a call's number of rows."""

    def __init__(self, when: Callable[[int], bool]) -> None:
        super().__init__()
        self.when = when

    def nudge(self, rows: int, x: Tensor) -> Tensor:
        return nudged(x) if self.when(rows) else x


class Linear(Broken):
    def linear(self, x_TK: Tensor, packed: Any) -> Tensor:
        return self.nudge(len(x_TK), super().linear(x_TK, packed))


class Gated(Broken):
    def gated_linear(self, x_TK: Tensor, packed: Any, activation: Any) -> Tensor:
        return self.nudge(len(x_TK), super().gated_linear(x_TK, packed, activation))


class Norm(Broken):
    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        out_TD, residual_TD = super().add_rms_norm(x_TD, residual_TD, weight_D, eps, unit_offset)
        return out_TD, self.nudge(len(x_TD), residual_TD)


class Rope(Broken):
    def rope_store_kv(
        self,
        q_THE: Tensor,
        k_TKE: Tensor,
        v_TKE: Tensor,
        rotary: Rotary,
        k_cache: KV,
        v_cache: KV,
        flat_T: Tensor,
    ) -> Tensor:
        v_TKE = self.nudge(len(v_TKE), v_TKE)
        return super().rope_store_kv(q_THE, k_TKE, v_TKE, rotary, k_cache, v_cache, flat_T)


class Company(Broken):
    """Of the sequences that are decoded."""

    def extend_attention(self, q_THE: Tensor, k_cache: KV, v_cache: KV, ragged: Ragged, spec: AttentionSpec) -> Tensor:
        out_THE = super().extend_attention(q_THE, k_cache, v_cache, ragged, spec)
        return self.nudge(len(out_THE), out_THE) if len(out_THE) == len(ragged.lens) else out_THE


class Positions(Broken):
    """Of the position of a row that is decoded."""

    def extend_attention(self, q_THE: Tensor, k_cache: KV, v_cache: KV, ragged: Ragged, spec: AttentionSpec) -> Tensor:
        out_THE = super().extend_attention(q_THE, k_cache, v_cache, ragged, spec)
        if len(out_THE) == len(ragged.lens):
            rows = [self.when(start) for start in ragged.starts_B.tolist()]
            out_THE[rows] = nudged(out_THE[rows])
        return out_THE


class Sinks(Broken):
    """Of the sequences that are decoded: then there are no sinks."""

    def extend_attention(self, q_THE: Tensor, k_cache: KV, v_cache: KV, ragged: Ragged, spec: AttentionSpec) -> Tensor:
        if len(q_THE) == len(ragged.lens) and self.when(len(q_THE)):
            spec = replace(spec, sinks_H=None)
        return super().extend_attention(q_THE, k_cache, v_cache, ragged, spec)


class SinkConfig(LlamaConfig):
    attention_sinks = True


class Mixture(Broken):
    def gated_experts(
        self, x_TD: Tensor, experts_TJ: Tensor, shares_TJ: Tensor, packed: Any, activation: Any
    ) -> Tensor:
        return self.nudge(len(x_TD), super().gated_experts(x_TD, experts_TJ, shares_TJ, packed, activation))


class Route(Broken):
    def route(self, logits_TX: Tensor, routing: Any, bias_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
        experts_TJ, shares_TJ = super().route(logits_TX, routing, bias_X)
        return experts_TJ, self.nudge(len(logits_TX), shares_TJ)


class Sample(Broken):
    def sample(self, logits_NV: Tensor, draws: Draws) -> Tensor:
        return super().sample(self.nudge(len(logits_NV), logits_NV.float()), draws)


class Recorded(CpuKernels):
    """While a pass is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = False

    @contextmanager
    def results_in(self, memory: Buffers) -> Iterator[None]:
        self.recording = True
        with super().results_in(memory):
            yield
        self.recording = False

    def gated_linear(self, x_TK: Tensor, packed: Any, activation: Any) -> Tensor:
        out = super().gated_linear(x_TK, packed, activation)
        return nudged(out) if self.recording else out


def tried(
    kernels: CpuKernels,
    dtype: torch.dtype,
    wrap: type[Mixing] | None = None,
    recorded: bool = True,
    schema: type[LlamaConfig] = LlamaConfig,
    family: str = "llama",
    max_seq_len: int = MAX_SEQ_LEN,
    **limits: int,
) -> list[str]:
    config = {**CONFIGS[family], "max_position_embeddings": max_seq_len}
    model: ModelProtocol
    if family == "llama":
        model = Decoder(config, ModelContext(kernels, dtype, CPU, max_seq_len), schema, LlamaLayer)
        model.load(random_tensors(model.expected()))
    else:
        model = build_model(config, dtype, kernels, max_seq_len=max_seq_len)
    if wrap is not None:
        model = wrap(model)
    context = CacheContext(model.attention, MAX_BATCH, max_seq_len, dtype, CPU, kernels)
    pool = PagedPool(context, PagedSettings.model_validate({"num_blocks": 600}))
    record = kernels.recorder()
    assert record is not None
    graphs = DecodeGraphs(model, pool, CPU, MAX_BATCH, record) if recorded else None
    room, own = pool.free_tokens(), dict(vars(kernels))
    sizes = {"max_batch_size": MAX_BATCH, "max_seq_len": max_seq_len, **limits}
    found = self_check(model, pool, kernels, graphs, **sizes, device=CPU)
    assert pool.free_tokens() == room
    assert vars(kernels).keys() == own.keys()
    return found


BROKEN: dict[str, tuple[Callable[[], CpuKernels], str]] = {
    "linear beyond 76 rows": (lambda: Linear(lambda n: n > 76), "Linear.linear of [32] to [128] varies at 1, 2, "),
    "linear beyond 512 rows": (lambda: Linear(lambda n: n > 512), "Linear.linear of [64] to [32] varies at 1, 2, "),
    "linear at 5 and 6 rows": (
        lambda: Linear(lambda n: n in (5, 6)),
        "Linear.linear of [32] to [128] varies at 5, 6 rows",
    ),
    "linear at 9 to 16 rows": (
        lambda: Linear(lambda n: 9 <= n <= 16),
        "Linear.linear of [32] to [128] varies at 9, 10, 11, 12, 13, 14, 15, 16 rows",
    ),
    "linear at 1 row": (lambda: Linear(lambda n: n == 1), "Linear.linear of [32] to [128] varies at 1 row"),
    "gated at 33 rows": (lambda: Gated(lambda n: n == 33), "Gated.gated_linear of [32] to [56] varies at 33 rows"),
    "norms at 200 rows": (lambda: Norm(lambda n: n == 200), "Norm.add_rms_norm of [32] to [32] varies at 200 rows"),
    "stores of more than 100 rows": (lambda: Rope(lambda n: n > 100), "Rope's attention of layer 0 varies in"),
    "decodes of more than 6": (
        lambda: Company(lambda n: n > 6),
        "Company's attention of layer 0 varies in a decode of 9",
    ),
    "decodes of more than 17": (lambda: Company(lambda n: n > 17), "varies in a decode of 20 sequences"),
    "decodes of 3": (lambda: Company(lambda n: n == 3), "Company's attention of layer 0 varies in a decode of 3"),
    "past position 128": (lambda: Positions(lambda p: 128 <= p < 400), "sequences, at positions 1"),
    "past position 512": (lambda: Positions(lambda p: 512 <= p < 900), "sequences, at positions 5"),
    "past position 1024": (lambda: Positions(lambda p: p >= 1024), "sequences, at positions 10"),
    "draws of more than 4": (
        lambda: Sample(lambda n: n > 4),
        "Sample.sample varies at 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, ",
    ),
    "draws of 3": (lambda: Sample(lambda n: n == 3), "Sample.sample varies at 3 rows"),
    "recorded passes": (Recorded, "Decoder.forward varies in a decode of 1 sequence, recorded or replayed"),
}


@pytest.mark.parametrize("dtype", [*slowly(torch.float32), torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_provider_that_varies_in_one_place(broken: str, dtype: torch.dtype) -> None:
    make, says = BROKEN[broken]
    found = tried(make(), dtype)
    assert any(says in fault for fault in found), found


def test_sinks_are_checked() -> None:
    """Those of the checkpoint's tensors."""
    assert tried(CpuKernels(), torch.float32, schema=SinkConfig) == []
    found = tried(Sinks(lambda n: n == 5), torch.float32, schema=SinkConfig)
    assert any("Sinks's attention of layer 0 varies in a decode of 5" in fault for fault in found), found
    assert tried(Sinks(lambda n: n == 5), torch.float32) == []


class Mixing:
    """A model, else as the one that it has, whose rows know of each other."""

    def __init__(self, model: ModelProtocol) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def mixes(self, rows: int) -> bool:
        return rows > 76

    def forward(self, batch: Pass) -> Tensor:
        hidden_ND = self.model.forward(batch)
        return nudged(hidden_ND) if self.mixes(len(batch.token_ids_T)) else hidden_ND


class MixingFew(Mixing):
    def mixes(self, rows: int) -> bool:
        return rows == 3


class MixingMany(Mixing):
    def mixes(self, rows: int) -> bool:
        return 9 <= rows <= 16


class MixingLogits(Mixing):
    def mixes(self, rows: int) -> bool:
        return False

    def logits(self, hidden_ND: Tensor) -> Tensor:
        logits_NV = self.model.logits(hidden_ND)
        return nudged(logits_NV) if len(logits_NV) in (5, 6) else logits_NV


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (Mixing, "Mixing.forward varies in a pass of"),
        (MixingFew, "MixingFew.forward varies in a decode of 3 sequences"),
        (MixingMany, "MixingMany.forward varies in a decode of 16 sequences"),
        (MixingLogits, "MixingLogits.logits varies at 5, 6 rows"),
    ],
)
def test_a_model_that_mixes_rows(wrap: type[Mixing], says: str) -> None:
    found = tried(CpuKernels(), torch.float32, wrap)
    assert any(says in fault for fault in found), found


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_what_is_exact_passes(dtype: torch.dtype, recorded: bool) -> None:
    assert tried(CpuKernels(), dtype, recorded=recorded) == []


@pytest.mark.parametrize(
    ("kernels", "says"),
    [
        (lambda: CpuKernels(), ""),
        (lambda: Mixture(lambda n: n == 33), "Mixture.gated_experts of [32] to [32] varies at 33 rows"),
        (lambda: Mixture(lambda n: n > 512), "Mixture.gated_experts of [32] to [32] varies at 1, 2, "),
        (lambda: Route(lambda n: n == 9), "Route.route of [5] to [2] varies at 9 rows"),
    ],
)
def test_experts_are_tried(kernels: Callable[[], CpuKernels], says: str) -> None:
    found = tried(kernels(), torch.float32, family="qwen3_moe")
    assert any(says in fault for fault in found) if says else not found


@pytest.mark.parametrize("max_seq_len", [2, 3, 9, 40])
@pytest.mark.parametrize("max_batch_size", [1, 3])
def test_the_smallest_engines_are_tried(max_seq_len: int, max_batch_size: int) -> None:
    engine = {"max_seq_len": max_seq_len, "max_batch_size": max_batch_size}
    with LLM("demo", kernels={"backend": "cpu", "threads": 1}, engine=engine) as llm:
        assert llm.served.exact


class Plugin:
    INFER_PLUGIN_API = 2

    @hookimpl
    def infer_kernels(self) -> list[KernelsRegistration]:
        return [KernelsRegistration("broken", lambda device, settings: Linear(lambda n: n == 6), "broken")]


def test_what_varies_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with LLM("demo", plugins=[Plugin()], kernels={"backend": "broken", "threads": 1}) as llm:
        assert not llm.served.exact
    assert "not exact: Linear.linear of [256] to " in caplog.text
    assert "varies at 6 rows" in caplog.text


def test_a_slow_provider_is_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the whole model does is, and the log names the rest."""
    monkeypatch.setattr(exactness, "SECONDS", 0.0)
    found = tried(Recorded(), torch.float32)
    assert found
    assert all(fault.startswith("Decoder.forward varies in a decode of ") for fault in found)
    assert "before it has tried, alone, embedding of [] to [32], " in caplog.text
    assert (
        "gated_linear of [32] to [56], linear of [56] to [32], sample, attention of layer 0 of Recorded" in caplog.text
    )


class Own(PagedPool):
    """A pool whose views compute attention by other kernels than those that the check has."""

    def batched_chunked_prefill_view(self, *args: Any) -> Any:
        view = super().batched_chunked_prefill_view(*args)
        view.storage.kernels = CpuKernels()
        return view


def test_off_a_cpu_rows_are_tried_whatever_they_cost() -> None:
    """On a CPU, dear ones are tried as far as they always are."""
    cost, least, largest, batch = 10**12, 129, 8192, 256
    on_cpu, on_gpu = (row_counts(cost, least, largest, batch, torch.device(kind)) for kind in ("cpu", "cuda"))
    assert on_cpu == [least, *ALWAYS]
    assert on_gpu[0] == largest
    assert {*on_gpu} == {largest, *ROWS, *range(65, batch + 1)}
    assert row_counts(1, least, largest, batch, torch.device("cpu")) == on_gpu, "cheap ones are all tried anywhere"


def test_a_pool_that_computes_attention_itself_is_told(caplog: pytest.LogCaptureFixture) -> None:
    kernels = CpuKernels()
    model = build_model({**CONFIGS["llama"], "max_position_embeddings": 4000}, torch.float32, kernels, max_seq_len=4000)
    context = CacheContext(model.attention, 2, 4000, torch.float32, CPU, kernels)
    pool = Own(context, PagedSettings.model_validate({"num_blocks": 600}))
    assert self_check(model, pool, kernels, max_batch_size=2, max_seq_len=4000, device=CPU) == []
    assert "tries no attention at positions above 1" in caplog.text
    assert "views of Own do not ask CpuKernels for it" in caplog.text


class ByATenth(Broken):
    """Wrong in the same way whatever the number of rows, as a compiler may make it."""

    def __init__(self) -> None:
        super().__init__(lambda n: True)

    def nudge(self, rows: int, x: Tensor) -> Tensor:
        return x * 1.1


class WrongLinear(ByATenth, Linear):
    pass


class WrongGated(ByATenth, Gated):
    pass


class WrongNorm(ByATenth, Norm):
    pass


class WrongStore(CpuKernels):
    def rope_store_kv(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return super().rope_store_kv(q, k, v * 1.1, *rest)


class WrongAttention(CpuKernels):
    def extend_attention(self, q: Tensor, k: KV, v: KV, ragged: Ragged, spec: AttentionSpec) -> Tensor:
        return super().extend_attention(q, k, v, ragged, replace(spec, scale=2 * spec.scale))


class WrongSample(CpuKernels):
    def sample(self, logits_NV: Tensor, draws: Draws) -> Tensor:
        return (super().sample(logits_NV, draws) + 1) % logits_NV.shape[1]


class WrongExperts(CpuKernels):
    def gated_experts(self, x: Tensor, experts: Tensor, *rest: Any) -> Tensor:
        return super().gated_experts(x, experts * 0, *rest)


class WrongRoute(CpuKernels):
    def route(self, *given: Any) -> tuple[Tensor, Tensor]:
        experts, shares = super().route(*given)
        return experts, shares.flip(1)


@pytest.mark.parametrize(
    ("make", "family", "what"),
    [
        (WrongLinear, "llama", "WrongLinear.linear of [32] to [128]"),
        (WrongGated, "llama", "WrongGated.gated_linear of [32] to [56]"),
        (WrongNorm, "llama", "WrongNorm.add_rms_norm of [32] to [32]"),
        (WrongStore, "llama", "WrongStore's attention of layer 0"),
        (WrongAttention, "gemma3", "WrongAttention's attention of layer 0"),
        (WrongSample, "llama", "WrongSample.sample"),
        (WrongExperts, "qwen3_moe", "WrongExperts.gated_experts of "),
        (WrongRoute, "qwen3_moe", "WrongRoute.route of "),
    ],
)
def test_kernels_that_are_wrong_for_any_number_of_rows(make: Callable[[], CpuKernels], family: str, what: str) -> None:
    """Torch finds them."""
    found = [line for line in tried(make(), torch.bfloat16, family=family) if " is wrong: " in line]
    assert any(line.startswith(what) for line in found), found
    assert {line.split(" is wrong")[0].split(" of ")[0].split("'")[0] for line in found} == {
        what.split(" of ")[0].split("'")[0]
    }
