"""The steps that treat each sample by itself, and the table of their names in JSON."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from triplane.unified_ir.data.step import RowStep
from triplane.unified_ir.data.transforms.augmentation import Erase as Erase
from triplane.unified_ir.data.transforms.augmentation import Flip as Flip
from triplane.unified_ir.data.transforms.augmentation import Jitter as Jitter
from triplane.unified_ir.data.transforms.augmentation import Noise as Noise
from triplane.unified_ir.data.transforms.augmentation import RandomCrop as RandomCrop
from triplane.unified_ir.data.transforms.augmentation import Rotate as Rotate
from triplane.unified_ir.data.transforms.augmentation import Shift as Shift
from triplane.unified_ir.data.transforms.encoding import Lookup as Lookup
from triplane.unified_ir.data.transforms.encoding import OneHot as OneHot
from triplane.unified_ir.data.transforms.encoding import Tokenize as Tokenize
from triplane.unified_ir.data.transforms.selecting import Concatenate as Concatenate
from triplane.unified_ir.data.transforms.selecting import Drop as Drop
from triplane.unified_ir.data.transforms.selecting import Rename as Rename
from triplane.unified_ir.data.transforms.selecting import Select as Select
from triplane.unified_ir.data.transforms.selecting import Stack as Stack
from triplane.unified_ir.data.transforms.shapes import CenterCrop as CenterCrop
from triplane.unified_ir.data.transforms.shapes import Pad as Pad
from triplane.unified_ir.data.transforms.shapes import Reshape as Reshape
from triplane.unified_ir.data.transforms.shapes import Resize as Resize
from triplane.unified_ir.data.transforms.shapes import Transpose as Transpose
from triplane.unified_ir.data.transforms.single import Augmentation as Augmentation
from triplane.unified_ir.data.transforms.values import Cast as Cast
from triplane.unified_ir.data.transforms.values import Clip as Clip
from triplane.unified_ir.data.transforms.values import Normalize as Normalize
from triplane.unified_ir.data.transforms.values import Scale as Scale

TRANSFORMS: Final[Mapping[str, type[RowStep]]] = MappingProxyType(
    {
        "select": Select,
        "drop": Drop,
        "rename": Rename,
        "stack": Stack,
        "concatenate": Concatenate,
        "scale": Scale,
        "normalize": Normalize,
        "cast": Cast,
        "clip": Clip,
        "reshape": Reshape,
        "transpose": Transpose,
        "pad": Pad,
        "center_crop": CenterCrop,
        "resize": Resize,
        "one_hot": OneHot,
        "lookup": Lookup,
        "tokenize": Tokenize,
        "flip": Flip,
        "shift": Shift,
        "rotate": Rotate,
        "random_crop": RandomCrop,
        "erase": Erase,
        "noise": Noise,
        "jitter": Jitter,
    }
)
"""Each step by its name in JSON, which is for ever."""
