"""Labelled images for training: the type `Dataset`, the included digits, readers with limits.

Every reader treats its file as hostile: sizes are checked against limits before any allocation.
"""

from triplane.unified_ir.data.dataset import Dataset, from_arrays
from triplane.unified_ir.data.source import digits, load, load_split

__all__ = ["Dataset", "digits", "from_arrays", "load", "load_split"]
