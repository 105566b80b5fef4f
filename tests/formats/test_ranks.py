"""Tokenizers that are tables of ranks give the ids that ``tiktoken`` gives, and are found where there is no
tokenizer.json."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from tests.examples import examples
from tests.formats.gguf.test_tokenizer import CORPUS, KIMI, PUBLISHED, SPECIAL, TEXTS
from tests.models.checkpoints import write_checkpoint
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from infer import LLM, SamplingParams
from infer.assemble.texts import read_texts, read_tokenizer
from infer.checkpoint import Checkpoint, Folder
from infer.errors import CheckpointError, PluginError
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer_formats import ranks

NAMES = ["<unk>", "<s>", "</s>", *SPECIAL]
COUNT = 20
"""How many ids are kept for special tokens."""


@functools.cache
def table(pattern: str) -> Mapping[bytes, int]:
    """The tokens of a BPE that was trained on texts split by the pattern, by rank."""
    made = Tokenizer(models.BPE())
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    byte = {letter: byte for byte, letter in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
    found = {bytes(map(byte.__getitem__, text)): id for text, id in made.get_vocab().items()}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def by_id(first: int) -> dict[str, int]:
    return {text: first + i for i, text in enumerate(NAMES)}


def write_tekken(folder: Path, **changed: Any) -> tiktoken.Encoding:
    """Writes a tekken.json, which has more tokens than it says that the vocabulary has. Returns what it stands for."""
    pattern = PUBLISHED["tekken"]
    known = dict([*table(pattern).items()][:480])
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in table(pattern).items()
    ]
    given = {
        "config": {
            "pattern": pattern,
            "num_vocab_tokens": len(entries),
            "default_vocab_size": len(known) + COUNT,
            "default_num_special_tokens": COUNT,
            "version": "v11",
        },
        "vocab": entries,
        "special_tokens": [
            {"rank": i, "token_str": name} | ({"is_control": False} if name == "[INST]" else {})
            for i, name in enumerate(NAMES)
        ],
    }
    (folder / "tekken.json").write_text(json.dumps(given | changed))
    ids = {token: rank + COUNT for token, rank in known.items()}
    return tiktoken.Encoding("t", pat_str=pattern, mergeable_ranks=ids, special_tokens=by_id(0))


def write_tiktoken(folder: Path, **changed: Any) -> tiktoken.Encoding:
    known = {**table("|".join(KIMI))}
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in known.items())
    (folder / "tiktoken.model").write_text("".join(lines))
    specials = by_id(len(known))
    added = {str(id): {"content": text, "special": text != "[INST]"} for text, id in specials.items()}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changed))
    return tiktoken.Encoding("t", pat_str="|".join(KIMI), mergeable_ranks=known, special_tokens=specials)


FORMS: dict[str, tuple[Callable[[Path], tiktoken.Encoding], Callable[[Path], bytes], list[int]]] = {
    "tekken.json": (write_tekken, ranks.tekken, [1]),
    "tiktoken.model": (write_tiktoken, ranks.tiktoken, []),
}
"""How each is written and read, and what texts begin with."""


@pytest.mark.parametrize("name", FORMS)
def test_ids_and_texts_are_those_of_tiktoken(name: str, tmp_path: Path) -> None:
    write, read, begin = FORMS[name]
    expected = write(tmp_path)
    found = Tokenizer.from_buffer(read(tmp_path / name))

    @settings(max_examples=examples(300))
    @given(TEXTS.map("".join))
    def check(text: str) -> None:
        ids = expected.encode(text, allowed_special="all")
        assert found.encode(text).ids == begin + ids
        assert found.encode(text, add_special_tokens=False).ids == ids
        assert found.decode(ids, skip_special_tokens=False) == expected.decode(ids)

    check()
    for text in (*CORPUS, "".join(NAMES)):
        assert found.encode(text, add_special_tokens=False).ids == expected.encode(text, allowed_special="all")
    assert found.decode(found.encode("<s>a[INST]</s>").ids) == "a[INST]", "the others are special"


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("asked", [False, True])
def test_it_is_found_by_its_name(name: str, asked: bool, tmp_path: Path) -> None:
    """In the checkpoint's folder, unless there is a tokenizer.json, and where the settings name it."""
    folder = place = write_checkpoint(tmp_path / "model", "llama", vocab_size=600)
    plain = (folder / "tokenizer.json").read_bytes()
    if asked:
        (place := tmp_path / "other").mkdir()
    write, _, begin = FORMS[name]
    expected = begin + write(place).encode("The kettle")

    def prompt(**model: Any) -> list[int]:
        with LLM(str(folder), model=model) as llm:
            (answer,) = llm.generate(["The kettle"], SamplingParams(max_tokens=1))
            return list(answer.prompt_token_ids)

    if asked:
        assert prompt(tokenizer=str(place / name)) == expected
        return
    assert prompt() == Tokenizer.from_buffer(plain).encode("The kettle").ids != expected
    (folder / "tokenizer.json").unlink()
    assert prompt() == expected


def test_templates_name_what_texts_begin_and_end_with(tmp_path: Path) -> None:
    """Where there is no tokenizer_config.json that says it."""
    folder = write_checkpoint(tmp_path, "llama", vocab_size=600)
    write_tekken(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    plugins = Plugins.discover()
    given = {"model": {"path": str(folder)}}
    settings = load_settings(plugins, env={}, overrides=given, read_file=False).settings
    template = read_texts(settings, plugins, Checkpoint(Folder(folder))).template
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "<s>x<unk>", "token 0 ends texts of this checkpoint"


def test_a_plugin_that_makes_no_bytes(tmp_path: Path) -> None:
    write_tekken(tmp_path)
    plugins = Plugins.discover()
    (offer,) = (offer for offer in plugins.offers["tokenizer"] if offer.name == "tekken")
    plugins.offers["tokenizer"] = [replace(offer, registration=replace(offer.registration, factory=lambda *_: "{}"))]
    settings = load_settings(plugins, env={}, read_file=False).settings
    folder = write_checkpoint(tmp_path / "model", "llama")
    with pytest.raises(PluginError, match=r"cannot read .*: its factory made no bytes but str"):
        read_tokenizer(str(tmp_path / "tekken.json"), settings, plugins, Checkpoint(Folder(folder)), set())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"special_tokens": None}, "is not as infer knows such files from version 7 on"),
        ({"special_tokens": []}, "is not as infer knows such files"),
        ({"vocab": [{"rank": 0, "token_bytes": "?"}]}, "is not as infer knows such files"),
        ({"config": {}}, "KeyError"),
        ({"config": {"pattern": "x", "default_vocab_size": float("inf")}}, "inf is no count"),
        ({"config": {"pattern": 3}}, "3 is no text"),
        ({"vocab": [{"rank": float("inf"), "token_bytes": "YQ=="}]}, "inf is no count"),
        ({"vocab": [{"rank": -1, "token_bytes": "YQ=="}]}, "-1 is no count"),
        ({"special_tokens": [{"rank": 1, "token_str": "<s>"}, {"rank": 2, "token_str": [1]}]}, r"\[1\] is no text"),
        (
            {"vocab": [{"rank": n, "token_bytes": base64.b64encode(b"a" * (n + 1)).decode()} for n in range(100)]},
            "has more than 32 ways to make a token of two others",
        ),
        ({"vocab": 3}, "TypeError"),
        ({"vocab": [{"rank": 0, "token_bytes": "YQ==" * 512}]}, "is not as infer knows such files"),
        (
            {"vocab": [{"rank": 0, "token_bytes": base64.b64encode(b"a" * 1025).decode()}]},
            "has a token of 1025 bytes; infer reads 1024 at most",
        ),
    ],
)
def test_a_tekken_json_that_is_damaged(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_tekken(tmp_path, **changed)
    with pytest.raises(CheckpointError, match=said):
        ranks.tekken(tmp_path / "tekken.json")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokenizer_class": "QWenTokenizer"}, "of Moonshot's models .*, and this one's is 'QWenTokenizer'"),
        ({"added_tokens_decoder": {"x": {}}}, "is damaged: "),
        ({"added_tokens_decoder": {"1": {"content": []}}}, r"is damaged: .*\[\] is no text"),
    ],
)
def test_a_tiktoken_model_that_is_not_read(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_tiktoken(tmp_path, **changed)
    with pytest.raises(CheckpointError, match=said):
        ranks.tiktoken(tmp_path / "tiktoken.model")


@pytest.mark.parametrize(("text", "said"), [("[]", "holds a JSON list instead of an object"), ("{", "cannot be read")])
@pytest.mark.parametrize("name", ["tekken.json", "tokenizer_config.json"])
def test_json_that_is_none(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    read, file = (ranks.tekken, name) if name == "tekken.json" else (ranks.tiktoken, "tiktoken.model")
    with pytest.raises(CheckpointError, match=f"{name} {said}"):
        read(tmp_path / file)


def test_lines_that_are_no_ranks(tmp_path: Path) -> None:
    write_tiktoken(tmp_path)
    (tmp_path / "tiktoken.model").write_text("IQ== 0\nIg==\n")
    with pytest.raises(CheckpointError, match=r"tiktoken\.model or .* is damaged"):
        ranks.tiktoken(tmp_path / "tiktoken.model")
