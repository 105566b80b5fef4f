"""A model whose forward pass is that of transformers' own module, on infer's cache and kernels.

Shapes: T tokens, N wanted rows, D hidden size, V vocabulary size."""

from __future__ import annotations

import inspect
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from infer.contracts.attention import AttentionSpec, Rotary
from infer.contracts.cache import KVCacheView
from infer.contracts.model import ModelContext, Pass
from infer.errors import CheckpointError, one_line
from infer.weight import GroupedWeight, Weight
from infer_layers import Embedding, GatedMLP, Linear, RMSNorm, Weights
from infer_models_transformers.attention import (
    ADAPTED,
    POINT,
    RUN,
    TRY,
    AttentionCall,
    Point,
    Rotations,
    Trial,
    UnfitError,
)
from infer_models_transformers.attention import rotate_in_cache as rotate
from infer_models_transformers.exact import Exactly, Guard
from infer_models_transformers.modules import (
    Packed,
    PackedEmbedding,
    PackedExperts,
    PackedGatedMLP,
    PackedLinear,
    PackedRMSNorm,
    RotaryTable,
    Team,
    embedding_scale,
    experts_activation,
    gated_activation,
    is_linear,
    is_rotary,
    is_transposed_linear,
    rms_norm_of,
)
from infer_models_transformers.parts import Head, Loose, Renaming, computes
from infer_models_transformers.preparing import STATE, architecture, fill_buffers, plain, unfit, widen

log = logging.getLogger(__name__)

TRIED = 6
"""Tokens of the passes that are tried before there are weights."""
ROWS = (1, 2, 5, 19)
"""Of how many tokens the passes are whose rows have to be equal."""
TRANSPOSED = "transposed_weight"
"""The name of a weight whose rows are its outputs, where the checkpoint's has them as columns."""
GATED_MLP = (["gate_proj", "up_proj", "down_proj"], "act_fn")
MASKS = (r"\.(attn|attention|self_attn)\.(bias|masked_bias|causal_mask)$",)
"""The names of causal masks, which older checkpoints hold."""


class TransformersModel:
    """A ModelProtocol, UnstackingModel and SparingModel. Raises CheckpointError if transformers' module cannot be
    run."""

    @torch.inference_mode(False)  # there, operations do not reach the guard as what they are made of
    def __init__(self, config: Mapping[str, Any], context: ModelContext) -> None:
        self._context = context
        self._name = architecture(config)
        self._trying = True
        self._weights = Weights(context)
        self._team = Team(context.device)
        self._loose = Loose(self._weights, self._team)
        self._mode = Exactly(self._loose)
        self._replaced: Counter[str] = Counter()
        with self._blame("cannot be made"):
            whole = self._made(config)
        self._whole = whole
        unused = [*MASKS, *(getattr(whole, "_keys_to_ignore_on_load_unexpected", None) or ())]
        self._unused = re.compile("|".join(f"(?:{each})" for each in unused))
        """The names of tensors that checkpoints hold and transformers passes over."""
        self._empty = list(whole.parameters())
        """The module's own parameters, which are told apart by their ids."""
        self._prefix, self._base = self._base_of(whole)
        self._renamed = Renaming(whole, self._prefix)
        self._replace()
        self._loose.names = {id(x): name for name, x in whole.named_parameters()}
        self._points: list[Point] = []
        self.attention: Sequence[AttentionSpec] = self._tried()
        self._expect_rest()
        with self._blame("cannot be made"):
            fill_buffers(whole, list(whole.modules()), context.device)
        self._head = Head()
        whole._modules[self._prefix] = self._head
        with self._blame("has an output head that cannot be tried"):
            logits = self._run_head(torch.empty((1, TRIED, self._hidden_size), dtype=context.dtype, device="meta"))
        self.vocab_size: int = logits.shape[-1]
        routers = {self._loose.names[id] for id in self._loose.expected}
        tables = {name for name, rows in self._tables.items() if rows != self.vocab_size}
        self.spared = frozenset(routers | tables | self._delicate)
        """As in SparingModel: a table of positions is one, too."""
        self._trying = False

    # What the engine calls.

    def forward(self, batch: Pass) -> Tensor:
        hidden_TD = self._run(batch.token_ids_T[None], batch.positions_T[None], batch.cache)[0]
        return hidden_TD if batch.rows_N is None else hidden_TD.index_select(0, batch.rows_N)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self._run_head(hidden_ND[None])[0].to(hidden_ND.dtype)

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        return self._weights.shapes()

    def unstack(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        return self._weights.unstack(self._named(tensors))

    def load(self, tensors: Iterable[tuple[str, Weight]]) -> None:
        self._weights.load(self._named(tensors), optional=self._tied)
        if self._context.device.type == "meta":  # there are no values to compare
            return
        self._prove()
        rest = Counter(type(m).__name__ for m in self._base.modules() if computes(m))
        plain = ", ".join(f"{count} {name}" for name, count in rest.most_common()) or "nothing"
        packed = ", ".join(f"{count} {name}" for name, count in self._replaced.most_common())
        log.info(
            "%s runs by transformers' own module, slower than by a family of infer's: infer's kernels compute "
            "attention and %s; plain torch computes %s and what connects them",
            self._name,
            packed,
            plain,
        )

    # Making the module.

    def _made(self, config: Mapping[str, Any]) -> Any:
        kind = getattr(transformers, self._name)
        if getattr(kind, "_is_stateful", False):
            raise self._refusal(STATE)
        theirs = kind.config_class.from_dict(plain(config))
        if reason := unfit(kind, theirs):
            raise self._refusal(reason)
        made_for = getattr(theirs, "max_position_embeddings", None)
        if isinstance(made_for, int) and made_for < self._context.max_seq_len:
            raise CheckpointError(
                f"config.json: the model was made for {made_for} positions, but {self._context.max_seq_len} are to be "
                f"served; set engine.max_seq_len to {made_for} or fewer."
            )
        adapted = not kind._can_set_attn_implementation()
        # Its own parameters are never filled, so who counts memory is not to count them.
        with torch.utils._python_dispatch._disable_current_modes(), torch.device("meta"):
            whole = kind._from_config(
                theirs,
                attn_implementation="eager" if adapted else TRY,
                experts_implementation="eager",
                dtype=self._context.dtype,
            )
        whole.eval().requires_grad_(False)
        widen(whole, self._context.dtype)
        whole.tie_weights()
        for module in whole.modules():
            if hasattr(module, "create_position_ids_from_input_ids"):
                raise self._refusal("it counts positions from its padding token, not from 0")
            if isinstance(module, transformers.PreTrainedModel):
                module.config._attn_implementation = TRY
        for module in whole.modules():
            if type(module).__name__ in ADAPTED:
                ADAPTED[type(module).__name__](module)
        known = [module for module in whole.modules() if is_rotary(module) or isinstance(module, nn.Embedding)]
        fill_buffers(whole, known, torch.device("cpu"))  # which tell what these modules compute
        return whole

    def _base_of(self, whole: Any) -> tuple[str, nn.Module]:
        """The name and the module of what comes before the output head."""
        found = [(n, m) for n, m in whole.named_children() if isinstance(m, transformers.PreTrainedModel)]
        if len(found) != 1:
            raise self._refusal("it does not consist of one base model and an output head")
        if "position_ids" not in inspect.signature(found[0][1].forward).parameters:
            raise self._refusal("it takes no positions: it counts them by itself, or does without (ALiBi)")
        return found[0]

    def _replace(self) -> None:
        """Have infer's kernels compute what they can."""
        w = self._weights
        norms: dict[tuple[Any, ...], tuple[float, bool] | None] = {}
        owners: dict[int, tuple[str, Embedding | None]] = {}
        self._tied: list[str] = []
        self._turned: dict[str, tuple[int, ...]] = {}
        """The weights that have their outputs as columns."""
        self._tables: dict[str, int] = {}
        """How many rows the weights of embeddings have."""
        self._delicate: set[str] = set()
        """Weights that plain torch holds, or that are wider than the model's dtype."""
        done: set[nn.Module] = set()
        for name, module in list(self._whole.named_modules()):
            if module in done or name == "":
                continue
            weight: Any = getattr(module, "weight", None)
            made: nn.Module | None = None
            # Only products know another dtype than the model's.
            usual = all(x.dtype == self._context.dtype for x in module.parameters())
            if is_rotary(module):
                made = RotaryTable(module, self._context)
            elif usual and (activation := gated_activation(module, *GATED_MLP)):
                size, inner = module.gate_proj.in_features, module.gate_proj.out_features
                made = PackedGatedMLP(GatedMLP(w, name, size, inner, activation), module)
                done.update(module.children())
            elif usual and (acting := experts_activation(module)):
                made = PackedExperts(w, name, module, acting)
                done.update(module.children())
            elif usual and (scale := embedding_scale(module)) is not None:
                size = module.num_embeddings, module.embedding_dim
                embedding = Embedding(w, name, *size, None if scale == 1 else scale)
                owners[id(weight)] = f"{name}.weight", embedding
                self._tables[f"{name}.weight"] = size[0]
                made = PackedEmbedding(embedding, module)
            elif is_linear(module):
                N, K = module.weight.shape
                first = owners.get(id(weight))
                if first is not None and first[1] is not None:
                    self._tied.append(f"{name}.weight")
                    made = PackedLinear(self._tied_product(first[1], name, module), module, K, N)
                elif first is None:
                    owners[id(weight)] = f"{name}.weight", None
                    if not usual:
                        self._delicate.add(f"{name}.weight")
                    made = PackedLinear(
                        Linear(w, name, K, N, module.bias is not None, dtype=weight.dtype), module, K, N
                    )
            elif usual and is_transposed_linear(module):
                made = self._transposed(name, module)
            elif usual and weight is not None:
                key = (type(module), weight.shape, getattr(module, "variance_epsilon", getattr(module, "eps", None)))
                if key not in norms:
                    norms[key] = rms_norm_of(module)
                if (found := norms[key]) is not None:
                    made = PackedRMSNorm(RMSNorm(w, name, len(weight), *found), module)
            if made is not None:
                made.eval()
                if isinstance(made, Packed):
                    made.team = self._team
                    self._replaced[type(made).__name__.removeprefix("Packed")] += 1
                parent, _, own = name.rpartition(".")
                self._whole.get_submodule(parent)._modules[own] = made
        self._owners = owners

    def _transposed(self, name: str, module: Any) -> nn.Module:
        """A module whose weight is [K, N]."""
        K, N = module.weight.shape
        inner = Linear(self._weights, f"{name}.{TRANSPOSED}", K, N)
        self._turned[f"{name}.weight"] = (K, N)
        self._weights.expect_stack(f"{name}.weight", (K, N), lambda x: [(f"{name}.{TRANSPOSED}.weight", x.T)])
        return PackedLinear(self._plus_bias(inner, name, N), module, K, N)

    def _tied_product(self, embedding: Embedding, name: str, module: Any) -> Callable[[Tensor], Tensor]:
        kernels = self._context.kernels

        def product(x_TK: Tensor) -> Tensor:
            out: Tensor = kernels.linear(x_TK, embedding.packed)
            return out

        return product if module.bias is None else self._plus_bias(product, name, len(module.bias))

    def _plus_bias(self, product: Callable[[Tensor], Tensor], name: str, size: int) -> Callable[[Tensor], Tensor]:
        bias: list[Tensor] = []
        self._weights.expect(f"{name}.bias", (size,), lambda x: bias.append(x.clone()))
        return lambda x_TK: product(x_TK) + bias[0]

    def _expect_rest(self) -> None:
        """Declare the parameters and buffers that plain modules hold."""
        for prefix, module in self._whole.named_modules():
            held = [("_parameters", own, x) for own, x in module._parameters.items()]
            held += [
                ("_buffers", own, x)
                for own, x in module._buffers.items()
                if own not in module._non_persistent_buffers_set
            ]
            for kind, own, value in held:
                if value is not None and value.is_meta:
                    self._expect_plain(f"{prefix}.{own}".removeprefix("."), module, kind, own, value)

    def _expect_plain(self, name: str, module: nn.Module, kind: str, own: str, value: Tensor) -> None:
        def take(weight: Weight) -> None:
            plain = weight.dequantize() if isinstance(weight, GroupedWeight) else weight.clone()
            held = nn.Parameter(plain, requires_grad=False) if kind == "_parameters" else plain
            getattr(module, kind)[own] = held

        if id(value) in self._loose.expected:
            return
        first = self._owners.get(id(value))
        if first is not None and first[0] == name:  # taken by another, such as sinks
            return
        if first is not None:
            raise self._refusal(f"{name} is tied to {first[0]}, which is not plain torch")
        self._owners[id(value)] = name, None
        self._delicate.add(name)
        self._weights.expect(name, tuple(value.shape), take, value.dtype if value.is_floating_point() else None)

    # Trying it, before there are weights.

    def _tried(self) -> list[AttentionSpec]:
        """What each layer's attention asks for, from passes on the meta device."""
        rotations = Rotations()
        calls = self._trial(rotations)
        if not calls:
            raise self._refusal("it has no attention that reaches transformers' attention interface")
        rotated = [rotate(each.module, rotations) for each in calls]
        fits = all(rotated)
        if fits:
            try:
                again = self._trial(rotations)
            except CheckpointError:
                again = []
            fits = bool(again) and all(each.rotates for each in again)
        if not fits:
            for each, made in zip(calls, rotated, strict=True):
                if made:
                    del each.module.forward
        specs = []
        for layer, each in enumerate(calls):
            sinks_H = None
            if each.sinks is not None:
                sinks_H = self._sinks(each.sinks, each.num_heads)
            self._points.append(point := Point(layer, each, rotations, self._context.dtype, self._team))
            setattr(each.module, POINT, point)
            specs.append(each.spec(sinks_H))
        self._implementation(RUN)
        with Guard(self._context.device) as guard:
            self._hidden_size = self._forward_on_meta(None).shape[-1]
        if guard.fault is not None:
            raise self._refusal(
                f"{guard.fault}, whose results may depend on how many tokens a pass has, or which others"
            )
        return specs

    def _sinks(self, sinks: Tensor, count: int) -> Tensor:
        """Where an attention's sinks will be once they are loaded."""
        sinks_H = torch.zeros(count, device=self._context.device)
        name = self._loose.names.get(id(sinks))
        if name is None or sinks.numel() != count:
            raise self._refusal("its attention has sinks that are not a parameter of one value for each head")
        self._weights.expect(name, tuple(sinks.shape), lambda x: sinks_H.copy_(x.flatten()), torch.float32)
        self._owners[id(sinks)] = name, None
        return sinks_H

    def _trial(self, rotations: Rotations) -> list[AttentionCall]:
        calls: list[AttentionCall] = []
        modules = [m for m in self._base.modules() if type(m).__module__.startswith("transformers")]
        for module in modules:
            setattr(module, POINT, Trial(module, calls, rotations, self._context.max_seq_len))
        try:
            self._forward_on_meta(torch.ones((1, TRIED), dtype=torch.int64, device="meta"))
        finally:
            for module in modules:
                delattr(module, POINT)
        return calls

    def _forward_on_meta(self, mask: Tensor | None) -> Tensor:
        ids, positions = (torch.empty((1, TRIED), dtype=torch.int64, device="meta") for _ in range(2))
        with self._blame("cannot be tried"), self._running():
            made = self._base(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)
            hidden: Tensor = made.last_hidden_state
        return hidden

    def _implementation(self, name: str) -> None:
        for module in self._base.modules():
            if isinstance(module, transformers.PreTrainedModel):
                module.config._attn_implementation = name

    # Running it.

    def _run(self, ids: Tensor, positions: Tensor, cache: KVCacheView) -> Tensor:
        for point in self._points:
            point.cache = cache
        with self._running():
            hidden: Tensor = self._base(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        return hidden

    def _run_head(self, hidden: Tensor) -> Tensor:
        self._head.hidden = hidden
        with self._running():
            logits: Tensor = self._whole(input_ids=None, use_cache=False).logits
        return logits

    @contextmanager
    def _running(self) -> Iterator[None]:
        with self._team.alone(), torch.no_grad(), self._mode if self._mode.used or self._trying else nullcontext():
            yield

    def _prove(self) -> None:
        """Compare rows that are computed together with the same rows alone, with an attention that stays within each
        row. Raises CheckpointError if a module mixes rows or computes them differently."""
        most, device = max(ROWS), self._context.device
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocab_size, (most,), generator=generator).to(device)
        positions = torch.randint(self._context.max_seq_len, (most,), generator=generator).to(device)

        def run(begin: int, end: int) -> Tensor:
            part = slice(begin, end)
            hidden = self.forward(Pass(ids[part], positions[part], _Alone(self)))
            return torch.cat((hidden, self.logits(hidden)), dim=-1)

        with torch.inference_mode(), self._blame("cannot be run"):
            together = run(0, most)
            for count in ROWS[:-1]:
                begin = most - count
                found = run(begin, most)
                same = (found == together[begin:]) | (found.isnan() & together[begin:].isnan())
                if not same.all():
                    raise self._refusal(
                        f"a pass of {count} tokens gives other bits than one of {most}: a module of it mixes tokens, "
                        "or computes them by the number of rows"
                    )

    # Names and faults.

    def _named(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        expected = self._weights.shapes() | self._turned
        for name, weight in tensors:
            if name not in expected and name not in self._tied:
                renamed = self._renamed(name, expected)
                if renamed not in expected and self._unused.search(name):
                    continue
                name = renamed
            if isinstance(weight, GroupedWeight) and name in self._turned:
                # Whoever quantizes such a module makes a linear one of it, whose rows are its outputs.
                name = f"{name.removesuffix('weight')}{TRANSPOSED}.weight"
            yield name, weight

    def _refusal(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"config.json names {self._name}, which infer-models-transformers cannot run: {why} "
            f"(transformers {transformers.__version__})."
        )

    @contextmanager
    def _blame(self, what: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except UnfitError as error:
            raise self._refusal(f"its attention {error}") from None
        except Exception as error:  # transformers' modules may raise anything for what they do not expect
            if isinstance(error, NotImplementedError) or "meta tensor" in str(error):
                raise self._refusal("its forward pass lets values of tensors decide what it computes") from error
            raise self._refusal(f"its module {what}: {one_line(error)}") from error


class _Alone:
    """A view in which each token attends to something of its own q, K and V only."""

    def __init__(self, model: TransformersModel) -> None:
        self._model = model

    def attend(
        self, layer: int, q_THE: Tensor, k_TKE: Tensor | None, v_TKE: Tensor | None, rotary: Rotary | None = None
    ) -> Tensor:
        assert k_TKE is not None
        assert v_TKE is not None
        if rotary is not None:
            q_THE, k_TKE = self._model._context.kernels.rope(q_THE, k_TKE, rotary)
        groups = q_THE.shape[1] // k_TKE.shape[1]
        return 0.5 * q_THE + (k_TKE + v_TKE).repeat_interleave(groups, dim=1)
