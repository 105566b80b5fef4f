"""Train the demo checkpoint: a toy Llama that has read Python's own library, from scratch, on a CPU.

    python train.py --out ../src/infer_demo/checkpoint --docs /usr/share/doc/python3.11/html/_sources

Everything is in this file: the text, the tokenizer, the model, the schedule. The learning rate warms up,
stays, and decays (WSD) over the last part of the run, where the sequences also grow. `--state` saves the run
while it stays at the peak, so that it can be continued with more `--steps`, or with fewer to decay at once.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import math
import os
import re
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 1
STEPS = 2700  # the length of the published run
TOKENS_PER_STEP = 4096
WARMUP_STEPS = 150
DECAY_SHARE = 0.3  # the last part of the run, in which the learning rate falls linearly to zero
STAGES = ((0.0, 512), (1 - DECAY_SHARE, 1024), (0.9, 2048))  # sequence length from this share of the run on
PEAK_LR = 3e-3
WEIGHT_DECAY = 0.1
GRAD_CLIP = 1.0
SAVE_EVERY = 100

VOCAB_SIZE = 4096
END = "<|endoftext|>"  # before and after every document; id 0
SPLIT_SPACE_SHARE = 0.02  # of the tokens " word", read as " " and "word" as they are after the prompt "def "
# A newline, a run of two or more spaces and a digit each stand alone; one space belongs to the word after it.
WORDS = r"\n|[ \t]{2,}|\p{N}| ?[\p{L}_]+| ?[^\s\p{L}\p{N}_]+|\s"

HELD_OUT_ONE_IN = 50
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
SKIPPED_FOLDERS |= {"whatsnew", "c-api", "distutils", "install"}
SKIPPED_NAMES = re.compile(r"(^|/)(_sysconfigdata|config-)|^html/entities\.py$")
EMAIL = re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)+")
AUTHORS = re.compile(r"^.*(sectionauthor|moduleauthor|codeauthor)::.*\n", re.MULTILINE)


@dataclass(frozen=True)
class Document:
    """One file or help topic; `kind` is "code" or "prose"."""

    name: str
    kind: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the document is kept from training: decided by its name alone."""
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def normalize(text: str) -> str:
    """Drop tabs, trailing blanks, runs of empty lines, bylines and mail addresses."""
    text = EMAIL.sub("user@example.org", AUTHORS.sub("", text.expandtabs()))
    text = re.sub(r"[ \f\r]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def read_documents(docs: Path | None) -> list[Document]:
    """The standard library's modules, and the documentation's sources or else Python's own help topics."""

    def below(root: Path, pattern: str) -> Iterator[tuple[str, str]]:
        for path in sorted(root.rglob(pattern)):
            name = path.relative_to(root)
            if SKIPPED_FOLDERS.isdisjoint(name.parts) and not SKIPPED_NAMES.search(name.as_posix()):
                yield name.as_posix(), path.read_text(encoding="utf-8", errors="ignore")

    if docs is None:
        from pydoc_data.topics import topics

        prose = sorted((f"topics/{name}", text) for name, text in topics.items())
    else:
        prose = list(below(docs, "*.txt"))
    code = list(below(Path(sysconfig.get_path("stdlib")), "*.py"))
    documents = [Document(name, "code", normalize(text)) for name, text in code]
    documents += [Document(name, "prose", normalize(text)) for name, text in prose]
    return [document for document in documents if len(document.text) > 200]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE: any UTF-8 text goes in and comes out unchanged."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A $B", special_tokens=[(END, 0)]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> NDArray[np.int64]:
    """All documents as one stream of tokens, with END before and after each."""
    pieces = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    return np.array([token for piece in pieces for token in piece] + [0], dtype=np.int64)


def split_spaces(tokenizer: Tokenizer, stream: NDArray[np.int64]) -> NDArray[np.int64]:
    """Read some tokens " word" as the two tokens " " and "word", so that a prompt may end in a space."""
    vocab = tokenizer.get_vocab()
    space = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" ")[0][0]
    word_of = np.zeros(VOCAB_SIZE, dtype=np.int64)
    for token, index in vocab.items():
        if token.startswith(space) and token[1:2] not in ("", space):
            word_of[index] = vocab.get(token[1:], 0)
    chosen = (word_of[stream] > 0) & (np.random.default_rng(SEED).random(len(stream)) < SPLIT_SPACE_SHARE)
    out = np.where(chosen, word_of[stream], stream)
    return np.insert(out, np.flatnonzero(chosen), vocab[space])


def build_model() -> LlamaForCausalLM:
    """The untrained model, in float32."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=416,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:  # what each layer adds starts small
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.mul_((2 * config.num_hidden_layers) ** -0.5)
        model.model.embed_tokens.weight[0].normal_(std=config.initializer_range)
    model.model.embed_tokens.padding_idx = None  # END pads, but is learned like any other token
    return model


def loss_of(model: torch.nn.Module, window_BT: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, in nats, of every token of the windows but the first."""
    with torch.autocast("cpu", torch.bfloat16):
        logits_BTV = model(input_ids=window_BT[:, :-1]).logits
    return cross_entropy(logits_BTV.float().flatten(0, 1), window_BT[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, tokenizer: Tokenizer, texts: list[str]) -> tuple[float, float]:
    """Nats per token and bits per byte; a token is predicted once, with up to 1024 tokens before it."""
    stream, length = torch.from_numpy(encode(tokenizer, texts)), 1024
    nats, count = 0.0, len(stream) - 1
    for start in range(0, count, length):
        window_T = stream[start : start + length + 1]
        nats += loss_of(model, window_T[None]).item() * (len(window_T) - 1)
    return nats / count, nats / math.log(2) / sum(len(text.encode()) for text in texts)


def schedule(step: int, steps: int) -> tuple[float, int]:
    """The learning rate and the sequence length of a step."""
    lr = PEAK_LR * min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / (DECAY_SHARE * steps))
    return lr, max(length for start, length in STAGES if step >= start * steps)


def draw(stream: NDArray[np.int64], step: int, length: int) -> torch.Tensor:
    """The step's windows: crops at random places, the same for the same step in every run."""
    starts = np.random.default_rng([SEED, step]).integers(0, len(stream) - length, TOKENS_PER_STEP // length)
    return torch.from_numpy(stream[starts[:, None] + np.arange(length + 1)])


def train(model: LlamaForCausalLM, stream: NDArray[np.int64], steps: int, state: Path | None) -> None:
    """Train in place; with `state`, continue from that file if it exists and save to it before the decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    gains = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95), fused=True)
    first = 0
    if state is not None and state.exists():
        saved = torch.load(state, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    began, losses = time.perf_counter(), []
    compiled_loss_of = torch.compile(loss_of, dynamic=False)
    for step in range(first, steps):
        lr, length = schedule(step, steps)
        if state is not None and step % SAVE_EVERY == 0 and first < step <= (1 - DECAY_SHARE) * steps:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(saved, state.with_suffix(".part"))
            os.replace(state.with_suffix(".part"), state)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = compiled_loss_of(model, draw(stream, step, length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            seconds = time.perf_counter() - began
            mean = sum(losses[-50:]) / 50
            print(f"step {step + 1}/{steps} loss {mean:.3f} lr {lr:.1e} length {length} {seconds:.0f} s")


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> LlamaForCausalLM:
    """Write the checkpoint, each file whole or not at all; return the model as written, in bfloat16."""
    model = copy.deepcopy(model).to(torch.bfloat16)
    model.config.use_cache = True
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    special = {"bos_token": END, "eos_token": END, "pad_token": END, "model_max_length": 2048}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        model.save_pretrained(folder)
        wrapped.save_pretrained(folder)
        for path in sorted(Path(folder).iterdir()):
            path.chmod(0o644)
            os.replace(path, out / path.name)
    return model


def sample(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str) -> str:
    """The prompt and 120 tokens after it, at temperature 0.7."""
    torch.manual_seed(SEED)
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    how = GenerationConfig(do_sample=True, temperature=0.7, top_k=0, max_new_tokens=120, pad_token_id=0)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=how)
    return str(tokenizer.decode(out[0].tolist()))


def main() -> None:
    """Read the text, train the tokenizer and the model, write the checkpoint, say how good it is."""
    parser = argparse.ArgumentParser(description="Train the demo checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint's folder")
    parser.add_argument("--docs", type=Path, help="the _sources folder of Python's HTML documentation")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--state", type=Path, help="a file to save the run to, and to continue it from")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    documents = read_documents(arguments.docs)
    seen = [document.text for document in documents if not document.held_out]
    tokenizer = train_tokenizer(seen)
    for kind in ("code", "prose"):
        for held_out in (False, True):
            texts = [d.text for d in documents if d.kind == kind and d.held_out == held_out]
            size, tokens = sum(len(text.encode()) for text in texts), len(encode(tokenizer, texts)) - 1
            what = f"{kind}, {'held out' if held_out else 'trained on'}"
            print(f"{what}: {len(texts)} files {size} bytes {tokens} tokens")
    model = build_model()
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters")
    train(model, split_spaces(tokenizer, encode(tokenizer, seen)), arguments.steps, arguments.state)

    written = save(model, tokenizer, arguments.out).eval()
    for kinds in ({"code"}, {"prose"}, {"code", "prose"}):
        texts = [d.text for d in documents if d.held_out and d.kind in kinds]
        nats, bits = evaluate(written, tokenizer, texts)
        print(f"held out, {' and '.join(sorted(kinds))}: {nats:.3f} nats/token {bits:.3f} bits/byte")
    for prompt in ("def ", "import ", "class Foo"):
        print(f"--- {prompt!r}\n{sample(written, tokenizer, prompt)}")


if __name__ == "__main__":
    main()
