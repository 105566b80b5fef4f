"""The layers that models are composed of. A table gives each layer its tensors of the checkpoint.

When a layer is constructed, it declares the checkpoint names it is made from, so that a model's file reads from top to
bottom and every name in a checkpoint has exactly one owner. Shapes: see ``infer/contracts/__init__.py``.
"""

from infer_layers.blocks import Attention, Gate, GatedMLP, select
from infer_layers.config import HiddenAct, LayerType, PositiveNumber, config_table, layer_windows, read_config
from infer_layers.decoder import Decoder, DecoderConfig, DecoderLayer, nth
from infer_layers.experts import Experts
from infer_layers.latent import LatentAttention, LatentSizes
from infer_layers.linear import CoarseHead, Embedding, Head, Linear, Norm, RMSNorm
from infer_layers.mamba import Mamba2, MambaSizes, ShortConv
from infer_layers.recurrent import DeltaSizes, GatedDeltaNet, KimiDelta
from infer_layers.rotary import ROPE_KINDS, LongRope, RopeParameters, RotaryEmbedding, TemperedYarnRope
from infer_layers.table import Weights

__all__ = [
    "ROPE_KINDS",
    "Attention",
    "CoarseHead",
    "Decoder",
    "DecoderConfig",
    "DecoderLayer",
    "DeltaSizes",
    "Embedding",
    "Experts",
    "Gate",
    "GatedDeltaNet",
    "GatedMLP",
    "Head",
    "HiddenAct",
    "KimiDelta",
    "LatentAttention",
    "LatentSizes",
    "LayerType",
    "Linear",
    "LongRope",
    "Mamba2",
    "MambaSizes",
    "Norm",
    "PositiveNumber",
    "RMSNorm",
    "RopeParameters",
    "RotaryEmbedding",
    "ShortConv",
    "TemperedYarnRope",
    "Weights",
    "config_table",
    "layer_windows",
    "nth",
    "read_config",
    "select",
]
