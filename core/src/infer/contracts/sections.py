"""The sections of the settings, as the parts that are made from them get them.

A plugin's own table, such as ``[cache.paged]``, is validated by the plugin's own model; ``infer/settings.py`` composes
the whole schema from what is installed. Rules between keys are validators of the models, so they hold however a model
is built.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from infer.contracts.attention import KVDtype


def _rule(text: str, of: str = "") -> PydanticCustomError:
    """The error of a broken rule. The source of the value is put into the text after ``of``, which is a part of it."""
    return PydanticCustomError("rule", "{text}", {"text": text, "of": of})


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _listed(cls, value: object, about: ValidationInfo) -> object:
        """The command line and the environment have texts only: a list is separated by commas there."""
        if about.field_name is None or get_origin(cls.model_fields[about.field_name].annotation) is not list:
            return value
        if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
            raise ValueError("a list is written without brackets and quotes here, separated by commas: a,b")
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value or []


EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
"""How much a model may be asked to reason, besides ``none``."""
LONGEST_TIMEOUT_S = 7 * 86400.0
"""The longest that a request may be given, in seconds."""


def slow_dtype(dtype: str, device: str) -> str | None:
    """Why a model of this dtype cannot be served on this type of device, if so."""
    if (dtype, device) == ("float16", "cpu"):
        return 'model.dtype = "float16" is slow with a CPU as model.device; use "bfloat16" or "float32".'
    return None


class ModelSettings(Section):
    path: str | None = Field(
        None,
        description="A folder or file, a hub id (org/name, org/name:TAG) or a bundled name (demo).",
    )
    family: str = Field("auto", description="The model plugin; auto goes by the checkpoint's architecture.")
    tokenizer: str | None = Field(
        None,
        description="A tokenizer.json other than the checkpoint's, or another file that a plugin reads.",
    )
    chat_template: str | None = Field(None, description="A file with a Jinja template other than the checkpoint's.")
    tool_format: str = Field(
        "auto",
        description="How the model writes tool calls: tags (JSON in tags), action, xml, glm, kimi, kimi3, deepseek, "
        "dsml, minimax, minicpm, solar, gemma, mistral, harmony, python, json (bare), or a plugin's; auto takes what "
        "the chat template itself writes; none for none.",
    )
    reasoning: str = Field(
        "auto",
        description="think: what is in `<think>` tags is reasoning; harmony: gpt-oss's channels; or another of the "
        "installed; auto goes by the chat template; none for none.",
    )
    effort_budgets: list[str] = Field(
        ["minimal=512", "low=2048", "medium=8192", "high=24576"],
        description="EFFORT=TOKENS, separated by commas: the most tokens of reasoning where a request names an effort "
        "that the chat template does not know; an effort that is not listed has no bound, and none is no reasoning.",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="auto: what the checkpoint's generation_config.json says of sampling (temperature, top_k, top_p, "
        "min_p, repetition_penalty, do_sample) holds for requests that do not say; none: it does not.",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="The weights' type, and the cache's with cache.kv_dtype auto; auto takes the checkpoint's."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs.")
    quantization: Literal["int8", "int4"] | None = Field(
        None,
        description="int8 or int4: quantize a plain checkpoint's weights while they are loaded; with int4, the "
        "embedding and the output head get int8.",
    )
    plain_layers: list[str] = Field(
        ["*.mlp.gate.weight", "*.router.*", "*.block_sparse_moe.gate.weight", "*.shared_expert_gate.weight"],
        description="Names of weights that quantization leaves as they are, separated by commas; * stands for any "
        "text.",
    )
    activations: Literal["auto", "int8", "plain"] = Field(
        "auto",
        description="What quantized weights are multiplied with: activations rounded to int8 (faster), or as they are; "
        "auto: int8 for model.quantization, else what the checkpoint says.",
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy makes up weights from config.json, for measuring shapes."
    )
    weight_cache: str | None = Field(
        "auto",
        description="The folder that keeps packed weights for the next start; auto: infer-weights in the hub's folder "
        "(HF_HOME); none: weights are packed at each start.",
    )
    weight_cache_gib: PositiveFloat = Field(
        64.0, description="The most that this folder may take, in GiB; what was used last stays."
    )

    @model_validator(mode="after")
    def _float16(self) -> Self:
        if why := slow_dtype(self.dtype, self.device):
            raise _rule(why)
        return self

    @field_validator("effort_budgets")
    @classmethod
    def _efforts(cls, value: list[str]) -> list[str]:
        pattern = f"({'|'.join(EFFORTS)})=[0-9]{{1,9}}"
        if bad := [each for each in value if not re.fullmatch(pattern, each)]:
            raise ValueError(f"{bad[0]!r} is not EFFORT=TOKENS, such as low=2048; efforts are {', '.join(EFFORTS)}")
        names = Counter(each.partition("=")[0] for each in value)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"{twice[0]} has two budgets; leave one out")
        return value

    @property
    def budgets(self) -> dict[str, int]:
        """The most tokens of reasoning, by the name of the effort."""
        return {name: int(tokens) for name, _, tokens in (entry.partition("=") for entry in self.effort_budgets)}

    @field_validator("tool_format", "reasoning", "generation_config", mode="before")
    @classmethod
    def _named_none(cls, value: object) -> object:
        """For these keys ``none`` is one of the choices; for all others it means "no value"."""
        return "none" if value is None else value


class CacheSettings(Section):
    backend: str = Field("auto", description="The cache plugin; auto takes the installed one of highest priority.")
    kv_dtype: KVDtype = Field(
        "auto",
        description="How K and V are stored: auto for the model's type; int8 for codes with a scale per token and "
        "head, which take half the memory of bfloat16.",
    )


class EngineSettings(Section):
    whole_prompts: ClassVar[frozenset[str]] = frozenset({"static"})
    """The schedulers that cannot prefill in chunks, by name: core's own, and those that ``schema`` adds from their
    registrations."""

    max_batch_size: int = Field(16, ge=1, le=65536, description="Requests that run at a time.")
    max_waiting_requests: int = Field(
        256, ge=0, description="Requests that may wait besides; the next one is answered 503."
    )
    max_open_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens that the prompts of all requests may have together, of those that run and those that wait; "
        "the next one is answered 503. None: any number. A prompt that is alone may have more.",
    )
    priority_aging_s: float | None = Field(
        60.0,
        gt=0,
        le=1e6,
        description="Seconds of waiting that make up for one level of priority; none: a higher priority always goes "
        "first.",
    )
    step_timeout_s: float = Field(
        300.0, gt=0, description="Seconds that a pass may take; while one takes longer, /health answers 503."
    )
    max_seq_len: int | None = Field(
        None,
        ge=2,
        description="Tokens of a prompt and its answer; none for the checkpoint's, so far as the cache holds them.",
    )
    batching_mode: str = Field(
        "continuous",
        description="The scheduler plugin: continuous, fair (shares between API keys and their users), static or "
        "another.",
    )
    use_chunked_prefill: bool = Field(True, description="Prefill long prompts in chunks, alongside decode.")
    prefill_chunk_size: int = Field(512, ge=1, description="Tokens of one prompt per step; on a GPU 2048 unless set.")
    target_itl_ms: PositiveFloat | None = Field(
        None,
        description="A goal for the milliseconds between two tokens of an answer; prompts are cut to meet it. None for "
        "no goal.",
    )
    max_prefill_chunks_per_step: int | None = Field(None, ge=1, description="Chunks per step; none for no cap.")
    max_tokens_per_step: int | None = Field(
        None,
        ge=1,
        description="Prompt and decode tokens of a step together; none for no cap; on a GPU 8192 unless set.",
    )
    max_num_partial_prefills: int | None = Field(None, ge=1, description="Prompts part-way at once; none for no cap.")
    mixed_batches: bool = Field(
        True, description="Take a step's decodes and chunks through the model together, so that weights are read once."
    )
    graphs: Literal["auto", "on", "off"] = Field(
        "auto", description="Record decode passes and replay them: auto does so where the kernels can."
    )
    speculation: str | None = Field(
        None,
        description="Who proposes draft tokens, which are verified together and change no answer: ngram looks in "
        "prompt and answer, suffix also in other answers, draft asks a smaller model, mtp a head of the model itself, "
        "eagle3 a head of another checkpoint, or a plugin; none for nobody.",
    )
    max_draft_tokens: int = Field(
        8, ge=1, le=16, description="Draft tokens of one sequence per step, at most; fewer where they do not pay."
    )
    grammar_backend: str = Field(
        "auto", description="The plugin that compiles structured outputs: llguidance or another; auto takes the best."
    )

    @field_validator("speculation")
    @classmethod
    def _nobody(cls, value: str | None) -> str | None:
        """Python's settings may say ``none`` as the others do."""
        return None if value == "none" else value

    @model_validator(mode="before")
    @classmethod
    def _chunks_by_default(cls, values: Any) -> Any:
        """Turn chunking off for schedulers that cannot do it. It is on by default, so only asking for it explicitly is
        an error."""
        if (
            isinstance(values, dict)
            and "use_chunked_prefill" not in values
            and values.get("batching_mode") in cls.whole_prompts
        ):
            return values | {"use_chunked_prefill": False}
        return values

    @model_validator(mode="after")
    def _rules(self) -> Self:
        """Refuse combinations that cannot work, and options that would have no effect."""
        whole = self.batching_mode in self.whole_prompts
        if whole and self.use_chunked_prefill:
            raise _rule(
                f'engine.use_chunked_prefill = true cannot work with engine.batching_mode = "{self.batching_mode}", '
                'which prefills whole prompts; turn chunking off or choose "continuous".'
            )
        if not self.use_chunked_prefill:
            why = f"engine.use_chunked_prefill is false{f' ({self.batching_mode} batching)' if whole else ''}"
            names = ["prefill_chunk_size", "max_num_partial_prefills", "target_itl_ms"]
            if whole:  # with other schedulers, a whole prompt counts as one chunk
                names.append("max_prefill_chunks_per_step")
            for name in names:
                if name in self.model_fields_set and (value := getattr(self, name)) is not None:
                    raise _rule(
                        f"engine.{name} = {value} has no effect while {why}; leave it out or turn chunking on.",
                        of=f"engine.{name} = {value}",
                    )
        if self.speculation is None and "max_draft_tokens" in self.model_fields_set:
            raise _rule(
                f"engine.max_draft_tokens = {self.max_draft_tokens} has no effect while engine.speculation is none; "
                "leave it out, or choose ngram or draft."
            )
        if self.max_tokens_per_step is not None:
            if self.max_tokens_per_step < self.max_batch_size:
                raise _rule(
                    f"engine.max_tokens_per_step = {self.max_tokens_per_step} is below engine.max_batch_size = "
                    f"{self.max_batch_size}: everyone who decodes needs a token in each step; raise one or lower the "
                    "other."
                )
            if not self.use_chunked_prefill and (
                self.max_seq_len is None or self.max_tokens_per_step < self.max_seq_len
            ):
                raise _rule(
                    f"engine.max_tokens_per_step = {self.max_tokens_per_step} with engine.use_chunked_prefill = false "
                    f"needs engine.max_seq_len set and no larger (it is {self.max_seq_len}): a longer prompt could "
                    "never run."
                )
        return self


class KernelsSettings(Section):
    backend: str = Field("auto", description="The kernel plugin; auto takes the best that runs on the device.")
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads of the kernels; none for torch's choice.")


class AdaptersSettings(Section):
    load: list[str] = Field(
        [], description="Adapters to load at the start: NAME=PATH of a folder or file, separated by commas."
    )
    max_loaded: int = Field(8, ge=1, le=1024, description="The most adapters at a time.")
    max_rank: int = Field(64, ge=1, le=4096, description="The highest rank that an adapter may have.")
    folder: str | None = Field(
        None,
        description="The folder in which POST /v1/load_lora_adapter may name adapters; none: that route loads none.",
    )

    @field_validator("load")
    @classmethod
    def _named(cls, value: list[str]) -> list[str]:
        if bad := [each for each in value if not re.fullmatch("[^=]+=.+", each)]:
            raise ValueError(f"{bad[0]!r} is not NAME=PATH")
        names = Counter(each.partition("=")[0] for each in value)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"{twice[0]!r} is the name of two adapters; choose another for one of them")
        return value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.load) > self.max_loaded:
            raise _rule(
                f"adapters.load names {len(self.load)} adapters, more than adapters.max_loaded = {self.max_loaded}; "
                "raise it, or load fewer.",
                of=f"adapters.max_loaded = {self.max_loaded}",
            )
        return self

    @property
    def paths(self) -> dict[str, Path]:
        """Where those lie that are loaded at the start, by their names."""
        return {name: Path(path) for name, _, path in (entry.partition("=") for entry in self.load)}

    @property
    def slots(self) -> int:
        """How many adapters there may be at a time; 0 if none can ever be loaded."""
        return self.max_loaded if self.load or self.folder is not None else 0


class ServerSettings(Section):
    host: str = Field("127.0.0.1", description="The address to bind.")
    port: int = Field(8000, ge=0, le=65535, description="The port to bind; 0 for any free one.")
    api_keys: list[SecretStr] = Field(
        [], description="Keys of which every request has to show one; separated by commas; none lets everyone in."
    )
    requests_per_minute: int | None = Field(
        None,
        ge=1,
        description="Requests to the model that each API key may send; without keys, all clients together; none for no "
        "quota.",
    )
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="Tokens of prompts and answers that each API key may use; without keys, all clients together; none "
        "for no quota.",
    )
    cors_origins: list[str] = Field(
        [],
        description="Origins (https://example.org) whose pages a browser lets read answers, separated by commas; * is "
        "any; none for no other.",
    )
    access_log: bool = Field(True, description="A line of JSON per request, to stderr.")
    metrics_names: Literal["infer", "vllm"] = Field(
        "infer", description="How names at /metrics begin: infer_, or vllm: for dashboards made for that."
    )
    max_choices: int = Field(
        256, ge=1, description="Answers that one request may ask for: its prompts times n, or its questions."
    )
    served_model_name: str | None = Field(None, description="The model's name for clients; none for model.path.")
    aliases: list[str] = Field(
        [],
        description="Further names under which clients may ask for the model, separated by commas; * is any name. "
        "Agents ask for several.",
    )
    unknown_fields: Literal["refuse", "ignore"] = Field(
        "refuse", description="What becomes of a request with a field that its endpoint does not know."
    )
    max_body_bytes: int = Field(4 * 2**20, ge=1024, description="The largest request body.")
    request_timeout_s: float | None = Field(
        None,
        gt=0,
        le=LONGEST_TIMEOUT_S,
        description="Seconds within which each answer has to end, or it is ended with 504; a request's timeout may say "
        "less; none for no limit.",
    )
    body_timeout_s: float = Field(30.0, gt=0, description="Seconds for a request's body to arrive.")
    stall_timeout_s: float = Field(60.0, gt=0, description="Seconds until a client that does not read is dropped.")
    drain_timeout_s: float = Field(30.0, ge=0, description="Seconds that requests may finish in after SIGTERM.")

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: list[str]) -> list[str]:
        bad = [v for v in value if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", v)]
        if bad:
            raise ValueError(f"{bad[0]!r} is no origin; one is like https://example.org or http://localhost:3000, or *")
        return value

    @field_validator("api_keys")
    @classmethod
    def _long(cls, value: list[SecretStr]) -> list[SecretStr]:
        """Without the whitespace around keys, which no header can carry: a secret from a file often ends with a line
        break."""
        keys = [SecretStr(key.get_secret_value().strip()) for key in value]
        if any(not key.get_secret_value() for key in keys):
            raise ValueError("a key is empty")
        return keys


class LogSettings(Section):
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="What is logged, to stderr.")

    def begin(self) -> None:
        """Have this process log so."""
        logging.basicConfig(level=self.level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)


class ModelTable(Section):
    """What a table ``[models.NAME]`` has besides the sections' keys that it overrides."""

    pinned: bool = Field(False, description="Load it at the start, and keep it.")
    keep_alive_s: float | None = Field(None, ge=-1, le=1e9, description="In place of server.router.keep_alive_s.")
    aliases: list[str] = Field([], description="Further names under which clients may ask for it; * is any name.")


class ObserversSettings(Section):
    """The tables of observer plugins; core has no settings here."""


class Settings(BaseSettings):
    """All sections. Built directly, it has the given values and defaults; ``load_settings`` also reads ``sources``."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), case_sensitive=True, hide_input_in_errors=True
    )
    sources: ClassVar[Sequence[PydanticBaseSettingsSource]] = ()
    """Where values come from; the first source that has a key wins."""

    model: ModelSettings = ModelSettings()
    cache: CacheSettings = CacheSettings()
    engine: EngineSettings = EngineSettings()
    kernels: KernelsSettings = KernelsSettings()
    adapters: AdaptersSettings = AdaptersSettings()
    server: ServerSettings = ServerSettings()
    observers: ObserversSettings = ObserversSettings()
    log: LogSettings = LogSettings()
    models: dict[str, dict[str, Any]] = Field(
        {}, description="Several models behind one address: [models.NAME] for each, with what differs from the rest."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, *cls.sources
