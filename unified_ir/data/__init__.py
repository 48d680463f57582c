"""Labelled images for training: one type, the digits that ship with the package, bounded readers.

Every reader takes its file for hostile: sizes are held to stated limits before anything is made.
"""

from triplane.unified_ir.data.dataset import Dataset, from_arrays
from triplane.unified_ir.data.source import digits, load, load_split

__all__ = ["Dataset", "digits", "from_arrays", "load", "load_split"]
