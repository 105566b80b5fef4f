"""The language model of a checkpoint that also reads images, video or sound: what reads those is left out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from infer.contracts.attention import AttentionSpec
from infer.contracts.model import ModelContext
from infer.errors import CheckpointError
from infer.weight import Weight
from infer_layers import Decoder, DecoderConfig, DecoderLayer, RopeParameters, Weights, config_table

log = logging.getLogger(__name__)

TOWERS = (
    *("vision_tower.", "audio_tower.", "multi_modal_projector."),
    *("embed_vision.", "embed_audio.", "vision_embedder.", "visual.", "mtp."),
)
"""How the names of what is left out begin, without "model."; "mtp." are layers that draft tokens."""

TIED = ("tie_embedding", "tie_word_embeddings")
"""The fields that say whether the head is the embedding, where those of the whole model outdo those of the text."""


class LanguageModel(Decoder):
    """A ``Decoder`` whose config may stand in config.json's ``text_config``, beside those of towers. ``model_types``
    are the values that the model_type there may have; empty for any. Raises CheckpointError for others."""

    left_out: tuple[str, ...] = TOWERS

    def __init__(
        self,
        config: Mapping[str, Any],
        context: ModelContext,
        schema: type[DecoderConfig],
        layer: Callable[[Weights, str, int, Any, AttentionSpec, RopeParameters | None], DecoderLayer],
        model_types: tuple[str, ...] = (),
    ) -> None:
        if nested := config_table(config, "text_config"):
            kind = nested.get("model_type")
            if model_types and kind not in (None, *model_types):
                raise CheckpointError(
                    f"config.json: text_config has model_type {kind!r}; infer knows this architecture with "
                    f"{', '.join(map(repr, model_types))}."
                )
            tied = [config[key] for key in TIED if config.get(key) is not None]
            own = {key: value for key, value in nested.items() if not tied or key not in TIED}
            config = own | ({"tie_word_embeddings": tied[0]} if tied else {})
        super().__init__(config, context, schema, layer)

    def unstack(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        return super().unstack(self._texts(tensors))

    def load(self, tensors: Iterable[tuple[str, Weight]]) -> None:
        super().load(self._texts(tensors))

    def _texts(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """The language model's tensors, named as in a checkpoint without towers. With them, transformers 4 wrote
        "language_model.model.", and transformers 5 writes "model.language_model."."""
        left: dict[str, list[int]] = {}
        for name, tensor in tensors:
            bare = name.removeprefix("model.")
            if tower := next((tower for tower in self.left_out if bare.startswith(tower)), None):
                left.setdefault(tower.removesuffix("."), []).append(tensor.nbytes)
                continue
            yield name.removeprefix("language_model.").replace("model.language_model.", "model.", 1), tensor
        if left and self.weights.context.device.type != "meta":
            log.info(
                "only the language model is served: %d tensors (%.1f MiB) of %s are left out",
                sum(map(len, left.values())),
                sum(map(sum, left.values())) / 2**20,
                ", ".join(left),
            )
