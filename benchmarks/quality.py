"""python -m benchmarks.quality [--model NAME] [--variant "KEY=VALUE ..."] [--tokens N] [--window N] [--json FILE]

What settings that compute or store with fewer bits cost in quality: on text that the demo model has not been trained
on, nats per token, and how far the distribution of the next token is from that of the model as its checkpoint has it.
Writes a table in Markdown next to the JSON. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infer import LLM, SamplingParams
from infer_bench.bench import machine

VARIANTS = ("cache.kv_dtype=int8", "model.quantization=int8", "model.quantization=int4", "model.dtype=float32")
TRAIN = Path(__file__).parents[1] / "plugins/demo/train/train.py"
SCORED = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)


@dataclass(frozen=True)
class Quality:
    """Of one variant. Divergences are in nats."""

    variant: str
    nats: float
    """Of a token, on average."""
    change: float
    """Of the nats, as a share of the checkpoint's own."""
    divergence: float
    """Mean KL(checkpoint || variant) of the next token's distribution."""
    divergence_99: float
    """Its 99th percentile over the tokens."""
    agreement: float
    """How often both have the same likeliest token."""


class Scorer:
    """A model with some settings, and the distributions that it computes."""

    def __init__(self, model: str, variant: str, window: int) -> None:
        sections: dict[str, Any] = {"engine": {"max_batch_size": 1, "max_seq_len": window + 1}}
        for setting in variant.split():
            key, equals, value = setting.partition("=")
            section, dot, name = key.partition(".")
            if not (equals and dot):
                raise SystemExit(f"{setting!r} is no SECTION.KEY=VALUE")
            sections.setdefault(section, {})[name] = value
        self.llm = LLM(model, **sections)
        runner: Any = self.llm.loop._engine._runner
        self._model = runner._model
        self._logits = self._model.logits

    def logprobs(self, ids: Sequence[int]) -> Tensor:
        """Log-probabilities of all tokens behind each prefix of ``ids`` but the empty and the whole one, fp32
        [n - 1, V]."""
        seen: list[Tensor] = []

        def logits(hidden_ND: Tensor) -> Tensor:
            found: Tensor = self._logits(hidden_ND)
            seen.append(found.float().cpu())
            return found

        self._model.logits = logits
        try:
            self.llm.generate(list(ids), SCORED)
        finally:
            self._model.logits = self._logits
        return torch.cat(seen)[: len(ids) - 1].log_softmax(-1)


def held_out(docs: Path | None = None) -> list[str]:
    """The texts that the demo model's training has left out: those of this Python's library and, if their folder is
    given, of its documentation."""
    spec = importlib.util.spec_from_file_location("train", TRAIN)
    assert spec is not None
    assert spec.loader is not None
    train = sys.modules["train"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    documents = [d for d in train.read_documents(docs) if d.held_out]
    return [d.text for d in documents if d.kind == "code" or docs is not None]


def windows(encode: Any, texts: Sequence[str], tokens: int, window: int) -> list[list[int]]:
    """The texts' token ids in pieces of at most ``window`` and of ``tokens`` in all, a piece of each text in turn, so
    that few tokens come from many texts."""
    cut = [[ids[i : i + window] for i in range(0, len(ids), window)] for ids in map(encode, texts)]
    turns = [pieces[i] for i in range(max(map(len, cut))) for pieces in cut if i < len(pieces)]
    found: list[list[int]] = []
    for piece in turns:
        left = tokens - sum(map(len, found))
        if min(left, len(piece)) > 1:
            found.append(piece[:left])
    return found


def compare(
    model: str, variants: Sequence[str], texts: Sequence[str], tokens: int, window: int
) -> tuple[int, list[Quality]]:
    """How many tokens were predicted, and the quality of the checkpoint as it is and of every variant."""
    with ExitStack() as stack:
        scorers = [Scorer(model, variant, window) for variant in ("", *variants)]
        for scorer in scorers:
            stack.callback(scorer.llm.close)
        sums: list[dict[str, list[Tensor]]] = [{"nats": [], "kl": [], "same": []} for _ in scorers]
        encode = scorers[0].llm.served.tokenizer.encode
        pieces = windows(lambda text: encode(text).ids, texts, tokens, window)
        for ids in pieces:
            expected = scorers[0].logprobs(ids)
            for scorer, found in zip(scorers, sums, strict=True):
                own = expected if scorer is scorers[0] else scorer.logprobs(ids)
                found["nats"].append(-own.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].double())
                found["kl"].append((expected.exp() * (expected - own)).sum(-1).double())
                found["same"].append((own.argmax(-1) == expected.argmax(-1)).double())
    base = torch.cat(sums[0]["nats"]).mean().item()
    rows = []
    for variant, found in zip(("as it is", *variants), sums, strict=True):
        nats, kl, same = (torch.cat(found[name]) for name in ("nats", "kl", "same"))
        mean = nats.mean().item()
        rows.append(
            Quality(variant, mean, mean / base - 1, kl.mean().item(), kl.quantile(0.99).item(), same.mean().item())
        )
    return sum(len(ids) - 1 for ids in pieces), rows


def table(what: Mapping[str, Any], rows: Sequence[Quality]) -> str:
    """Markdown."""
    lines = [
        f"{what['model']}: {what['tokens']} tokens of held-out text, in pieces of up to {what['window']}.",
        "",
        "| variant | nats per token | change | KL divergence | its 99th percentile | same likeliest token |",
        "|---|---|---|---|---|---|",
    ]
    for q in rows:
        change = "" if q is rows[0] else f"{q.change:+.3%}"
        far = ("", "", "") if q is rows[0] else (f"{q.divergence:.2e}", f"{q.divergence_99:.2e}", f"{q.agreement:.2%}")
        lines.append(f"| {q.variant.replace('=', ' = ')} | {q.nats:.4f} | {' | '.join((change, *far))} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--variant", action="append", help="settings, as SECTION.KEY=VALUE, separated by spaces")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--window", type=int, default=2000)
    parser.add_argument("--docs", type=Path, help="the _sources folder of Python's HTML documentation")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    variants = args.variant or VARIANTS
    tokens, rows = compare(args.model, variants, held_out(args.docs), args.tokens, args.window)
    what = {"model": args.model, "tokens": tokens, "window": args.window, "machine": machine()}
    print(text := table(what, rows), end="")
    if args.json:
        args.json.write_text(json.dumps({**what, "variants": [asdict(q) for q in rows]}, indent=1) + "\n")
        args.json.with_suffix(".md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
