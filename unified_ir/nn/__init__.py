"""Layers and losses: cells with their state, written in operators."""

from triplane.unified_ir.frontend.cell import Cell, CellList, Parameter
from triplane.unified_ir.nn.activations import GELU, Flatten, ReLU, Sigmoid, Tanh
from triplane.unified_ir.nn.attention import MultiheadAttention, PositionalEncoding, Rotary
from triplane.unified_ir.nn.conv import AvgPool2d, Conv1d, Conv2d, MaxPool2d
from triplane.unified_ir.nn.dense import Dense, Embedding, Sequential
from triplane.unified_ir.nn.imported import Imported
from triplane.unified_ir.nn.init import (
    Constant,
    GlorotNormal,
    GlorotUniform,
    Initializer,
    KaimingNormal,
    KaimingUniform,
    Normal,
    Uniform,
)
from triplane.unified_ir.nn.losses import (
    L1,
    MSE,
    BinaryCrossEntropy,
    CosineEmbedding,
    Huber,
    KLDivergence,
    Loss,
    NegativeLogLikelihood,
    SmoothL1,
    SoftmaxCrossEntropy,
    accuracy,
    binary_accuracy,
)
from triplane.unified_ir.nn.norm import BatchNorm1d, BatchNorm2d, LayerNorm
from triplane.unified_ir.nn.random import Dropout, generator, seed
from triplane.unified_ir.nn.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from triplane.unified_ir.nn.state import Buffer, Personal, RandomKey
from triplane.unified_ir.nn.transformer import (
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

__all__ = [
    "GELU",
    "GRU",
    "L1",
    "LSTM",
    "MSE",
    "RNN",
    "AvgPool2d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BinaryCrossEntropy",
    "Buffer",
    "Cell",
    "CellList",
    "Constant",
    "Conv1d",
    "Conv2d",
    "CosineEmbedding",
    "Dense",
    "Dropout",
    "Embedding",
    "Flatten",
    "GRUCell",
    "GlorotNormal",
    "GlorotUniform",
    "Huber",
    "Imported",
    "Initializer",
    "KLDivergence",
    "KaimingNormal",
    "KaimingUniform",
    "LSTMCell",
    "LayerNorm",
    "Loss",
    "MaxPool2d",
    "MultiheadAttention",
    "NegativeLogLikelihood",
    "Normal",
    "Parameter",
    "Personal",
    "PositionalEncoding",
    "RNNCell",
    "RandomKey",
    "ReLU",
    "Rotary",
    "Sequential",
    "Sigmoid",
    "SmoothL1",
    "SoftmaxCrossEntropy",
    "Tanh",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "Uniform",
    "accuracy",
    "binary_accuracy",
    "generator",
    "seed",
]
