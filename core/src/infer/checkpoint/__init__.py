"""Checkpoints: finding their files, and reading their configuration and tensors."""

from infer.checkpoint.checkpoint import Checkpoint
from infer.checkpoint.folder import Folder
from infer.checkpoint.locate import ending, locate
from infer.checkpoint.tensors import Outlines, TensorFiles, dummy_tensors, tensor_files

__all__ = ["Checkpoint", "Folder", "Outlines", "TensorFiles", "dummy_tensors", "ending", "locate", "tensor_files"]
