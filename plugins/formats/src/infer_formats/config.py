"""Reading ``quantization_config``: every error is one sentence that names the key and the method."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import SchemaError, SchemaValidator, core_schema

from infer.errors import CheckpointError, first_fault

log = logging.getLogger(__name__)

MAX_PATTERNS, MAX_PATTERN = 128, 200
"""How many patterns a config may have, and of how many characters. A compiled pattern takes at most 10 MiB."""
MAX_KEYS = 200
"""The most characters of a config's keys that a message repeats."""

_CALIBRATION = """
act_group_aware backend batch_size block_name_to_quantize cache_block_outputs cache_examples_on_gpu
damp_auto_increment damp_percent dataset desc_act disable_exllama do_fuse exllama_config format fuse_max_seq_len
lm_head max_input_length max_length meta method model_file_base_name model_name_or_path model_seqlen
module_name_preceding_first_block modules_in_block_to_quantize modules_to_fuse mse pad_token_id quantizer
static_groups tokenizer true_sequential use_cuda_fp16 use_exllama
"""
CALIBRATION = frozenset(_CALIBRATION.split())
"""Keys of GPTQ's and AWQ's configs that say how the codes were found or computed with, or what the tensors show."""


def _group_size(size: int) -> int:
    if size == 0:
        raise ValueError("Input should be -1 or greater than 0")
    return size


Size = Annotated[int, Field(ge=1, le=1 << 20)]
GroupSize = Annotated[int, Field(ge=-1, le=1 << 20), AfterValidator(_group_size)]
"""How many neighbors share a scale; -1: all of a row."""


class Table(BaseModel):
    """A table of ``quantization_config``. Keys that no field has are named in the log."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    HARMLESS: ClassVar[frozenset[str]] = frozenset()
    """Further keys, which do not matter to a reader."""

    @classmethod
    def read(cls, config: Mapping[str, Any], method: str) -> Self:
        """The ``quantization_config`` of config.json. Raises CheckpointError."""
        text = config.get("text_config")
        table = text.get("quantization_config") if isinstance(text, dict) else None
        try:
            made = cls.model_validate(config["quantization_config"] if table is None else table)
        except ValidationError as error:
            fault = first_fault(error)
            shown = () if fault.kind == "missing" else (fault.value,)
            raise bad(method, ".".join(map(str, fault.path)), fault.text, *shown) from None
        if unknown := ", ".join(made._unknown()):
            log.warning("%s: infer does not know %s, and goes by the rest", method, unknown[:MAX_KEYS])
        return made

    def _unknown(self, path: str = "quantization_config") -> Iterator[str]:
        for key, value in (self.model_extra or {}).items():
            if value is not None and key not in self.HARMLESS:
                yield f"{path}.{key}"
        for key in type(self).model_fields:
            value = getattr(self, key)
            for below, table in value.items() if isinstance(value, dict) else [("", value)]:
                if isinstance(table, Table):
                    yield from table._unknown(".".join(filter(None, (path, key, below))))


def bad(method: str, key: str, what: str, *shown: object) -> CheckpointError:
    """An error about a key of ``quantization_config``, which shows its value if there is one to show."""
    place = f"quantization_config{'.' if key else ''}{key}"[:MAX_KEYS]
    values = "".join(f" is {reprlib.repr(value)}" for value in shown)
    return CheckpointError(f"config.json: {place}{values}; {method}: {what}.")


class Patterns:
    """Compiles a config's regular expressions. They come from strangers, so Rust's engine matches them, in time that is
    proportional to the text. It knows neither look-around nor references to groups."""

    def __init__(self, method: str) -> None:
        self._method, self._left = method, MAX_PATTERNS

    def compile(self, key: str, pattern: str) -> Pattern:
        """Raises CheckpointError if the pattern is invalid, too long or one too many."""
        if len(pattern) > MAX_PATTERN or self._left == 0:
            limit = f"infer takes {MAX_PATTERNS} patterns of {MAX_PATTERN} characters at most"
            raise bad(self._method, key, limit, pattern)
        self._left -= 1
        try:
            return Pattern(pattern)
        except SchemaError as error:
            why = str(error).strip().splitlines()[-1].strip().removeprefix("error: ").rstrip(".")
            raise bad(self._method, key, f"this pattern cannot be used: {why}", pattern) from None


class Pattern:
    """A regular expression that matches from the beginning of a name on, like ``re.match``."""

    def __init__(self, pattern: str) -> None:
        schema = core_schema.str_schema(pattern=f"^(?:{pattern})", regex_engine="rust-regex")
        self._validator = SchemaValidator(schema)

    def matches(self, name: str) -> bool:
        return self._validator.isinstance_python(name)
