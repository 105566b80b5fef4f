"""A checkpoint: where its files are, what they say, and its tensors."""

from infer.checkpoint.checkpoint import Checkpoint
from infer.checkpoint.tensors import TensorFiles, dummy_tensors, tensor_files

__all__ = ["Checkpoint", "TensorFiles", "dummy_tensors", "tensor_files"]
