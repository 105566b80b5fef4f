"""What models are composed of, and the table that fits a checkpoint's tensors to them.

A layer declares the checkpoint names it is made from when it is constructed, so that a model's file reads
top to bottom and every name in a checkpoint has exactly one owner. Shapes: see ``infer/contracts/protocols.py``.
"""

from infer.layers.blocks import Attention, GatedMLP, select
from infer.layers.config import LayerType, PositiveNumber, config_table, layer_windows, read_config
from infer.layers.decoder import Decoder, DecoderConfig, DecoderLayer
from infer.layers.linear import Embedding, Head, Linear, RMSNorm
from infer.layers.rotary import ROPE_KINDS, LongRope, RopeParameters, RotaryEmbedding
from infer.layers.table import Weights

__all__ = [
    "ROPE_KINDS",
    "Attention",
    "Decoder",
    "DecoderConfig",
    "DecoderLayer",
    "Embedding",
    "GatedMLP",
    "Head",
    "LayerType",
    "Linear",
    "LongRope",
    "PositiveNumber",
    "RMSNorm",
    "RopeParameters",
    "RotaryEmbedding",
    "Weights",
    "config_table",
    "layer_windows",
    "read_config",
    "select",
]
