"""Settings: command line over environment over file over default, each value with its source.

The sections below are core's. A plugin's own table, ``[cache.paged]`` say, is validated by the plugin's own model:
the whole schema is composed from what is installed, so that unknown keys and the JSON schema come out right by
themselves.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, create_model, field_validator

from infer.errors import SettingsError
from infer.plugins import KNOWN, Plugins
from infer.protocols import NoSettings

DEFAULT_FILE = "settings.toml"
ENV_PREFIX = "INFER_"
ENV_FILE = "INFER_SETTINGS"
SECTION_OF_SLOT: Mapping[str, str] = {
    "cache": "cache",
    "kernels": "kernels",
    "scheduler": "engine",
    "model": "model",
}


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelSettings(Section):
    path: str | None = Field(None, description="A folder, a hub id (org/name) or a bundled name (demo).")
    family: str = Field("auto", description="The model plugin; auto goes by the checkpoint's architecture.")
    tokenizer: str | None = Field(None, description="A tokenizer.json other than the checkpoint's.")
    chat_template: str | None = Field(None, description="A file with a Jinja template other than the checkpoint's.")
    tool_format: Literal["auto", "tags", "json", "python", "none"] = Field(
        "auto",
        description="How the model writes tool calls: <tool_call> tags (Qwen), bare JSON (Llama 3), Python (Gemma); "
        "auto goes by the chat template.",
    )
    reasoning: Literal["auto", "think", "none"] = Field(
        "auto", description="think: what is in <think> tags is reasoning; auto goes by the chat template."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="The weights' and the cache's type; auto takes the checkpoint's."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs.")
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy makes up weights from config.json, for measuring shapes."
    )


class CacheSettings(Section):
    backend: str = Field("auto", description="The cache plugin; auto takes the installed one of highest priority.")


class EngineSettings(Section):
    max_batch_size: int = Field(16, ge=1, le=65536, description="Requests that run at a time.")
    max_waiting_requests: int = Field(
        256, ge=0, description="Requests that may wait besides; the next one is answered 503."
    )
    max_seq_len: int | None = Field(
        None,
        ge=2,
        description="Tokens of a prompt and its answer; none for the smaller of 4096 and the checkpoint's.",
    )
    batching_mode: str = Field("continuous", description="The scheduler plugin: continuous, static or another.")
    use_chunked_prefill: bool = Field(True, description="Prefill long prompts in chunks, alongside decode.")
    prefill_chunk_size: int = Field(512, ge=1, description="Tokens of one prompt per step.")
    max_prefill_chunks_per_step: int | None = Field(None, ge=1, description="Chunks per step; none for no cap.")
    max_tokens_per_step: int | None = Field(
        None, ge=1, description="Prompt and decode tokens of a step together; none for no cap."
    )
    max_num_partial_prefills: int | None = Field(None, ge=1, description="Prompts part-way at once; none for no cap.")
    mixed_batches: bool = Field(
        True, description="Take a step's decodes and chunks through the model together, so that weights are read once."
    )
    graphs: Literal["auto", "on", "off"] = Field(
        "auto", description="Record decode passes and replay them: auto does so where the kernels can."
    )


class KernelsSettings(Section):
    backend: str = Field("auto", description="The kernel plugin; auto takes the best that runs on the device.")
    threads: int | None = Field(None, ge=1, description="CPU threads of the kernels; none for torch's choice.")


class ServerSettings(Section):
    host: str = Field("127.0.0.1", description="The address to bind.")
    port: int = Field(8000, ge=0, le=65535, description="The port to bind; 0 for any free one.")
    api_keys: list[SecretStr] = Field(
        [], description="Keys of which every request has to show one; separated by commas; none lets everyone in."
    )
    access_log: bool = Field(True, description="A line of JSON per request, to stderr.")
    metrics_names: Literal["infer", "vllm"] = Field(
        "infer", description="How names at /metrics begin: infer_, or vllm: for dashboards made for that."
    )
    max_choices: int = Field(256, ge=1, description="Answers that one request may ask for: its prompts times n.")
    served_model_name: str | None = Field(None, description="The model's name for clients; none for model.path.")
    max_body_bytes: int = Field(4 * 2**20, ge=1024, description="The largest request body.")
    body_timeout_s: float = Field(30.0, gt=0, description="Seconds for a request's body to arrive.")
    stall_timeout_s: float = Field(60.0, gt=0, description="Seconds until a client that does not read is dropped.")
    drain_timeout_s: float = Field(30.0, ge=0, description="Seconds that requests may finish in after SIGTERM.")

    @field_validator("api_keys", mode="before")
    @classmethod
    def _keys(cls, value: object) -> object:
        return [key.strip() for key in value.split(",")] if isinstance(value, str) else value or []

    @field_validator("api_keys")
    @classmethod
    def _long(cls, value: list[SecretStr]) -> list[SecretStr]:
        if any(not key.get_secret_value() for key in value):
            raise ValueError("a key is empty")
        return value


class LogSettings(Section):
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="What is logged, to stderr.")


class Settings(Section):
    model: ModelSettings = ModelSettings()
    cache: CacheSettings = CacheSettings()
    engine: EngineSettings = EngineSettings()
    kernels: KernelsSettings = KernelsSettings()
    server: ServerSettings = ServerSettings()
    log: LogSettings = LogSettings()


@dataclass(frozen=True)
class Loaded:
    settings: Settings
    sources: Mapping[str, str]
    """Dotted key -> where its value came from."""


def schema(plugins: Plugins) -> type[Settings]:
    """The settings' model with a table for every installed plugin that has settings of its own."""
    sections: dict[str, Any] = {}
    for name, field in Settings.model_fields.items():
        base: Any = field.annotation
        tables: dict[str, Any] = {}
        for slot, section in SECTION_OF_SLOT.items():
            for offer in plugins.offers[slot]:
                own = offer.registration.settings
                if section != name or not own.model_fields:
                    continue
                if offer.name in base.model_fields:
                    raise SettingsError(
                        f"{offer.distribution} offers {offer.name!r} for the slot {slot}, but {section}.{offer.name} "
                        "is a setting of infer's own; the plugin must be renamed."
                    )
                tables[offer.name] = (
                    own,
                    Field(default_factory=own, description=offer.registration.description),
                )
        if tables:
            base = create_model(base.__name__, __base__=base, **tables)
        sections[name] = (base, base())
    return create_model("Settings", __base__=Settings, **sections)


def plugin_settings(settings: Settings, slot: str, name: str) -> BaseModel:
    """The plugin's own table, validated; its NoSettings where it has none."""
    table = getattr(getattr(settings, SECTION_OF_SLOT[slot]), name, None)
    return table if isinstance(table, BaseModel) else NoSettings()


def load_settings(
    plugins: Plugins,
    *,
    file: str | None = None,
    argv: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    read_file: bool = True,
) -> Loaded:
    """Merge all sources and validate. ``overrides`` (nested, from Python) goes over everything.

    The file is ``--settings``, or INFER_SETTINGS, or ./settings.toml if there is one. Raises SettingsError.
    """
    env = os.environ if env is None else env
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if read_file:
        _read_file(file or env.get(ENV_FILE), values, sources)
    for variable, text in env.items():
        if variable.startswith(ENV_PREFIX) and variable != ENV_FILE:
            key = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            _put(values, sources, key, _none(text), variable)
    for key, text in _arguments(argv):
        _put(values, sources, key, _none(text), f"--{key}")
    for key, value in _leaves(overrides or {}):
        _put(values, sources, key, value, "argument")
    model = schema(plugins)
    engine = values.get("engine")
    static = isinstance(engine, dict) and engine.get("batching_mode") == "static"
    if static and "engine.use_chunked_prefill" not in sources:
        # Chunking is on by default and impossible here; only asking for it is an error.
        _put(values, sources, "engine.use_chunked_prefill", False, "default for static")
    try:
        settings = model.model_validate(values)
    except ValidationError as error:
        raise _explain(error, model, sources) from None
    _check_rules(settings, sources)
    return Loaded(settings, {key: sources.get(key, "default") for key, _ in describe(settings)})


def describe(settings: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key, dotted, with its value."""
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from describe(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def describe_schema(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Every key, dotted, with its description and default."""
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            yield from describe_schema(type(default), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.description or "", default


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(settings, the rest): ``--a.b value`` and ``--a.b=value`` wherever they stand before a ``--``."""
    settings, rest, words = [], [], list(argv)
    while words and words[0] != "--":
        word = words.pop(0)
        key, equals, _ = word.partition("=")
        if word.startswith("--") and "." in key:
            settings += [word] if equals else [word, *words[:1]]
            words = words if equals else words[1:]
        else:
            rest.append(word)
    return settings, rest + words


def _read_file(named: str | None, values: dict[str, Any], sources: dict[str, str]) -> None:
    path = Path(named or DEFAULT_FILE)
    if not path.exists():
        if named:
            raise SettingsError(f"The settings file {named} does not exist.")
        return
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise SettingsError(f"The settings file {path} cannot be read: {error}.") from None
    for key, value in _leaves(content):
        # TOML has no null; "none" says it there as on the command line.
        _put(values, sources, key, _none(value) if isinstance(value, str) else value, str(path))


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _put(values: dict[str, Any], sources: dict[str, str], key: str, value: Any, source: str) -> None:
    *tables, name = key.split(".")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise SettingsError(f"{key} (from {source}): {table!r} is a value, not a table.")
    values[name] = value
    sources[key] = source


def _arguments(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """``--a.b value`` and ``--a.b=value``."""
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or "." not in word.partition("=")[0]:
            raise SettingsError(f"{word!r} is not understood; settings are given as --section.key value.")
        key, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            if not rest:
                raise SettingsError(f"--{key} needs a value: --{key} value.")
            value = rest.pop(0)
        yield key.replace("-", "_"), value


def _none(text: str) -> str | None:
    return None if text.lower() in ("none", "null", "") else text


def _explain(error: ValidationError, model: type[Settings], sources: Mapping[str, str]) -> SettingsError:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    key = ".".join(path)
    source = sources.get(key) or next((s for k, s in sources.items() if k.startswith(f"{key}.")), "")
    origin = f" (from {source})" if source else ""
    if first["type"] != "extra_forbidden":
        return SettingsError(f"{key} = {first['input']!r}{origin}: {first['msg']}.")
    section = next((slot for slot, name in SECTION_OF_SLOT.items() if name == path[0]), None)
    package = KNOWN.get(f"{section}.{path[1]}") if section and len(path) > 1 else None
    if package:
        return SettingsError(f"{key}{origin}: the plugin {path[1]!r} is not installed: pip install {package}.")
    known = [name for name, _, _ in describe_schema(model)]
    known += sorted({".".join(k.split(".")[:n]) for k in known for n in range(1, k.count(".") + 1)})
    close = difflib.get_close_matches(key, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else " `infer settings` lists all."
    return SettingsError(f"{key}{origin} is not a setting.{hint}")


def _check_rules(settings: Settings, sources: Mapping[str, str]) -> None:
    """Combinations that cannot work, and options that would have no effect."""
    e = settings.engine
    if e.batching_mode == "static" and e.use_chunked_prefill:
        raise SettingsError(
            'engine.use_chunked_prefill = true cannot work with engine.batching_mode = "static", which prefills whole '
            'prompts; turn chunking off or choose "continuous".'
        )
    if not e.use_chunked_prefill:
        why = f"engine.use_chunked_prefill is false{' (static batching)' if e.batching_mode == 'static' else ''}"
        for name in ("prefill_chunk_size", "max_prefill_chunks_per_step", "max_num_partial_prefills"):
            if f"engine.{name}" in sources and getattr(e, name) is not None:
                if name == "max_prefill_chunks_per_step" and e.batching_mode != "static":
                    continue  # a whole prompt counts as one chunk
                raise SettingsError(
                    f"engine.{name} = {getattr(e, name)} (from {sources[f'engine.{name}']}) has no effect while {why}; "
                    "leave it out or turn chunking on."
                )
    if e.max_tokens_per_step is not None:
        if e.max_tokens_per_step < e.max_batch_size:
            raise SettingsError(
                f"engine.max_tokens_per_step = {e.max_tokens_per_step} is below engine.max_batch_size = "
                f"{e.max_batch_size}: everyone who decodes needs a token in each step; raise one or lower the other."
            )
        if not e.use_chunked_prefill and (e.max_seq_len is None or e.max_tokens_per_step < e.max_seq_len):
            raise SettingsError(
                f"engine.max_tokens_per_step = {e.max_tokens_per_step} with engine.use_chunked_prefill = false needs "
                f"engine.max_seq_len set and no larger (it is {e.max_seq_len}): a longer prompt could never run."
            )
    if settings.model.dtype == "float16" and settings.model.device == "cpu":
        raise SettingsError('model.dtype = "float16" is slow with model.device = "cpu"; use "bfloat16" or "float32".')
