"""GGUF, llama.cpp's form of a checkpoint: settings, tokenizer and weights in one file."""

from infer_formats.gguf.container import GGUF, GGUFFormat

__all__ = ["GGUF", "GGUFFormat"]
