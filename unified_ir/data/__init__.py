"""Samples for training, evaluation and calibration: pipelines from sources to batches.

`Dataset` is a pipeline as a value. Functions of this module begin one: `load` by the name of a
file, `arrays` from memory. Every reader treats its file as hostile: sizes are checked against
limits before any allocation.
"""

from triplane.unified_ir.data.columns import Ragged
from triplane.unified_ir.data.dataset import Dataset, arrays
from triplane.unified_ir.data.form import from_json
from triplane.unified_ir.data.loader import Loading
from triplane.unified_ir.data.loading import digits, load, load_both, load_split

__all__ = [
    "Dataset",
    "Loading",
    "Ragged",
    "arrays",
    "digits",
    "from_json",
    "load",
    "load_both",
    "load_split",
]
