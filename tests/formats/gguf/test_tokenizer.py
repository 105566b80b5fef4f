"""A tokenizer read from a GGUF file is the one that was written: the same ids of any text, and the same texts."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples, slowly
from tests.formats.gguf.files import byte_level
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.convert_slow_tokenizer import generate_merges
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from infer.errors import CheckpointError
from infer_formats.gguf import GGUF
from infer_formats.gguf.tokenizer import end_ids

KIMI = (
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
)
"""As its own code splits texts, which has no tokenizer.json."""
PUBLISHED = {
    **GGUF_PRE_TOKENIZER_SPLITS,
    "glm4": GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"],
    "kimi-k2": "|".join(KIMI),
}
CORPUS = [
    "The kettle began it. Don't tell me what they've said: I'LL know 1234567 times, 3.14!\n\n  def f(x):\n\treturn x",
    "Größe, Äpfel und Übermut kosten 12,50 €; naïve Cafés — «oui» d'accord.\r\n\r\n",
    "Привет, мир! Как дела? Ёлка 2024. Ελληνικά και μαθηματικά.",
    "你好,世界。这是一个测试123。こんにちは世界、カタカナ。안녕하세요 세계",
    "مرحبا بالعالم ٣٤٥ नमस्ते दुनिया १२३ 🙂👩‍👩‍👧 e\u0301 \u1e9b\u0323",
    "HTTPServer camelCaseWords snake_case_words /path/to/file.txt <html> {json: [1, 2]} the the the kettle kettle",
]
SPECIAL = ["<|begin|>", "<|end|>", "<tool>", "[INST]"]
BITS = ["▁", "▁▁", "  ", "   ", "\n", "\r\n", "\t", "'s", "'RE", "'ll", " the", "kettle", "<0x0A>", "<unk>", "<s>"]
BITS += ["</s>", "１２", "٣", "ﬁ", "e\u0301", "é", "\u200b", "\u00a0", "\ufeff", "🙂", "\U0010ffff", "[PAD300]"]
WORDS = " ".join(CORPUS).split()
TEXTS = st.lists(st.sampled_from([*SPECIAL, *BITS, *WORDS, *"aZ0 .,<|>/"]) | st.text(max_size=8), max_size=12)


def same(original: Tokenizer, read: Tokenizer, count: int) -> None:
    @settings(max_examples=examples(count))
    @given(TEXTS.map("".join))
    def check(text: str) -> None:
        for special in (True, False):
            ids = original.encode(text, add_special_tokens=special).ids
            assert read.encode(text, add_special_tokens=special).ids == ids
        for skip in (True, False):
            assert read.decode(ids, skip_special_tokens=skip) == original.decode(ids, skip_special_tokens=skip)
            for id in ids[:4]:
                assert read.decode([id], skip_special_tokens=skip) == original.decode([id], skip_special_tokens=skip)

    check()
    for text in [*CORPUS, " ".join(CORPUS) * 3, "a kettlez äpfelz kettlez"]:
        assert read.encode(text).ids == original.encode(text).ids
    for id in range(original.get_vocab_size() + 9):
        assert read.id_to_token(id) == original.id_to_token(id)


def id_of(tokenizer: Tokenizer, text: str) -> int:
    id = tokenizer.token_to_id(text)
    assert id is not None
    return id


def written(
    tmp_path: Path, arch: str, write: Callable[[gguf.GGUFWriter], None], metadata: dict[str, Any] | None = None
) -> Tokenizer:
    """The tokenizer of a file without weights."""
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", arch)
    write(writer)
    for key, value in (metadata or {}).items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Tokenizer.from_buffer(GGUF(tmp_path / "t.gguf").tokenizer())


@functools.cache
def trained(pre: str) -> str:
    """A byte-level BPE, trained with the published way to split texts."""
    made = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken", "falcon3", "glm4", "kimi-k2")))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in PUBLISHED)
    if pre == "smollm":
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])
    elif pre in PUBLISHED:
        split = pre_tokenizers.Split(Regex(PUBLISHED[pre]), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    else:
        made.pre_tokenizer = bytes_
    if "qwen" in pre:
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    state = json.loads(made.to_str())
    vocab = state["model"]["vocab"]
    # Words that no merges lead to, as in Llama 3's vocabulary.
    for word in ("Ġkettlez", "Ã¤pfelz"):
        vocab[word] = len(vocab)
    for text in SPECIAL:
        vocab[text] = len(vocab)
    made = Tokenizer.from_str(json.dumps(state))
    made.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL[:2]])
    made.add_tokens([AddedToken(text, normalized=False) for text in SPECIAL[2:]])
    begin, end = id_of(made, SPECIAL[0]), id_of(made, SPECIAL[1])
    if pre in ("llama-bpe", "tekken", "falcon3"):
        made.post_processor = processors.TemplateProcessing(f"{SPECIAL[0]} $A", None, [(SPECIAL[0], begin)])
    assert end == begin + 1
    return str(made.to_str())


PRES = {
    "llama-bpe": "llama",
    "falcon3": "llama",
    "tekken": "llama",
    "smollm": "llama",
    "smaug-bpe": "llama",
    "qwen2": "qwen3",
    "deepseek-r1-qwen": "qwen2",
    "qwen35": "qwen35",
    "dbrx": "olmo2",
    "gpt-4o": "phi3",
    "gpt-2": "qwen2",
    "glm4": "deepseek2",
    "kimi-k2": "kimi-linear",
}


@pytest.mark.parametrize("pre", [*list(PRES)[::4], *slowly(*(pre for i, pre in enumerate(PRES) if i % 4))])
def test_byte_level(pre: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(trained(pre))
    (tmp_path / "config.json").write_text('{"vocab_size": 600}')
    original = Tokenizer.from_str(trained(pre))
    begin = id_of(original, SPECIAL[0])
    read = written(
        tmp_path,
        PRES[pre],
        lambda writer: byte_level(writer, tmp_path, pre),
        {"bos_token_id": begin, "eos_token_id": begin + 1},
    )
    same(original, read, 200)
    assert "[PAD300]" not in read.get_vocab()


@pytest.mark.parametrize(("arch", "pre"), [("llama", "llama-bpe"), ("qwen3", "qwen2"), ("phi3", "dbrx")])
@pytest.mark.parametrize("named", ["default", ""])
def test_a_split_that_is_not_named_is_that_of_the_architecture(arch: str, pre: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(trained(pre))

    def write(writer: gguf.GGUFWriter) -> None:
        byte_level(writer, tmp_path, named)

    same(Tokenizer.from_str(trained(pre)), written(tmp_path, arch, write, {"bos_token_id": 502}), 20)


def test_ends_that_the_file_asks_for(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(trained("gpt-2"))
    original = Tokenizer.from_str(trained("gpt-2"))
    begin = id_of(original, SPECIAL[0])
    ends = [(text, begin + i) for i, text in enumerate(SPECIAL[:2])]
    original.post_processor = processors.TemplateProcessing(
        f"{SPECIAL[0]} $A {SPECIAL[1]}", f"{SPECIAL[0]} $A {SPECIAL[1]} {SPECIAL[0]}:1 $B:1 {SPECIAL[1]}:1", ends
    )
    keys = {"bos_token_id": begin, "eos_token_id": begin + 1, "add_bos_token": True, "add_eos_token": True}
    read = written(tmp_path, "qwen2", lambda writer: byte_level(writer, tmp_path), keys)
    same(original, read, 20)
    pair = [tokenizer.encode("one", "two") for tokenizer in (original, read)]
    assert pair[0].ids == pair[1].ids
    assert pair[0].type_ids == pair[1].type_ids
    keys |= {"add_bos_token": False, "add_eos_token": False}
    read = written(tmp_path, "llama", lambda writer: byte_level(writer, tmp_path, "llama-bpe"), keys)
    assert read.encode("x").ids[0] != begin


@functools.cache
def pieces() -> tuple[list[str], list[int]]:
    """Tokens of a SentencePiece BPE and their types: special ones, bytes, then pieces, the best first."""
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"])
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.train_from_iterator([line for text in CORPUS for line in text.split("\n")], trainer)
    found = [text for text, _ in sorted(made.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])][3:]
    letters, longer = [text for text in found if len(text) == 1], [text for text in found if len(text) > 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *longer, *letters, *SPECIAL]
    kind = gguf.TokenType
    kinds = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256, *[kind.NORMAL] * len(found)]
    return tokens, [*kinds, kind.CONTROL, kind.CONTROL, kind.USER_DEFINED, kind.USER_DEFINED]


def write_pieces(writer: gguf.GGUFWriter, tokens: list[str], kinds: list[int], scores: list[float]) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_scores(scores)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def sentence_piece(tokens: list[str], kinds: list[int], merges: Any, *, prefixed: bool) -> Tokenizer:
    """As the hub has them (Llama 2, Mistral, Phi-3; Gemma without the space before each text)."""
    vocab = {text: id for id, text in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefixed else back)
    made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    for text, kind in zip(tokens, kinds, strict=True):
        if kind in (gguf.TokenType.CONTROL, gguf.TokenType.UNKNOWN):
            made.add_special_tokens([AddedToken(text, normalized=False)])
        elif kind == gguf.TokenType.USER_DEFINED:
            made.add_tokens([AddedToken(text, normalized=False)])
    return made


def by_scores(text: str, scores: dict[str, float]) -> list[str]:
    """What SentencePiece does: of all neighbors that make a piece, join those of the best one, the leftmost first."""
    parts = list(text)
    while True:
        ways = [(-scores[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not ways:
            return parts
        at = min(ways)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize("prefixed", [True, False])
def test_sentence_piece(prefixed: bool, tmp_path: Path) -> None:
    tokens, kinds = pieces()
    scores = score(kinds)
    plain = {text: id for id, text in enumerate(tokens) if kinds[id] == gguf.TokenType.NORMAL}
    merges = generate_merges(plain, {text: scores[id] for text, id in plain.items()})
    original = sentence_piece(tokens, kinds, merges, prefixed=prefixed)
    keys = {} if prefixed else {"add_space_prefix": False}
    read = written(tmp_path, "llama", lambda writer: write_pieces(writer, tokens, kinds, scores), keys)
    same(original, read, 300)
    for text in CORPUS:
        found = read.encode(text, add_special_tokens=False).tokens
        normal = ("▁" if prefixed else "") + text.replace(" ", "▁")
        parts = by_scores(normal, {text: scores[id] for text, id in plain.items()})
        split = ([part] if part in plain else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts)
        assert found == list(itertools.chain.from_iterable(split))


def score(kinds: list[int]) -> list[float]:
    """A score for each token: any order of the pieces, for that of training hardly ever leaves a choice."""
    order = random.Random(0).sample(range(len(kinds)), len(kinds))
    return [-float(at) if kind == gguf.TokenType.NORMAL else 0.0 for at, kind in zip(order, kinds, strict=True)]


def test_gemmas_pieces_merge_in_their_order(tmp_path: Path) -> None:
    """Its runs of spaces are pieces that users defined, written as spaces, and its scores say nothing."""
    tokens, kinds = pieces()
    runs = ["▁" * length for length in range(2, 9)] + ["\n\n", "\n\n\n"]
    begin = 3 + 256
    tokens = [*tokens[:begin], *runs, *tokens[begin:]]
    kinds = [*kinds[:begin], *[gguf.TokenType.USER_DEFINED] * len(runs), *kinds[begin:]]
    order = {text: id for id, text in enumerate(tokens)}
    able = {text: id for text, id in order.items() if kinds[id] in (gguf.TokenType.NORMAL, gguf.TokenType.USER_DEFINED)}
    merges = generate_merges(able, {text: -id for text, id in able.items()})
    original = sentence_piece(tokens, kinds, merges, prefixed=False)
    spelled = [text.replace("▁", " ") if text in runs else text for text in tokens]
    scores = [-1000.0] * len(tokens)
    keys = {"add_space_prefix": False}
    read = written(tmp_path, "gemma3", lambda writer: write_pieces(writer, spelled, kinds, scores), keys)
    same(original, read, 300)


def write_gemma4(
    writer: gguf.GGUFWriter, tokens: list[str], kinds: list[int], merges: list[list[str]], model: str = "gemma4"
) -> None:
    """As llama.cpp's converter does, or Ollama's, which calls it "llama"."""
    write_pieces(writer, tokens, kinds, [-1000.0] * len(tokens))
    writer.kv_data[0].pop("tokenizer.ggml.model")
    writer.kv_data[0].pop("tokenizer.ggml.pre")
    writer.add_tokenizer_model(model)
    writer.add_token_merges([" ".join(merge) for merge in merges])


@pytest.mark.parametrize(
    ("model", "keys"),
    [("gemma4", {"add_space_prefix": False, "add_bos_token": True}), ("llama", {"add_bos_token": False})],
)
def test_gemma4_lists_its_merges(model: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """In an order that neither scores nor ids tell."""
    tokens, kinds = pieces()
    able = {text: id for id, text in enumerate(tokens) if kinds[id] == gguf.TokenType.NORMAL}
    scores = score(kinds)
    merges = [list(merge) for merge in generate_merges(able, {text: scores[id] for text, id in able.items()})]
    original = sentence_piece(tokens, kinds, [tuple(merge) for merge in merges], prefixed=False)
    read = written(tmp_path, "gemma4", lambda writer: write_gemma4(writer, tokens, kinds, merges, model), keys)
    same(original, read, 300)


def test_the_ends_of_gemma4(tmp_path: Path) -> None:
    """Its files name one end, and a token that begins a tool's answer is for users to see."""
    tokens, kinds = pieces()
    tokens = [*tokens, "<turn|>", "<|tool_response>", "<|turn>"]
    kinds = [*kinds, gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED, gguf.TokenType.CONTROL]
    end = len(tokens) - 3

    def write(writer: gguf.GGUFWriter) -> None:
        write_gemma4(writer, tokens, kinds, [["t", "h"]])
        writer.add_array("tokenizer.ggml.eos_token_ids", [2, 5])

    written(tmp_path, "gemma4", write)
    found = end_ids(GGUF(tmp_path / "t.gguf")._metadata)
    assert {2, 5, end, end + 1} <= {*found}
    assert end + 2 not in found


def test_phi3s_tokens_take_spaces_along(tmp_path: Path) -> None:
    """Which the file does not say, so that its name has to."""
    tokens, kinds = pieces()
    scores = score(kinds)

    def write(writer: gguf.GGUFWriter, name: str) -> None:
        writer.add_name(name)
        write_pieces(writer, tokens, kinds, scores)

    for name, stripped in (("Phi-3-mini-4k-instruct", True), ("microsoft_Phi3", True), ("Llama 2", False)):
        read = written(tmp_path, "phi3", functools.partial(write, name=name))
        ids = [id_of(read, SPECIAL[1]), *read.encode("x", add_special_tokens=False).ids]
        assert (read.encode(f"{SPECIAL[1]} \n  x", add_special_tokens=False).ids == ids) == stripped
        assert len(read.encode("<s>  x", add_special_tokens=False).ids) > 2


def test_against_transformers_reading_of_the_file(tmp_path: Path) -> None:
    """Of the ids, wherever it does not guess: no space before the text, which it leaves out if the text has one."""
    tokens, kinds = pieces()
    scores = score(kinds)
    read = written(tmp_path, "llama", lambda writer: write_pieces(writer, tokens, kinds, scores))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="t.gguf")
    for text in CORPUS:
        assert read.encode(text).ids == theirs(text)["input_ids"]


def refused(tmp_path: Path, arch: str, write: Callable[[gguf.GGUFWriter], None], match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        written(tmp_path, arch, write)
    assert "\n" not in str(caught.value)


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(trained("gpt-2"))
    tokens, kinds = pieces()
    scores = [0.0] * len(tokens)

    def without(key: str) -> Callable[[gguf.GGUFWriter], None]:
        def write(writer: gguf.GGUFWriter) -> None:
            (write_pieces(writer, tokens, kinds, scores) if key == "scores" else byte_level(writer, tmp_path))
            del writer.kv_data[0][f"tokenizer.ggml.{key}"]

        return write

    refused(tmp_path, "llama", lambda w: byte_level(w, tmp_path, "falcon"), "pre is 'falcon'; infer knows llama-bpe")
    refused(tmp_path, "gemma3", lambda w: byte_level(w, tmp_path, "default"), "pre is None; infer knows")
    refused(tmp_path, "llama", lambda w: w.add_tokenizer_model("t5"), "kind 't5' with 0 tokens; .* model.tokenizer")
    refused(tmp_path, "llama", without("tokens"), "kind 'gpt2' with 0 tokens")
    refused(tmp_path, "llama", without("merges"), "has no tokenizer.ggml.merges")
    refused(tmp_path, "llama", without("scores"), "has no tokenizer.ggml.scores")
    refused(
        tmp_path,
        "gemma4",
        lambda w: write_pieces(w, tokens, kinds, scores),
        "has no tokenizer.ggml.merges, without which",
    )
    short = f"{len(kinds) - 1} values for {len(kinds)} tokens"
    refused(tmp_path, "llama", lambda w: write_pieces(w, tokens, kinds[:-1], scores), short)
    for length in (1025, 3_000_000):  # to try all places where the longer one can be cut would take hours
        long = [*tokens[:-5], "a" * length, *tokens[-4:]]
        write = functools.partial(write_pieces, tokens=long, kinds=kinds, scores=scores)
        refused(tmp_path, "llama", write, f"has a token of {length} characters")
