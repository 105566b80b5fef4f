"""Youtu-LLM: latent attention, and plain MLPs."""

from __future__ import annotations

from pydantic import PositiveInt

from infer_models.latent import LatentConfig


class YoutuConfig(LatentConfig):
    q_lora_rank: PositiveInt | None = 1536
    tie_word_embeddings: bool = True
