"""Writes the tables of the documentation that the code knows: rooms, commands, metrics, models, formats and memory.

    python docs/tables.py            writes them anew, in the pages
    python docs/tables.py --check    says which are not as they would be written

A table stands in its page between two comments, `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import json
import os
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.shapes import CONFIGS, QWEN_3, write  # noqa: E402
from tests.conformance.expected import PEERS as ENGINES  # noqa: E402
from tests.conformance.expected import runs  # noqa: E402
from tests.test_rooms import ABOVE, ONLY, PLUGINS, ROOMS, SERVER, TEXT  # noqa: E402

from infer.cache import BlockManager  # noqa: E402
from infer.commands.arguments import PLAIN_PARAMS  # noqa: E402
from infer.commands.doctor import Doctor, warnings_noted  # noqa: E402
from infer.commands.own import COMMANDS  # noqa: E402
from infer.contracts.sections import Settings  # noqa: E402
from infer.errors import INDEXED  # noqa: E402
from infer.plugins.discovery import Plugins  # noqa: E402
from infer.settings import load_settings  # noqa: E402
from infer_kernels_cpu.native import VARIABLE  # noqa: E402
from infer_server.endpoints.metrics import Metrics  # noqa: E402
from infer_server.service import Service  # noqa: E402

SHAPES = ("Qwen3-0.6B", "Gemma-3-1B", "Llama-3.2-1B", "Granite-3.1-1B-A400M", "Llama-3.2-3B", "OLMoE-1B-7B", "Qwen3-8B")
CARDS = "https://huggingface.co"
CODERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Qwen/Qwen3-4B-Instruct-2507": (
        "better at using tools than the first Qwen3",
        QWEN_3
        | {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": True,
        },
    ),
    "openai/gpt-oss-20b": (
        "for agents: calls functions, reasons by effort",
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": (
        "for coding agents, such as Qwen Code",
        QWEN_3
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": False,
        },
    ),
}
"""Models for coding agents: what their cards say, and their configs as published."""
CODING_CONTEXT = 65536
ELSEWHERE = {
    "transformers": "[a list of its own](../plugins/models_transformers/README.md)",
}
"""Families whose architectures another page lists."""
AROUND = r"^core/src/(infer/)?|/src(/infer_\w+)?|\.py$"
"""What a room's path has besides the names by which it is known."""


def rows(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [[re.sub(r"([|<])", r"\\\1", cell) for cell in line] for line in (head, ["---"] * len(head), *body)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@cache
def plugins() -> Plugins:
    return Plugins.discover()


def room_rules() -> str:
    """What each room is for, by the beginning of its docstring, and what it never imports. Raises ValueError if a room
    has no docstring."""

    def code(name: str) -> str:
        return f"`{name.removeprefix('infer.').replace('.', '/')}`"

    body = []
    for room in sorted(ROOMS.keys() | ONLY):
        place = ROOT / room
        file = place if place.is_file() else min(place.glob("**/__init__.py"), key=lambda each: len(each.parts))
        docstring = " ".join((ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split())
        sentence = docstring.partition(". ")[0].removesuffix(".").replace("``", "`")
        # What follows a colon or a parenthesis is left out, unless fewer than three words come before.
        purpose = re.match(r"((?:\S+ ){2,}?\S+?|.+)(?:[:;] | \(|$)", sentence)
        if purpose is None:
            raise ValueError(f"{room} has no docstring that says what it is for")
        names, groups = [] if room in ONLY else [*ROOMS[room]], []
        for group, name in ((PLUGINS, "any plugin"), (TEXT, "*text*"), (ABOVE, "*above*"), (SERVER, "*inside*")):
            if {*group} <= {*names}:
                names = [each for each in names if each not in group]
                groups.append(name)
        if room in ONLY:
            groups.append(f"anything of infer but {', '.join(map(code, ONLY[room]))}")
        body.append([code(re.sub(AROUND, "", room)), purpose[1], ", ".join([*map(code, names), *groups])])
    return rows(("room", "what it is for", "never imports"), body)


def commands() -> str:
    """Each command that infer-engine brings, core's first, with its arguments. What stands for a setting has that
    setting's text."""
    said = []
    core = [command.name for command in COMMANDS]
    offers = [offer for offer in plugins().offers["command"] if offer.distribution not in INDEXED]
    for offer in sorted(offers, key=lambda o: (core.index(o.name), "") if o.name in core else (len(core), o.name)):
        command: Any = offer.registration
        parser = argparse.ArgumentParser(prog=f"infer {command.name}", allow_abbrev=False)
        if command.add_arguments is not None:
            command.add_arguments(parser)
        actions = [action for action in parser._actions if action.dest != "help"]
        sampled = {f"--{name.replace('_', '-')}" for name in PLAIN_PARAMS}
        if not sampled <= {option for action in actions for option in action.option_strings}:
            sampled = set()
        body = [[_shown(action), _help(action)] for action in actions if not sampled & {*action.option_strings}]
        if sampled:
            body.append(
                [", ".join(f"`--{name.replace('_', '-')}`" for name in PLAIN_PARAMS), "[Sampling](api.md#sampling)."]
            )
        text = f"{command.description[0].upper()}{command.description[1:]}."
        if offer.name not in core:
            text += f" `{offer.distribution}` brings it."
        table = f"\n\n{rows(('argument', ''), body)}" if body else ""
        said.append(f"## infer {command.name}\n\n{text}{table}")
    return "\n\n".join(said)


def _shown(action: argparse.Action) -> str:
    name = "/".join(action.option_strings) or action.metavar or action.dest
    value = "" if action.nargs == 0 or not action.option_strings else f" {action.metavar or action.dest.upper()}"
    return f"`{name}{value}`"


def _help(action: argparse.Action) -> str:
    """Raises ValueError if the argument has no help."""
    if not action.help:
        raise ValueError(f"{action.option_strings or action.dest} has no help")
    text = re.sub(r"^(\w+\.\w+)", r"`\1`", action.help.replace("%%", "%")).removesuffix(".")
    choices = f"; one of {', '.join(f'`{choice}`' for choice in action.choices)}" if action.choices else ""
    return f"{text[0].upper()}{text[1:]}{choices}."


def metrics() -> str:
    settings = Settings()
    served = SimpleNamespace(name="", cache_tokens=1, engine=settings.engine)
    service = SimpleNamespace(engine_loop=SimpleNamespace(num_open=0), settings=settings, served=served)
    body = []
    for family in Metrics(service).collect():  # type: ignore[arg-type]
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le", "model_name"})
        body.append(
            [f"`{name}`", family.type + (f", by `{'`, `'.join(labels)}`" if labels else ""), family.documentation]
        )
    return rows(("name", "kind", "meaning"), body)


def models() -> str:
    body = []
    for offer in plugins().offers["model"]:
        registration: Any = offer.registration
        there = ELSEWHERE.get(offer.name) or ", ".join(f"`{name}`" for name in registration.architectures)
        body.append([f"`{offer.name}`", offer.registration.description, there, offer.distribution])
    return rows(("family", "models", "architectures in config.json", "package"), sorted(body, key=lambda row: row[0]))


def compared() -> str:
    """What tests do with each family, by their own lists."""
    # Imported here, since they import transformers, which takes seconds.
    from tests import support
    from tests.formats import test_readers as readers
    from tests.formats.gguf import test_drafts as behind
    from tests.formats.gguf import test_models as files
    from tests.models import test_against_transformers as reference
    from tests.models import test_eagle3 as eagle
    from tests.models import test_mtp as heads
    from tests.speculation import test_heads as drafts

    def count(cases: Iterable[str], known: Mapping[str, Mapping[str, Any]]) -> Counter[str]:
        return Counter(known[case]["family"].removesuffix("_vision") for case in cases)

    def shown(counts: Counter[str], name: str) -> str:
        return str(counts[name] or "–")

    logits, long = (count(cases, reference.CASES) for cases in (reference.COMPARED, reference.LONG))
    gguf = count(files.CASES, files.CASES)
    methods = {*readers.COMPARED, ("mxfp4", reference.MXFP4)}
    kinds = ((*drafts.FAMILIES, *drafts.BEHIND), drafts.EAGLE)
    mixed, read = ({family.partition(" ")[0] for family in each} for each in kinds)
    tried: dict[str, dict[str, set[str]]] = {
        "MTP": {
            "plain torch": {*heads.FAMILIES},
            "transformers": {*heads.NEXT},
            "mixes": mixed,
            "GGUF": {*behind.FAMILIES},
        },
        "EAGLE-3": {"plain torch": {family for family, *_ in eagle.HEADS_OF.values()}, "mixes": read},
    }
    body = []
    for offer in plugins().offers["model"]:
        name = offer.name
        if name in ELSEWHERE:
            body.append([f"`{name}`", ELSEWHERE[name], *["–"] * 5])
            continue
        if name == "eagle3":  # these are heads of the others
            continue
        head = [
            f"{kind}: {', '.join(found)}"
            for kind, ways in tried.items()
            if (found := [way for way, families in ways.items() if name in families])
        ]
        body.append(
            [
                f"`{name}`",
                shown(logits, name),
                shown(long, name),
                ", ".join(f"`{method}`" for method, family in sorted(methods) if family == name) or "–",
                shown(gguf, name),
                "yes" if name in support.FAMILIES else "–",
                "; ".join(head) or "–",
            ]
        )
    head = ["family", "transformers", "64 tokens", "quantized", "GGUF", "exactness", "draft head"]
    return rows(head, sorted(body, key=lambda row: row[0]))


def formats() -> str:
    body = []
    for slot, what in (("weights", "methods"), ("container", "suffixes")):
        for offer in plugins().offers[slot]:
            names = getattr(offer.registration, what)
            known = {"": "none", "/": "a folder"}
            where = "`quantization_config`" if slot == "weights" else "the path"
            told = ", ".join(known.get(name) or f"`{name}`" for name in names)
            body.append([f"`{offer.name}`", offer.registration.description, f"{where}: {told}", offer.distribution])
    return rows(("format", "what is read", "recognized by", "package"), sorted(body))


def slots() -> str:
    """What else is installed to choose from."""
    shown = {"cache": "cache.backend", "scheduler": "engine.batching_mode", "proposer": "engine.speculation"}
    shown |= {"kernels": "kernels.backend", "tool_format": "model.tool_format", "reasoning": "model.reasoning"}
    body = [
        [f"`{key}`", f"`{offer.name}`", offer.registration.description, offer.distribution]
        for slot, key in shown.items()
        for offer in plugins().offers[slot]
    ]
    return rows(("setting", "value", "what it is", "package"), sorted(body))


def memory() -> str:
    """By the arithmetic of `infer doctor`, with the CPU's kernels, whatever this machine has."""
    body = []
    for name in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), CONFIGS[name])
            plain, codes = (_examined(folder, kv_dtype) for kv_dtype in ("auto", "int8"))
        weights = plain["quantization"]["bytes"]
        body.append(
            [
                name,
                *(gigabytes(weights[each]) for each in ("none", "int8", "int4")),
                *(f"{report['cache']['bytes_per_token'] / 1000:.0f} kB" for report in (plain, codes)),
                *(gigabytes(report["cache"]["bytes"]) for report in (plain, codes)),
            ]
        )
    head = ("model", "bfloat16", "int8", "int4", "a position", "in int8", "16 × 4096 positions", "in int8")
    return rows(head, body)


def coders() -> str:
    """As ``memory``, with room for one context."""
    body = []
    for name, (claim, config) in CODERS.items():
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), config)
            report = _examined(folder, "int8", max_seq_len=CODING_CONTEXT, max_batch_size=1)
        weights, most = report["quantization"]["bytes"], config["max_position_embeddings"]
        link = f"[{name.partition('/')[2]}]({CARDS}/{name})"
        held = (gigabytes(size) for size in (weights["int8"], weights["int4"], report["cache"]["bytes"]))
        body.append([link, claim, f"{most:,}", *held])
    head = ("model", "what its card says", "tokens of context", "int8", "int4", f"cache of {CODING_CONTEXT:,} tokens")
    return rows(head, body)


def _examined(folder: str, kv_dtype: str, max_seq_len: int = 4096, **engine: int) -> Mapping[str, Any]:
    overrides: dict[str, Any] = {
        "model": {"path": folder, "load_format": "dummy", "device": "cpu"},
        "kernels": {"backend": "cpu"},
        "cache": {"kv_dtype": kv_dtype},
        "engine": {"max_seq_len": max_seq_len} | engine,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("infer.device.free_memory", return_value=1 << 40))
        # Each level lays weights out in its own way; a page says the same wherever it is made.
        stack.enter_context(mock.patch.dict(os.environ, {VARIABLE: "portable"}))
        stack.enter_context(warnings_noted([]))
        loaded = load_settings(plugins(), env={}, read_file=False, overrides=overrides)
        return Doctor(loaded.settings, loaded.sources, plugins()).examine().data


RESULTS = ROOT / "benchmarks/results"
CELLS = re.compile(r"(decode|prefill) (\d+)x(\d+)")


def peers(file: str) -> Callable[[], str]:
    """Tokens per second of each engine in each cell of a file of `benchmarks.peers`, from the medians of its runs."""

    def table() -> str:
        runs = json.loads((RESULTS / f"{file}.json").read_text())["runs"]
        body = []
        for cell in next(iter(runs.values()))[0]:
            kind, sequences, length = CELLS.fullmatch(cell).groups()  # type: ignore[union-attr]
            tokens = int(sequences) * (1 if kind == "decode" else int(length))
            speeds = [
                tokens / statistics.median(found) if (found := [run[cell] for run in each if cell in run]) else None
                for each in runs.values()
            ]
            best = max(filter(None, speeds))
            shown = [
                "–" if each is None else f"{'**' * (each == best)}{each:.0f}{'**' * (each == best)}" for each in speeds
            ]
            body.append((kind == "prefill", [f"{kind}, {sequences} × {length}", *shown]))
        return rows(("tokens/s", *runs), [row for _, row in sorted(body, key=lambda each: each[0])])

    return table


def quality() -> str:
    return (RESULTS / "2026-11-22-quality-demo.md").read_text().partition("\n\n")[2].strip()


def gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def calls(owner: type, names: Sequence[str]) -> Callable[[], str]:
    """A table of some of a class's methods: how they are called, and what they do."""

    def table() -> str:
        body = []
        for name in names:
            method = getattr(owner, name)
            signature = inspect.signature(method)
            signature = signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "self"])
            plain = re.sub(r"(?<=: |> )'([^']*)'", r"\1", str(signature))  # types are texts
            awaited = "await " if inspect.iscoroutinefunction(method) else ""
            said = " ".join((method.__doc__ or "").split()).replace("``", "`")
            body.append((f"`{awaited}{name}{plain}`", said))
        return rows(("call", ""), body)

    return table


def conformance() -> str:
    """What the last runs of other engines' tests found."""
    body = []
    for name, run in runs().items():
        differing, skipped = sum(run.differing.values()), sum(run.skipped.values())
        counts = (run.passed + differing, run.passed, differing, skipped)
        body.append((ENGINES[name].title, f"`{run.commit}`", *map(str, counts)))
    return rows(("tests of", "commit", "run", "pass", "differ", "skipped"), body)


def differences(name: str) -> Callable[[], str]:
    """A table of why tests of an engine fail, and which."""

    def table() -> str:
        body = []
        for reason, tests in ENGINES[name].differs:
            files: dict[str, dict[str, None]] = {}
            for test in tests:
                file, _, function = test.partition("[")[0].rpartition("::")
                files.setdefault(file.rpartition("/")[2], {})[function] = None
            shown = [f"{file}: {', '.join(f'`{each}`' for each in found)}" for file, found in files.items()]
            body.append((reason, str(runs()[name].differing[reason]), "; ".join(shown)))
        return rows(("why", "tests", ""), body)

    return table


TABLES: Mapping[str, Callable[[], str]] = {
    "conformance": conformance,
    "conformance_vllm": differences("vllm"),
    "conformance_llama": differences("llama-cpp"),
    "rooms": room_rules,
    "commands": commands,
    "metrics": metrics,
    "models": models,
    "compared": compared,
    "formats": formats,
    "slots": slots,
    "service": calls(Service, ("read", "requests", "whole", "stream", "answer", "observe")),
    "block_manager": calls(BlockManager, ("_open", "_place", "_close", "reach", "least_tokens")),
    "memory": memory,
    "coders": coders,
    "peers_plain": peers("2026-11-21-zen5-2-cores-peers-Qwen3-0.6B"),
    "peers_quantized": peers("2026-11-22-zen5-2-cores-peers-quantized-Llama-3.2-1B"),
    "peers_experts": peers("2026-11-22-zen5-2-cores-peers-Granite-3.1-1B-A400M"),
    "peers_amx_dense": peers("2026-11-30-xeon-amx-2-cores-peers-Qwen3-0.6B"),
    "peers_amx_delta": peers("2026-12-01-xeon-amx-2-cores-peers-Qwen3.5-0.8B"),
    "peers_amx": peers("2026-11-22-xeon-amx-2-cores-peers-Granite-3.1-1B-A400M"),
    "peers_amx_experts": peers("2026-11-22-xeon-amx-2-cores-peers-OLMoE-1B-7B"),
    "quality": quality,
}
TABLE = re.compile(r"(?<=^<!-- table: )(\w+)( -->\n).*?(?=^<!-- end of table -->$)", re.MULTILINE | re.DOTALL)


def written(page: str, names: Iterable[str] = TABLES) -> str:
    """The page's text with these tables as they are now."""
    return TABLE.sub(lambda m: f"{m[1]}{m[2]}\n{TABLES[m[1]]()}\n\n" if m[1] in {*names} else m[0], page)


def main() -> int:
    stale = 0
    for file in sorted((ROOT / "docs").glob("*.md")):
        held = file.read_text(encoding="utf-8")
        if (now := written(held)) != held:
            stale += 1
            print(
                f"{file.relative_to(ROOT)}: {'is not as it would be written' if '--check' in sys.argv else 'written'}"
            )
            if "--check" not in sys.argv:
                file.write_text(now, encoding="utf-8")
    return int("--check" in sys.argv and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
