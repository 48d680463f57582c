"""Samples for training, evaluation and calibration: pipelines from sources to batches.

`Dataset` is a pipeline as a value. Functions of this module begin one: `load` by the name of a
file, `arrays` from memory. Every reader treats its file as hostile: sizes are checked against
limits before any allocation.
"""

from triplane.unified_ir.data.ahead import Loading
from triplane.unified_ir.data.by_name import digits, load, load_both, load_split
from triplane.unified_ir.data.columns import Ragged
from triplane.unified_ir.data.dataset import Dataset, arrays, generated, zipped
from triplane.unified_ir.data.form import from_json

__all__ = [
    "Dataset",
    "Loading",
    "Ragged",
    "arrays",
    "digits",
    "from_json",
    "generated",
    "load",
    "load_both",
    "load_split",
    "zipped",
]
