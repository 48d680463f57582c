"""Post-training quantization: float functions become functions in Q/DQ form.

The steps, in order: `freeze`, `find_sites`, `observe`, `insert`, `noise`. Nothing here writes files
or judges the result: that is `convert`.
"""

from triplane.unified_ir.passes.frozen import Frozen, expanded, freeze
from triplane.unified_ir.quantize.artifact import Artifact, artifact
from triplane.unified_ir.quantize.insert import insert, site_ranges
from triplane.unified_ir.quantize.noise import noise
from triplane.unified_ir.quantize.observe import Samples, batches, observe
from triplane.unified_ir.quantize.scheme import SCHEMES, Range, Scheme, scheme
from triplane.unified_ir.quantize.sites import IN_PARTS, Sites, find_sites

__all__ = [
    "IN_PARTS",
    "SCHEMES",
    "Artifact",
    "Frozen",
    "Range",
    "Samples",
    "Scheme",
    "Sites",
    "artifact",
    "batches",
    "expanded",
    "find_sites",
    "freeze",
    "insert",
    "noise",
    "observe",
    "scheme",
    "site_ranges",
]
