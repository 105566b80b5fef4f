"""A GGUF file's tokenizer in the terms of the hub's tokenizer.json.

Three kinds are in use: byte-level BPE ("gpt2"), whose splitting of texts has a name; SentencePiece's BPE ("llama"),
where the scores of the pieces stand for the list of merges; and Gemma 4's, which is SentencePiece's with such a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from infer.errors import CheckpointError
from infer_formats.gguf.metadata import Metadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
N = TypeVar("N", int, float)
KEY = "tokenizer.ggml."
SPACE = "▁"
ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
ENDS = ("eos", "eot", "eom")
END_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
        *("<eos>", "<turn|>", "<|tool_response>"),
    )
)
"""Tokens that end an answer, too: files often name only one of the ids that generation_config.json lists."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|{digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING, _DIGITS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"


def _cased(ending: str, digits: str, after: str = r"\r\n/", letters: str = "") -> str:
    """Words of which a capital letter begins the next one. ``letters`` says which ones words may have, ``after`` what
    belongs to the punctuation before it."""
    upper, lower = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}{letters}]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
    word = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{word}{upper}*{lower}+{ending}|{word}{upper}+{lower}*{ending}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[{after}]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    )


MAX_PIECE = 1024
"""Characters of a token whose merges follow from scores, since all places where it can be cut are tried; those of
published models have 64 at most."""


class Split(NamedTuple):
    """How texts are split into words, and what else goes by the same name."""

    pattern: str | None
    """None is GPT-2's way, which ``tokenizers`` knows."""
    whole_words: bool = False
    """A word that is a token is that token, whatever the merges say."""
    begins: bool = False
    """Texts begin with the bos token unless the file says otherwise."""
    nfc: bool = False
    digits: bool = False
    """Every digit is a word."""


_LLAMA3 = Split(_WORDS.replace("{digits}", r"\p{N}{1,3}"), whole_words=True, begins=True)
_CL100K = Split(_LLAMA3.pattern)
_QWEN2 = Split(_WORDS.replace("{digits}", r"\p{N}"), nfc=True)
_QWEN35 = Split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+",
    nfc=True,
)
_KIMI = r"[\p{Han}]+|" + _cased(_ENDING, _DIGITS, after=r"\r\n", letters=r"&&[^\p{Han}]")
SPLITS: Mapping[str, Split] = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "lfm2": _LLAMA3,
    "glm4": Split(_LLAMA3.pattern, whole_words=True),
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
    "tekken": Split(_cased("", r"\p{N}"), whole_words=True, begins=True),
    "gpt-4o": Split(_cased(_ENDING, _DIGITS)),
    "kimi-k2": Split(_KIMI, whole_words=True),
    "gpt-2": Split(None),
    "olmo": Split(None),
    "smollm": Split(None, digits=True),
    "refact": Split(None, digits=True),
}
"""By ``tokenizer.ggml.pre``."""
DEFAULT_SPLITS = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2", "phi3": "dbrx", "olmo2": "dbrx"}
"""For files that do not name one, by architecture."""


def hub_tokenizer(meta: Metadata) -> dict[str, Any]:
    """tokenizer.json. Raises CheckpointError."""
    kind = meta.text(f"{KEY}model")
    tokens = _tokens(meta)
    if kind not in ("gpt2", "llama", "gemma4") or not tokens:
        raise CheckpointError(
            f"{meta.path} has a tokenizer of the kind {kind!r} with {len(tokens)} tokens; infer reads gpt2, llama and "
            "gemma4. Give model.tokenizer a tokenizer.json."
        )
    kinds = _numbers(meta, "token_type", int, tokens) or [NORMAL] * len(tokens)
    return (_byte_level if kind == "gpt2" else _sentence_piece)(meta, tokens, kinds)


def end_ids(meta: Metadata) -> list[int]:
    """The tokens that end an answer."""
    ids = {meta.whole(f"{KEY}{name}_token_id") for name in ENDS} | {*(meta.several(f"{KEY}eos_token_ids", int) or [])}
    tokens = _tokens(meta)
    kinds = _numbers(meta, "token_type", int, tokens) or []
    ids |= {id for id, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED) and tokens[id] in END_TEXTS}
    return sorted(id for id in ids if id is not None)


def special_texts(meta: Metadata) -> dict[str, str]:
    """The special tokens by role, as tokenizer_config.json has them."""
    tokens = _tokens(meta)
    ids = {role: meta.whole(f"{KEY}{name}_token_id") for name, role in ROLES.items()}
    return {role: tokens[id] for role, id in ids.items() if id is not None and id < len(tokens)}


def _tokens(meta: Metadata) -> list[str]:
    return meta.several(f"{KEY}tokens", str) or []


def _numbers(meta: Metadata, name: str, kind: type[N], tokens: list[str]) -> list[N] | None:
    """A list with a number for each token, if there is one."""
    values = meta.several(f"{KEY}{name}", kind)
    if values is not None and len(values) != len(tokens):
        raise CheckpointError(f"{meta.path}: {KEY}{name} has {len(values)} values for {len(tokens)} tokens.")
    return values


def _byte_level(meta: Metadata, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    pre = meta.text(f"{KEY}pre")
    if pre in (None, "default"):
        pre = DEFAULT_SPLITS.get(meta.text("general.architecture") or "")
    if pre is None or pre not in SPLITS:
        raise CheckpointError(
            f"{meta.path}: {KEY}pre is {pre!r}; infer knows {', '.join(SPLITS)}. Give model.tokenizer a tokenizer.json."
        )
    split = SPLITS[pre]
    words: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if split.digits else []
    if split.pattern:
        words.append({"type": "Split", "pattern": {"Regex": split.pattern}, "behavior": "Isolated", "invert": False})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not split.pattern}
    return _tokenizer(
        meta,
        tokens,
        kinds,
        normalizer={"type": "NFC"} if split.nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*words, byte_level]},
        decoder=byte_level,
        begins=split.begins,
        # Ids without a token are filled up with texts that are never meant.
        vocab={text: id for id, text in enumerate(tokens) if not (kinds[id] == UNUSED and text == f"[PAD{id}]")},
        merges=_listed(meta),
        ignore_merges=split.whole_words,
    )


def _listed(meta: Metadata) -> list[list[str]]:
    """The merges that the file lists."""
    merges = meta.several(f"{KEY}merges", str)
    if merges is None:
        raise CheckpointError(f"{meta.path} has no {KEY}merges, without which its tokens cannot be used.")
    return [[merge[:at], merge[at + 1 :]] for merge in merges if (at := merge.find(" ", 1)) > 0]


def _scored(meta: Metadata, tokens: list[str], kinds: list[int]) -> list[list[str]]:
    """The merges that the scores of the pieces stand for."""
    scores = _numbers(meta, "scores", float, tokens)
    if scores is None:
        raise CheckpointError(f"{meta.path} has no {KEY}scores, without which its tokens cannot be used.")
    pieces = {token: (id, scores[id]) for id, token in enumerate(tokens) if kinds[id] == NORMAL}
    if (meta.text("general.architecture") or "").startswith("gemma"):  # Gemma's merges follow the order of its tokens
        pieces = {token: (id, -id) for id, token in enumerate(tokens) if kinds[id] in (NORMAL, USER_DEFINED)}
    if (longest := max(map(len, pieces), default=0)) > MAX_PIECE:
        raise CheckpointError(
            f"{meta.path}: {KEY}tokens has a token of {longest} characters; infer reads {MAX_PIECE} at most. "
            "Give model.tokenizer a tokenizer.json."
        )
    return _merges(pieces)


def _sentence_piece(meta: Metadata, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    architecture = meta.text("general.architecture") or ""
    if architecture.startswith("gemma"):  # its runs of spaces, pieces like others, are written as spaces
        tokens = [SPACE * len(token) if len(token) > 1 and not token.strip(" ") else token for token in tokens]
    # Ollama's files of Gemma 4 call their tokenizer "llama", too.
    listed = architecture == "gemma4" or meta.text(f"{KEY}model") == "gemma4"
    prefixed = meta.truth(f"{KEY}add_space_prefix", not listed)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed:
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    return _tokenizer(
        meta,
        tokens,
        kinds,
        normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, spaces]}
        if prefixed
        else spaces,
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": back},
        begins=True,
        vocab={token: id for id, token in enumerate(tokens)},
        merges=_listed(meta) if listed else _scored(meta, tokens, kinds),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=BYTE in kinds,
    )


def _merges(pieces: Mapping[str, tuple[int, float]]) -> list[list[str]]:
    """The merges that SentencePiece's scores stand for: all ways to make a piece of two others, pieces of higher score
    first. Equal ones come in the order in which transformers has them when it makes a tokenizer.json."""
    found = []
    for piece, (_, score) in pieces.items():
        ways = [(a, b) for at in range(1, len(piece)) if (a := piece[:at]) in pieces and (b := piece[at:]) in pieces]
        ways.sort(key=lambda way: (pieces[way[0]][0], pieces[way[1]][0]))
        found += [(-score, -len(a), -len(b), a, b) for a, b in ways]
    found.sort(key=lambda way: way[:3])
    return [[a, b] for _, _, _, a, b in found]


def _tokenizer(
    meta: Metadata,
    tokens: list[str],
    kinds: list[int],
    *,
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
    begins: bool,
    **model: Any,
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(meta, tokens, kinds),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _ends(meta, tokens, begins),
        "decoder": decoder,
        "model": {"type": "BPE", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False} | model,
    }


def _added(meta: Metadata, tokens: list[str], kinds: list[int]) -> list[dict[str, Any]]:
    """The tokens that are found in a text before it is split."""
    roles = {meta.whole(f"{KEY}{name}_token_id") for name in (*ROLES, *ENDS)}
    # Phi-3's tokens take the space behind them along, which GGUF does not say; llama.cpp goes by the name, too.
    name = (meta.text("general.name") or "").lower()
    greedy = "phi-3" in name or "phi3" in name
    plain = ("<unk>", "<s>", "<|endoftext|>")
    return [
        {
            "id": id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": greedy and token not in plain and (kind == CONTROL or token == "</s>"),
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if (kind in (UNKNOWN, CONTROL, USER_DEFINED) or (id in roles and kind != BYTE)) and token
    ]


def _ends(meta: Metadata, tokens: list[str], begins: bool) -> dict[str, Any] | None:
    """The tokens before and behind every text."""
    # Early files of Gemma 4 say that its texts begin without bos, which is not so.
    begins = meta.truth(f"{KEY}add_bos_token", begins) or meta.text("general.architecture") == "gemma4"
    wanted = {"bos": begins, "eos": meta.truth(f"{KEY}add_eos_token", False)}
    ids = {name: meta.whole(f"{KEY}{name}_token_id") for name, added in wanted.items() if added}
    texts = {name: tokens[id] for name, id in ids.items() if id is not None and id < len(tokens)}
    if not texts:
        return None

    def around(sequence: str) -> list[dict[str, Any]]:
        type_id = 0 if sequence == "A" else 1
        ends = {name: [{"SpecialToken": {"id": text, "type_id": type_id}}] for name, text in texts.items()}
        return [*ends.get("bos", []), {"Sequence": {"id": sequence, "type_id": type_id}}, *ends.get("eos", [])]

    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": around("A") + around("B"),
        "special_tokens": {text: {"id": text, "ids": [ids[name]], "tokens": [text]} for name, text in texts.items()},
    }
