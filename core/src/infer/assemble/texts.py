"""What a checkpoint says about texts: the tokenizer, the chat template, and how reasoning and tool calls are marked."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence, Set
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from infer.checkpoint import Checkpoint
from infer.checkpoint.files import regular
from infer.contracts.grammar import Vocabulary
from infer.contracts.sections import Settings
from infer.contracts.text import PartProtocol, ReasoningTags, ToolFormatRegistration
from infer.errors import CheckpointError, PluginError, SettingsError, installing
from infer.plugins import inspection
from infer.plugins.discovery import Offer, Plugins
from infer.plugins.inspection import CheckedPart, Named
from infer.text.grammars import Grammars, order
from infer.text.templates import ChatTemplate
from infer.text.tool_formats import ToolFormat

log = logging.getLogger(__name__)

ADDED = '"added_tokens":'
"""Comes before vocabulary and merges in a tokenizer's JSON, which would take seconds and hundreds of MiB as objects. No
text contains it, since quotes in texts are escaped."""


class Texts(NamedTuple):
    """How the model reads and writes."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    reasoning: ReasoningTags | None
    """None if the model does not reason."""


beforehand: dict[tuple[bytes, frozenset[str]], Tokenizer] = {}
"""A tokenizer that was read before there was a checkpoint, by its tokenizer.json and its marks."""


def read_texts(settings: Settings, plugins: Plugins, checkpoint: Checkpoint) -> Texts:
    """The tokenizer, the chat template and the reasoning's tags. Raises CheckpointError, PluginError and
    SettingsError."""
    template = _template(settings.model.chat_template, checkpoint)
    reasoning, reasonings = _reasoning(settings, plugins, template.source if template else "")
    marks = _marks(plugins, reasonings)
    tokenizer = read_tokenizer(settings.model.tokenizer, settings, plugins, checkpoint, marks)
    if template is not None and not template.tokens:
        template.tokens |= _roles(tokenizer, checkpoint)
    return Texts(tokenizer, template, reasoning)


def _roles(tokenizer: Tokenizer, checkpoint: Checkpoint) -> dict[str, str]:
    """The special tokens that templates name, of a checkpoint that names none: what the tokenizer begins texts with,
    and what ends answers."""
    ends = (tokenizer.id_to_token(id) for id in sorted(checkpoint.eos_token_ids))
    found = {"bos_token": tokenizer.encode("").tokens[:1], "eos_token": [end for end in ends if end is not None][:1]}
    return {role: texts[0] for role, texts in found.items() if texts}


def read_beforehand(file: Path, settings: Settings, plugins: Plugins) -> None:
    """Read a tokenizer.json that ``read_texts`` may need, if the settings have nothing to say about marks."""
    wanted = file.read_bytes(), _marks(plugins, _reasoning(settings, plugins, "")[1])
    beforehand[wanted] = _parsed(*wanted)


def _marks(plugins: Plugins, reasonings: Sequence[ReasoningTags]) -> frozenset[str]:
    """The texts that parsers look for."""
    marks = {mark for offer in plugins.offers["tool_format"] for mark in getattr(offer.registration, "marks", ())}
    return frozenset(marks.union(*(tags[:2] for tags in reasonings)))


def tool_format(settings: Settings, offer: Offer, tokenizer: Tokenizer) -> ToolFormat:
    """A way to write tool calls. What a plugin makes for an answer names the plugin in its errors."""
    registration = offer.registration
    assert isinstance(registration, ToolFormatRegistration)
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    return ToolFormat(
        offer.name,
        lambda tools: CheckedPart(offer.build(settings, tools), offer.whose),
        registration.forms if added.isdisjoint(registration.unless) else (),
        registration.syntax,
        registration.marks,
    )


def grammars(settings: Settings, plugins: Plugins, vocabulary: Vocabulary) -> Grammars:
    """What compiles grammars: a plugin's backend, or nothing, with a sentence that says why. Raises PluginError."""
    if plugins.spared("grammar", settings):
        log.warning(
            "engine.grammar_backend: auto finds none installed, so structured output is refused; %s brings one",
            installing("infer-llguidance"),
        )
        lacking = "This server has no backend for structured output; install infer-llguidance there."
        return Grammars(None, lacking=lacking)
    if not vocabulary.eos_token_ids:
        lacking = "Structured output needs an end-of-sequence token, and this checkpoint names none (eos_token_id)."
        return Grammars(None, lacking=lacking)
    offer = plugins.choose("grammar", settings)
    with Named(f"{offer.whose} cannot be used"):
        first = order(offer.registration.factory, offer.own(settings), vocabulary)
    return Grammars(offer.build(settings, vocabulary), first)


def _reasoning(settings: Settings, plugins: Plugins, template: str) -> tuple[ReasoningTags | None, list[ReasoningTags]]:
    """The model's tags, and all that are installed. One that cannot be made is left out, unless it is asked for."""
    chosen, auto = plugins.candidates("reasoning", settings), settings.model.reasoning == "auto"
    if auto and template and not plugins.offers["reasoning"]:
        log.warning(
            "model.reasoning: auto finds no format installed, so reasoning is not told from the text; %s brings some",
            installing("infer-tool-formats"),
        )
    made: dict[str, ReasoningTags] = {}
    for offer in plugins.offers["reasoning"]:
        try:
            made[offer.whose] = _tags(settings, offer)
        except PluginError as error:
            if not auto and offer in chosen:
                raise
            log.warning("%s", error)
    wanted = [made[offer.whose] for offer in chosen if offer.whose in made]
    return next((tags for tags in wanted if not auto or tags.closing in template), None), [*made.values()]


def _tags(settings: Settings, offer: Offer) -> ReasoningTags:
    with Named(f"{offer.whose} cannot be used"):
        tags = offer.registration.factory(offer.own(settings))
        if not isinstance(tags, ReasoningTags) or not all(isinstance(tag, str) and tag.strip() for tag in tags[:2]):
            raise TypeError("its factory made no ReasoningTags of two texts")
    if (reader := tags.reader) is None:
        return tags
    return tags._replace(
        reader=lambda tools: CheckedPart(inspection.make(offer.whose, PartProtocol, reader, tools), offer.whose)
    )


def read_tokenizer(
    path: str | None, settings: Settings, plugins: Plugins, checkpoint: Checkpoint, marks: Set[str]
) -> Tokenizer:
    """The tokenizer of the file ``path``, or the checkpoint's own, with ``marks`` as ordinary tokens. Raises
    CheckpointError and PluginError."""
    whose = _tokenizer_of(path, checkpoint)
    try:
        data = _tokenizer_json(path, settings, plugins, checkpoint)
        wanted = data, frozenset(marks)
        known = beforehand.pop(wanted, None)
        beforehand.clear()  # nobody asks again, and two at once may take hundreds of MiB
        tokenizer = known or _parsed(*wanted)
    except (CheckpointError, PluginError):
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"The {whose} cannot be read: {error}.") from error
    for id in sorted(checkpoint.eos_token_ids):
        if tokenizer.id_to_token(id) is None:
            raise CheckpointError(
                f"{checkpoint.path} says that token {id} ends an answer (eos_token_id), but the {whose} has no such "
                "token: it belongs to another model."
            )
    log.info("tokenizer: %d tokens", tokenizer.get_vocab_size(with_added_tokens=False))
    return tokenizer


def _tokenizer_json(path: str | None, settings: Settings, plugins: Plugins, checkpoint: Checkpoint) -> bytes:
    """tokenizer.json, or what a plugin makes of a file that stands in its place. Raises CheckpointError and
    PluginError."""
    known = plugins.suited("tokenizer")
    file = Path(checkpoint.path) / "tokenizer.json" if path is None else Path(path)
    if path is None and not file.is_file():
        file = next((other for name in known if (other := file.with_name(name)).is_file()), file)
    if file.name not in known:
        return file.read_bytes() if path is not None else checkpoint.container.tokenizer()
    offer = plugins.choose("tokenizer", settings, [file.name])
    with Named(f"{offer.whose} cannot read {file}"):
        made = offer.registration.factory(regular(file), offer.own(settings))
        if not isinstance(made, bytes):
            raise TypeError(f"its factory made no bytes but {type(made).__name__}")
    return made


def _parsed(data: bytes, marks: frozenset[str]) -> Tokenizer:
    """A tokenizer.json with ``marks`` as ordinary tokens."""
    tokenizer = Tokenizer.from_buffer(data)
    if (changed := _with_visible_marks(tokenizer, marks)) is None:
        return tokenizer
    del tokenizer
    return Tokenizer.from_str(changed)


def check_tokenizer(tokenizer: Tokenizer, path: str | None, checkpoint: Checkpoint, vocab_size: int) -> None:
    """Raises CheckpointError if the tokenizer has more tokens than the model."""
    # Added tokens may lie beyond the model's vocabulary: Gemma 3's text models have one for images without an
    # embedding. Other ids end at their number; one behind a gap is refused with the request whose text has it.
    if (count := tokenizer.get_vocab_size(with_added_tokens=False)) > vocab_size:
        raise CheckpointError(
            f"The {_tokenizer_of(path, checkpoint)} has {count} tokens, but the model's ids end at {vocab_size - 1}: "
            "it belongs to another model."
        )


def _tokenizer_of(path: str | None, checkpoint: Checkpoint) -> str:
    return "tokenizer " + (path if path is not None else f"of {checkpoint.path}")


def _with_visible_marks(tokenizer: Tokenizer, marks: Set[str]) -> str | None:
    """The tokenizer's JSON with the marks of tool calls and reasoning as ordinary tokens; None if they are. Decoding
    leaves out special tokens, but the parsers need these marks, and Mistral's [TOOL_CALLS] and Llama's <|python_tag|>,
    for example, are special."""
    added = tokenizer.get_added_tokens_decoder().values()
    if marks.isdisjoint(token.content for token in added if token.special):
        return None
    text = tokenizer.to_str()
    begin = text.index(ADDED) + len(ADDED)
    tokens, end = json.JSONDecoder().raw_decode(text, begin)
    for token in tokens:
        token["special"] = token["special"] and token["content"] not in marks
    return f"{text[:begin]}{json.dumps(tokens)}{text[end:]}"


def _template(path: str | None, checkpoint: Checkpoint) -> ChatTemplate | None:
    source, tool_source = checkpoint.chat_template, checkpoint.tool_template
    if path is not None:
        try:
            source, tool_source = Path(path).expanduser().read_text(encoding="utf-8"), None
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"model.chat_template = {path!r} cannot be read: {error}.") from None
    return None if source is None else ChatTemplate(source, checkpoint.special_tokens, tool_source)
