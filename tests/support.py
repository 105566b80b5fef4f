"""Tiny models with random weights, and an engine that is stepped by hand."""

from __future__ import annotations

import functools
import itertools
import random
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

import infer_cache_paged
from infer.checkpoint.quantize import Quantizer
from infer.contracts.attention import KVDtype, QuantizedKV
from infer.contracts.cache import CacheContext, CachePoolProtocol
from infer.contracts.kernels import KernelsProtocol
from infer.contracts.model import ModelContext, ModelProtocol, StatefulModel
from infer.contracts.params import SamplingParams
from infer.contracts.proposer import DraftRequest, ProposerProtocol, ReadingProposer
from infer.contracts.records import RequestRecord, StepRecord
from infer.contracts.request import Event, Request, ThinkingTokens
from infer.contracts.scheduler import Sequence
from infer.contracts.sections import EngineSettings
from infer.engine.engine import Abort, Engine
from infer.engine.graphs import DecodeGraphs
from infer.engine.pace import Pace
from infer.engine.payoff import Payoff, Plan
from infer.engine.runner import Runner
from infer.engine.schedulers import ContinuousScheduler, StaticScheduler
from infer.engine.speculation import Speculation
from infer.kernels.reference import ReferenceKernels
from infer.plugins.discovery import Plugins
from infer_cache_paged import PagedPool, PagedSettings
from infer_cache_slotted import SlottedPool
from infer_models import infer_models

VOCAB = 96
MAX_SEQ_LEN = 320

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
LATENT = {"kv_lora_rank": 20, "q_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
MAX_DRAFTS = 8
"""How many tokens can be taken back from states."""
MAMBA = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 16}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3": COMMON | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2, "tie_word_embeddings": True},
    "qwen2": COMMON
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": 2,
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
    "qwen3_moe": COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 2,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "mistral": COMMON | {"architectures": ["MistralForCausalLM"], "num_hidden_layers": 2, "sliding_window": 40},
    "mixtral": COMMON
    | {
        "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "phi3": COMMON
    | {
        "architectures": ["Phi3ForCausalLM"],
        "num_hidden_layers": 2,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 8.0]},
    },
    "olmo2": COMMON | {"architectures": ["Olmo2ForCausalLM"], "num_hidden_layers": 2},
    "granite_moe": COMMON
    | {
        "architectures": ["GraniteMoeForCausalLM"],
        "num_hidden_layers": 2,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.2,
        "logits_scaling": 1.5,
    },
    "gpt_oss": COMMON
    | {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 2,
        "sliding_window": 12,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
    },
    "qwen2_moe": COMMON
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_hidden_layers": 2,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "glm4_moe": COMMON
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "num_hidden_layers": 2,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "glm4_moe_lite": COMMON
    | LATENT
    | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "num_hidden_layers": 2,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "deepseek_v2": COMMON
    | LATENT
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_hidden_layers": 2,
        "q_lora_rank": None,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "deepseek_v3": COMMON
    | LATENT
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_group": 1,
        "num_hidden_layers": 2,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "youtu": COMMON | LATENT | {"architectures": ["YoutuForCausalLM"], "num_hidden_layers": 2},
    "kimi_linear": COMMON
    | LATENT
    | {
        "architectures": ["KimiLinearForCausalLM"],
        "num_hidden_layers": 2,
        "q_lora_rank": None,
        "linear_attn_config": {"head_dim": 16, "num_heads": 3, "full_attn_layers": [2], "kda_layers": [1]},
        "num_experts": 5,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 24,
    },
    "olmoe": COMMON
    | {
        "architectures": ["OlmoeForCausalLM"],
        "num_hidden_layers": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "num_experts": 7,
        "num_experts_per_tok": 3,
    },
    "gemma3": COMMON
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 3,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "tie_word_embeddings": True,
    },
    "gemma2": COMMON
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "num_hidden_layers": 2,
        "query_pre_attn_scalar": 16,
        "sliding_window": 12,
        "attn_logit_softcapping": 5.0,
    },
    "granite": COMMON
    | {
        "architectures": ["GraniteForCausalLM"],
        "num_hidden_layers": 2,
        "embedding_multiplier": 1.7,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
        "logits_scaling": 3.0,
    },
    "smollm3": COMMON | {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 2, "no_rope_layers": [1, 0]},
    "ministral": COMMON
    | {
        "architectures": ["MinistralForCausalLM"],
        "num_hidden_layers": 2,
        "sliding_window": 30,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "ministral3": COMMON
    | {
        "architectures": ["Ministral3ForCausalLM"],
        "num_hidden_layers": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 20,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "glm4": COMMON | {"architectures": ["Glm4ForCausalLM"], "num_hidden_layers": 2},
    "exaone4": COMMON
    | {
        "architectures": ["Exaone4ForCausalLM"],
        "num_hidden_layers": 2,
        "sliding_window": 25,
        "sliding_window_pattern": 2,
    },
    "seed_oss": COMMON | {"architectures": ["SeedOssForCausalLM"], "num_hidden_layers": 2},
    "lfm2": COMMON
    | {
        "architectures": ["Lfm2ForCausalLM"],
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_multiple_of": 8,
    },
    "lfm2_moe": COMMON
    | {
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "lfm3": COMMON
    | {
        "architectures": ["Lfm3ForCausalLM"],
        "num_hidden_layers": 3,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "sliding_window": 30,
    },
    "laguna": COMMON
    | {
        "architectures": ["LagunaForCausalLM"],
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [4, 6],
        "sliding_window": 30,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "granite_hybrid": COMMON
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 40,
        "residual_multiplier": 0.5,
    }
    | MAMBA,
    "nemotron_h": COMMON
    | {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "M-*EM",
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "moe_latent_size": 24,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
    },
    "falcon_h1": COMMON
    | {
        "architectures": ["FalconH1ForCausalLM"],
        "num_hidden_layers": 2,
        "mamba_d_ssm": 48,
        "key_multiplier": 0.5,
        "ssm_in_multiplier": 1.3,
        "mlp_multipliers": [0.9, 0.7],
        "ssm_multipliers": [0.9, 0.8, 1.1, 0.7, 1.2],
    }
    | MAMBA,
    "bamba": COMMON
    | {"architectures": ["BambaForCausalLM"], "num_hidden_layers": 2, "attn_layer_indices": [1]}
    | MAMBA,
    "qwen3_5": COMMON
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }
    | DELTA,
    "olmo_hybrid": COMMON
    | {
        "architectures": ["OlmoHybridForCausalLM"],
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    }
    | DELTA,
    "qwen3_next": COMMON
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    }
    | DELTA,
    "qwen3_5_moe": COMMON
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    }
    | DELTA,
    "gemma4": COMMON
    | {
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": 4,
        "global_head_dim": 32,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
}
FAMILIES = tuple(CONFIGS)
families = pytest.mark.parametrize(
    "family",
    [
        f if f in ("llama", "qwen3", "gemma3", "qwen3_moe") else pytest.param(f, marks=pytest.mark.slow)
        for f in FAMILIES
    ],
)
"""Every family. Where other parameters vary too, ``make test`` leaves out all but those that differ most."""
QUANTIZED = tuple(f"{family} {bits}" for family in FAMILIES for bits in ("int8", "int4"))
"""The families with quantized weights, also for ``tiny_model``."""
DTYPES = (torch.float32, torch.bfloat16)
CPU = torch.device("cpu")


def random_tensors(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """Random weights, large enough for attention to matter."""
    generator = torch.Generator().manual_seed(1)
    for name, shape in shapes.items():
        yield name, torch.randn(shape, generator=generator) * 0.3


KERNELS: ReferenceKernels = ReferenceKernels()
"""The kernels of models, pools and engines made here; ``tests/conftest.py`` has a fixture that sets them."""


def tiny_model(family: str, dtype: torch.dtype = torch.float32) -> ModelProtocol:
    return _tiny_model(family, dtype, KERNELS)


@functools.cache
def _tiny_model(family: str, dtype: torch.dtype, kernels: Any) -> ModelProtocol:
    family, _, quantization = family.partition(" ")
    return build_model(CONFIGS[family], dtype, kernels, quantization or None)


def build_model(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    kernels: KernelsProtocol | None = None,
    quantization: Any = None,
    max_seq_len: int = MAX_SEQ_LEN,
    draft_head: bool = False,
) -> ModelProtocol:
    architecture = config["architectures"][0]
    (family,) = [r for r in infer_models() if architecture in r.architectures]
    context = ModelContext(kernels or KERNELS, dtype, CPU, max_seq_len, draft_head)
    model = family.factory(config, context, family.settings())
    model.load(
        Quantizer(quantization, [], "auto", model.vocab_size, context.kernels.quantize)(
            random_tensors(model.expected())
        )
    )
    return model


def slotted_pool(
    model: ModelProtocol, dtype: torch.dtype, max_batch_size: int = 4, kv_dtype: KVDtype = "auto"
) -> SlottedPool:
    return _unwritten(SlottedPool(_context(model, dtype, max_batch_size, kv_dtype)))


def paged_pool(
    model: ModelProtocol,
    dtype: torch.dtype,
    max_batch_size: int = 4,
    kv_dtype: KVDtype = "auto",
    max_chunk: int | None = None,
    spare: int | None = None,
    **keys: Any,
) -> PagedPool:
    """A paged pool with pages for one and a half sequences of full length, unless ``num_blocks`` says otherwise, or
    with the fewest for one sequence and ``spare`` blocks. What nobody has written is NaN."""
    context = replace(_context(model, dtype, max_batch_size, kv_dtype), max_chunk=max_chunk)
    settings = PagedSettings.model_validate({"num_blocks": 30} | keys)
    if spare is not None:
        tried = (settings.model_copy(update={"num_blocks": n}) for n in itertools.count(1))
        settings = next(found for found in tried if infer_cache_paged.longest(context, found, 0) >= MAX_SEQ_LEN)
        settings = settings.model_copy(update={"num_blocks": (settings.num_blocks or 0) + spare})
    pool = _unwritten(PagedPool(context, settings))
    for cache in (*pool.storage.k, *pool.storage.v):
        memory = cache.scales if isinstance(cache, QuantizedKV) else cache
        memory[: pool.block_manager.pages.num_pages].fill_(torch.nan)
    return pool


PoolT = TypeVar("PoolT", SlottedPool, PagedPool)


def _unwritten(pool: PoolT) -> PoolT:
    """The pool, in which states that nobody has written are NaN."""
    for part in itertools.chain(*(pool.state_storage.parts if pool.state_storage else [])):
        part[1:] = torch.nan
    return pool


def _context(model: ModelProtocol, dtype: torch.dtype, max_batch_size: int, kv_dtype: KVDtype) -> CacheContext:
    states = model.states if isinstance(model, StatefulModel) else ()
    given = model.attention, max_batch_size, MAX_SEQ_LEN, dtype, CPU, KERNELS
    return CacheContext(*given, kv_dtype=kv_dtype, states=states, max_drafts=MAX_DRAFTS)


POOLS: Mapping[str, Callable[[ModelProtocol, torch.dtype, int], CachePoolProtocol]] = {
    "slotted": slotted_pool,
    "paged": paged_pool,
}


@functools.cache
def letters() -> Tokenizer:
    """A tokenizer whose tokens are single characters, from U+0100 on."""
    made = Tokenizer(models.WordLevel({chr(0x100 + id): id for id in range(VOCAB)}))
    made.decoder = decoders.Fuse()
    return made


class Recorder:
    """A recorder for any pass: a replay runs the pass again and copies its result into the recorded tensor."""

    def __init__(self, cheap: bool = False) -> None:
        self.cheap = cheap
        self.replayed: list[int] = []

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        out = run()
        return out, Replay(self, run, out)


@dataclass
class Replay:
    """A replay function. All of one recorder compare equal."""

    recorder: Recorder
    run: Callable[[], Tensor] = field(compare=False)
    out: Tensor = field(compare=False)

    def __call__(self) -> Tensor:
        self.recorder.replayed.append(len(self.out))
        return self.out.copy_(self.run())


class Knowing:
    """A proposer that knows the answers, by request id, and is right about each token with a probability."""

    def __init__(self, answers: Mapping[str, Seq[int]], right: float = 0.8, seed: int = 0) -> None:
        self.answers = answers
        self.right = right
        self.draw = random.Random(seed)
        self.ended: list[str] = []

    def propose(self, draft_requests: Seq[DraftRequest]) -> list[list[int]]:
        return [self.drafts(draft_request) for draft_request in draft_requests]

    def drafts(self, draft_request: DraftRequest) -> list[int]:
        begin = len(draft_request.token_ids) - len(draft_request.request.prompt_token_ids)
        known = list(self.answers[draft_request.request.id][begin : begin + draft_request.most])
        known += [self.draw.randrange(VOCAB) for _ in range(draft_request.most - len(known))]
        return [token if self.draw.random() < self.right else (token + 1) % VOCAB for token in known]

    def end(self, request_id: str) -> None:
        self.ended.append(request_id)


class Always(Payoff):
    """A payoff by which drafts always pay: as many as allowed or, with ``draw``, up to so many."""

    def __init__(self, draw: random.Random | None = None) -> None:
        self.draw = draw
        self.right: list[tuple[int, int]] = []
        """How many were proposed, and how many of them were right, per verification."""
        self.guesses: list[tuple[str, bool]] = []
        """Whose guesses were compared, and whether they were right."""

    def plan(self, rows: int, most: Mapping[Sequence, int]) -> Plan:
        counts = {s: count if self.draw is None else self.draw.randint(0, max(0, count)) for s, count in most.items()}
        counts = {sequence: count for sequence, count in counts.items() if count > 0}
        return Plan(counts, [s for s, count in most.items() if count > 0 and s not in counts])

    def proposed(self, plan: Plan, found: Mapping[Sequence, int], seconds: float) -> None:
        most = {**plan.counts, **dict.fromkeys(plan.guessing, 1)}
        assert all(count <= most[sequence] for sequence, count in found.items())

    def guessed(self, sequence: Sequence, right: bool) -> None:
        self.guesses.append((sequence.id, right))

    def verified(self, sequence: Sequence, proposed: int, right: int) -> None:
        self.right.append((proposed, right))

    def learn(self, rows: int, drafts: int, seconds: float) -> None:
        assert rows > drafts

    def end(self, sequence: Sequence) -> None: ...


@dataclass
class Stepper:
    """An engine without a thread; ``steps`` and ``events`` record what it does."""

    engine: Engine
    pool: CachePoolProtocol
    max_batch_size: int
    lag: int
    room: int
    """How many positions were free at the start."""
    events: dict[str, list[Event]] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    finished: list[RequestRecord] = field(default_factory=list)

    def submit(
        self,
        prompt: list[int],
        id: str,
        salt: str = "",
        priority: int = 0,
        thinking: ThinkingTokens | None = None,
        **params: Any,
    ) -> Request:
        """Submit a request. Its id is its seed if none is given, so that each run draws the same tokens."""
        request = Request.make(
            prompt,
            SamplingParams(**{"seed": zlib.crc32(id.encode())} | params),
            vocab_size=VOCAB,
            max_seq_len=MAX_SEQ_LEN,
            id=id,
            cache_salt=salt,
            priority=priority,
            thinking=thinking,
        )
        self.engine.submit(request)
        return request

    def abort(self, id: str) -> None:
        self.engine.submit(Abort(id))

    def run(self) -> None:
        while self.engine.has_work():
            self.engine.step()

    def run_six(self) -> Any:
        """Run six requests, whose batches have every size up to five, and return the answers."""
        for index, length in enumerate([3, 130, 140, 15, 1, 30]):
            prompt = random_prompt(length, seed=index)
            self.submit(prompt, str(index), temperature=1.0, seed=index, max_tokens=6 + index, logprobs=5)
        self.run()
        return {id: [(e.token_ids, e.logprobs, e.finish_reason) for e in events] for id, events in self.events.items()}

    def tokens(self, id: str) -> list[int]:
        return [token for event in self.events[id] for token in event.token_ids]

    def answer(self, id: str) -> list[Event]:
        return self.events[id]


def make_engine(
    model: ModelProtocol,
    dtype: torch.dtype,
    *,
    pool: CachePoolProtocol | None = None,
    backend: str = "slotted",
    eos: frozenset[int] = frozenset(),
    static: bool = False,
    lag: int = 0,
    graphs: DecodeGraphs | None = None,
    kernels: KernelsProtocol | None = None,
    tokenizer: Any = None,
    proposer: ProposerProtocol | None = None,
    payoff: Any = None,
    pace: Pace | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **keys: Any,
) -> Stepper:
    """An engine; with a ``proposer`` one that speculates, always unless ``payoff`` decides otherwise."""
    chosen = EngineSettings.model_validate({"max_batch_size": 4} | keys)
    pool = pool or POOLS[backend](model, dtype, chosen.max_batch_size)
    scheduler = (StaticScheduler if static else ContinuousScheduler)(pool, chosen)

    def publish(events: Seq[Event]) -> None:
        for event in events:
            stepper.events.setdefault(event.request_id, []).append(event)

    def notify(hook: str, record: StepRecord | RequestRecord) -> None:
        if isinstance(record, StepRecord):
            stepper.steps.append(record)
        else:
            stepper.finished.append(record)

    speculation = None
    if proposer is not None:
        speculation = Speculation(
            proposer,
            "The proposer",
            pool,
            payoff or Always(),
            truncate=getattr(pool, "truncate"),  # noqa: B009
            most=8,
            max_tokens_per_step=chosen.max_tokens_per_step,
            vocab_size=VOCAB,
        )
    engine = Engine(
        Runner(
            model,
            pool,
            kernels or KERNELS,
            CPU,
            chosen.max_batch_size,
            graphs,
            keep_hidden=isinstance(proposer, ReadingProposer),
        ),
        scheduler,
        pool,
        tokenizer=tokenizer,
        eos_token_ids=eos,
        max_seq_len=MAX_SEQ_LEN,
        lag=lag,
        publish=publish,
        notify=notify,
        speculation=speculation,
        pace=pace,
        priority_aging_s=chosen.priority_aging_s,
        clock=clock,
    )
    stepper = Stepper(engine, pool, chosen.max_batch_size, lag, pool.free_tokens())
    return stepper


def random_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def held(thing: object, *without: object) -> int:
    """Bytes of all tensors but indices that an object leads to, by attributes, containers and what functions enclose;
    of none that only ``without`` leads to."""
    seen, storages, left = {id(each) for each in without}, {}, [thing]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, (type, ModuleType, ReferenceKernels, str)):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            if each.dtype != torch.int64:
                storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        elif isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, (list, tuple, set, frozenset)):
            left += each
        elif isinstance(each, FunctionType):
            left += [cell.cell_contents for cell in each.__closure__ or () if cell != CellType()]
        elif isinstance(each, MethodType):
            left.append(each.__self__)
        elif isinstance(each, functools.partial):
            left += [each.func, *each.args, *each.keywords.values()]
        else:
            left += getattr(each, "__dict__", {}).values()
    return sum(storages.values())


def without(name: str) -> Plugins:
    """All installed plugins but that of one entry point."""
    return Plugins.discover(installed=[entry for entry in entry_points(group="infer") if entry.name != name])


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Products this small gain nothing from threads, and where another process is busy they wait for it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
