"""compressed-tensors, as llm-compressor writes them: ``pack-quantized``, ``int-quantized`` and ``float-quantized``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from infer.contracts.weights import TensorFilesProtocol
from infer.weight import Weight
from infer_formats.config import GroupSize, Patterns, Size, Table, bad
from infer_formats.files import FLOATS, Bits, QuantizedFiles, in_words, words
from infer_formats.floats import E4M3, PLAIN, dequantized

METHOD = "compressed-tensors"
PACKED = "pack-quantized"
TYPES: Mapping[str, tuple[str, ...]] = {
    PACKED: ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}
"""The formats and the types of weights that they are for."""
BITS = {"int": (4, 8), "float": (8,)}
STRATEGIES = {"int": ("tensor", "channel", "group"), "float": ("tensor", "channel", "group", "block")}


class Args(Table):
    """How weights or activations are rounded."""

    num_bits: int = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: GroupSize | None = None
    block_structure: Annotated[list[Size], Field(min_length=2, max_length=2)] | None = None
    dynamic: bool | str = False
    actorder: str | bool | None = None
    HARMLESS = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})


class Group(Table):
    targets: list[str]
    weights: Args | None = None
    input_activations: Args | None = None
    output_activations: None = None
    format: str | None = None


class Sparsity(Table):
    format: Literal["dense"] = "dense"
    HARMLESS = frozenset({"global_sparsity", "ignore", "registry_requires_subclass", "sparsity_structure", "targets"})


class CompressedTable(Table):
    quant_method: str
    config_groups: dict[str, Group]
    format: str | None = None
    ignore: list[str] | None = None
    kv_cache_scheme: dict[str, Any] | None = None
    sparsity_config: Sparsity | None = None
    transform_config: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    HARMLESS = frozenset({"global_compression_ratio", "quantization_status", "run_compressed", "version"})


class Names:
    """The modules that a list names: by their whole names, and by patterns after ``re:``."""

    def __init__(self, patterns: Patterns, key: str, names: Sequence[str]) -> None:
        self.whole = {name for name in names if not name.startswith("re:")}
        self._patterns = [patterns.compile(key, name[3:]) for name in names if name.startswith("re:")]

    def match(self, module: str) -> bool:
        return any(pattern.matches(module) for pattern in self._patterns)


@dataclass(frozen=True)
class Scheme:
    """How a group's weights are stored."""

    key: str
    """Where the config says so."""
    targets: Names
    packed: bool
    type: str
    bits: int
    block: tuple[int, int]
    """How many rows and columns share a scale; 0 for all."""
    symmetric: bool
    actorder: str | bool | None
    int8_activations: bool

    @property
    def reordered(self) -> bool:
        """Whether columns went into groups by their activations. ``weight_g_idx`` says then which group each is in."""
        return str(self.actorder).lower() in ("group", "dynamic", "true")


class CompressedTensors(QuantizedFiles):
    method = METHOD
    codes = ("weight_packed", "weight")
    beside = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    def __init__(self, config: Mapping[str, Any], files: TensorFilesProtocol) -> None:
        super().__init__(files)
        table = CompressedTable.read(config, METHOD)
        patterns = Patterns(METHOD)
        self._schemes = [
            self._scheme(f"config_groups.{name}", group, table.format, patterns)
            for name, group in table.config_groups.items()
        ]
        self._ignored = Names(patterns, "ignore", table.ignore or [])
        if table.kv_cache_scheme is not None:
            self.unused |= {"k_scale", "k_zero_point", "v_scale", "v_zero_point", "q_scale", "output_scale"}
            self.log_once(logging.WARNING, "kv_cache_scheme is not used: the cache holds K/V in the model's dtype")

    def _scheme(self, key: str, group: Group, format: str | None, patterns: Patterns) -> Scheme:
        """Raises CheckpointError if infer cannot read the group's weights."""
        weights, where = group.weights, "format"
        if group.format is not None:
            format, where = group.format, f"{key}.format"
        if format is None or format not in TYPES:
            raise bad(METHOD, where, f"infer reads {', '.join(TYPES)}", format)
        if weights is None:
            raise bad(METHOD, f"{key}.weights", "infer reads groups of quantized weights", None)
        size, block = weights.group_size, weights.block_structure
        strategy = weights.strategy or ("tensor" if size is None else "channel" if size == -1 else "group")
        asked: list[tuple[str, object, Sequence[object]]] = [
            ("type", weights.type, TYPES[format]),
            ("num_bits", weights.num_bits, BITS[weights.type]),
            ("strategy", strategy, STRATEGIES[weights.type]),
            ("dynamic", weights.dynamic, (False,)),
        ]
        for name, value, known in asked:
            if value not in known:
                choices = " or ".join(map(repr, known))
                raise bad(METHOD, f"{key}.weights.{name}", f"infer reads {format} weights with {choices}", value)
        if strategy == "group" and (size is None or size < 1):
            raise bad(METHOD, f"{key}.weights.group_size", "the strategy 'group' needs a size", size)
        if strategy == "block" and block is None:
            raise bad(METHOD, f"{key}.weights.block_structure", "the strategy 'block' needs two sizes", block)
        blocks = {"tensor": (0, 0), "channel": (1, 0), "group": (1, size or 0), "block": tuple(block or ())}
        return Scheme(
            key,
            Names(patterns, f"{key}.targets", group.targets),
            format == PACKED,
            weights.type,
            weights.num_bits,
            cast(tuple[int, int], blocks[strategy]),
            weights.symmetric,
            weights.actorder,
            self._int8_activations(f"{key}.input_activations", weights, group.input_activations),
        )

    def _int8_activations(self, key: str, weights: Args, args: Args | None) -> bool:
        """Whether products of a group's weights round the activations to int8. Raises CheckpointError."""
        if weights.type == "float":
            self.log_once(logging.INFO, PLAIN)
        if args is not None and args.type == weights.type == "int":
            if args.num_bits != 8 or args.dynamic is not True:
                name = "dynamic" if args.num_bits == 8 else "num_bits"
                what = "infer rounds activations to 8 bits, and with scales of its own instead of stored ones"
                raise bad(METHOD, f"{key}.{name}", what, getattr(args, name))
            if not args.symmetric:
                self.log_once(logging.WARNING, f"{key}.symmetric is false, but activations are rounded symmetrically")
            return True
        if args is not None:
            self.log_once(logging.INFO, f"{key} is not used: activations are not rounded")
            self.unused |= set() if args.dynamic else {"input_scale", "input_zero_point"}
        return False

    def read(self, module: str) -> Weight:
        scheme = self._scheme_of(module)
        bits: Bits = 4 if scheme.packed and scheme.bits == 4 else 8
        if scheme.packed:
            shape = self.tensor(module, "weight_shape", [torch.int64, torch.int32], (2,))
            N, K = shape.tolist()
            words_NW = self.tensor(module, "weight_packed", [torch.int32], (N, words(K, bits)))
            codes = words_NW.contiguous().view(torch.uint8)
        else:
            codes = self.tensor(module, "weight", [E4M3 if scheme.type == "float" else torch.int8], (None, None))
            N, K = codes.shape
        rows, columns = scheme.block[0] or N, scheme.block[1] or K
        grid = -(-N // rows), -(-K // columns)
        shapes = [grid, *([grid[:1]] if grid[1] == 1 else []), *([()] if grid == (1, 1) else [])]
        scales = self.tensor(module, "weight_scale", FLOATS, *shapes).reshape(grid)
        if scheme.type == "float":
            return dequantized(codes, scales, (rows, columns))
        zeros = groups_K = None
        if not scheme.symmetric:
            zeros = self._zeros(module, scheme, bits, grid, shapes).expand(N, -1)
        if self.has(module, "weight_g_idx"):
            groups_K = self.tensor(module, "weight_g_idx", [torch.int32, torch.int64], (K,))
        elif scheme.reordered:
            raise bad(
                METHOD, f"{scheme.key}.weights.actorder", f"there is no {module + '.weight_g_idx'!r}", scheme.actorder
            )
        return self.grouped(
            module,
            codes if scheme.packed else codes.view(torch.uint8) ^ 128,
            scales.expand(N, -1).contiguous(),
            zeros,
            bits,
            K,
            columns,
            groups_K,
            scheme.int8_activations,
        )

    def _zeros(
        self, module: str, scheme: Scheme, bits: Bits, grid: tuple[int, int], shapes: Sequence[tuple[int, ...]]
    ) -> Tensor:
        """The zero points of unsigned codes, in the grid of the scales. They are packed along the rows, or have a byte
        each, which is signed."""
        N, G = grid
        kind = "weight_zero_point"
        if scheme.packed and self.tensor(module, kind, [torch.int8, torch.int32]).dtype == torch.int32:
            return in_words(self.tensor(module, kind, [torch.int32], (words(N, bits), G)).t(), bits, N).t()
        return self.tensor(module, kind, [torch.int8], *shapes).reshape(grid).short() + (1 << bits - 1)

    def _scheme_of(self, module: str) -> Scheme:
        """The scheme that names the module, else one that has a pattern for it, else one for the class Linear, which is
        what quantized modules are. Raises CheckpointError."""
        if module in self._ignored.whole or self._ignored.match(module):
            raise bad(METHOD, "ignore", f"it names {module!r}, but the checkpoint has quantized weights of that")
        for suits in (
            lambda scheme: module in scheme.targets.whole,
            lambda scheme: scheme.targets.match(module),
            lambda scheme: "Linear" in scheme.targets.whole,
        ):
            for scheme in filter(suits, self._schemes):
                kind = "weight_packed" if scheme.packed else "weight"
                if not self.has(module, kind):
                    raise self.lacks(module, kind)
                return scheme
        raise bad(METHOD, "config_groups", f"no group has a target for {module!r}: its name, a pattern or 'Linear'")
