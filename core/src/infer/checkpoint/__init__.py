"""Checkpoints: finding their files, and reading their configuration and tensors."""

from infer.checkpoint.checkpoint import Checkpoint
from infer.checkpoint.tensors import TensorFiles, dummy_tensors, tensor_files

__all__ = ["Checkpoint", "TensorFiles", "dummy_tensors", "tensor_files"]
