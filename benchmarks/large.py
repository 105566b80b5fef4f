"""python -m benchmarks.large FOLDER [--write] [--group N] [--layers N]

How much memory a mixture of experts of 30 billion parameters takes, how long it loads and how fast it decodes. --write
writes the checkpoint to FOLDER first: Qwen3-30B-A3B's shape with made-up weights of 4 bits, as compressed-tensors packs
them, one file per layer. See benchmarks/README.md."""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.shapes import QWEN_3, expected, write
from benchmarks.steps import Steps, timed
from safetensors.torch import save_file
from torch import Tensor

from infer import LLM
from infer.checkpoint import dummy_tensors

CONFIG: Mapping[str, Any] = QWEN_3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
STD = 0.02
CODES_STD = 4.61
"""Of codes of 4 bits that are all equally likely."""
WORDS = 1 << 22
"""How many words of codes are drawn; each weight is a part of them."""
CONTEXT, NEW = 128, 24


def write_quantized(folder: Path, config: Mapping[str, Any], group: int) -> Path:
    """Write a checkpoint file by file. All projections are quantized, in groups of ``group``."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    scheme = {"targets": ["Linear"], "weights": weights}
    quantized = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": scheme}}
    write(folder, {**config, "quantization_config": {**quantized, "ignore": ["lm_head", "re:.*mlp.gate$"]}})
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in expected(config).items():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        files.setdefault(f"model-{int(layer[1]):05d}" if layer else "model-rest", {})[name] = shape
    words = torch.randint(-(2**31), 2**31, (WORDS,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    index: dict[str, str] = {}
    for file, shapes in files.items():
        place = folder / f"{file}.safetensors"
        plain = {name: shape for name, shape in shapes.items() if not name.endswith("_proj.weight")}
        tensors: dict[str, Tensor] = dict(dummy_tensors(plain, torch.bfloat16))
        for name, (N, K) in ((name, shape) for name, shape in shapes.items() if name not in plain):
            module, numel = name.removesuffix(".weight"), N * K // 8
            begin = zlib.crc32(name.encode()) % (len(words) - numel)
            tensors[f"{module}.weight_packed"] = words[begin : begin + numel].clone().view(N, K // 8)
            tensors[f"{module}.weight_scale"] = torch.full((N, K // group), STD / CODES_STD, dtype=torch.bfloat16)
            tensors[f"{module}.weight_shape"] = torch.tensor([N, K])
        save_file(tensors, place, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, place.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def memory(key: str) -> float:
    """A line of this process's /proc/self/status, in GB."""
    (found,) = re.findall(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    return int(found) * 1024 / 1e9


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    args = parser.parse_args(argv)
    if args.write:
        write_quantized(args.folder, {**CONFIG, "num_hidden_layers": args.layers}, args.group)
        return 0
    steps, begun = Steps(), time.perf_counter()
    stored = sum(file.stat().st_size for file in args.folder.glob("*.safetensors")) / 1e9
    engine = {"max_seq_len": 1024, "max_batch_size": 4}
    with LLM(str(args.folder), plugins=[steps], engine=engine) as llm:
        seconds = time.perf_counter() - begun
        print(f"{stored:.2f} GB of files; loaded in {seconds:.1f} s, with at most {memory('VmHWM'):.2f} GB resident")
        print(f"now {memory('VmRSS'):.2f} GB resident, {memory('RssFile'):.2f} of them of files", flush=True)
        for batch in (1, 4):
            prefill, step = timed(llm, steps, random.Random(0), batch, CONTEXT, NEW)
            print(
                f"{batch} sequences of {CONTEXT} tokens: all decode after {prefill:.2f} s, then {1e3 * step:.1f} ms a "
                f"step, {batch / step:.1f} tokens/s",
                flush=True,
            )
    print(f"at most {memory('VmHWM'):.2f} GB resident in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
