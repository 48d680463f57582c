"""Post-training quantization: float functions become functions in Q/DQ form.

The steps, in order: `freeze`, `find_sites`, `observe`, `insert`, `noise`. Nothing here writes files
or judges the result; `convert` does.
"""

from triplane.proto.lazy import public_names as _public_names
from triplane.unified_ir.passes.frozen import Frozen as Frozen
from triplane.unified_ir.passes.frozen import expanded as expanded
from triplane.unified_ir.passes.frozen import freeze as freeze
from triplane.unified_ir.quantize.artifact import Artifact as Artifact
from triplane.unified_ir.quantize.artifact import artifact as artifact
from triplane.unified_ir.quantize.insert import insert as insert
from triplane.unified_ir.quantize.insert import site_ranges as site_ranges
from triplane.unified_ir.quantize.noise import noise as noise
from triplane.unified_ir.quantize.observe import Samples as Samples
from triplane.unified_ir.quantize.observe import batches as batches
from triplane.unified_ir.quantize.observe import observe as observe
from triplane.unified_ir.quantize.scheme import SCHEMES as SCHEMES
from triplane.unified_ir.quantize.scheme import Range as Range
from triplane.unified_ir.quantize.scheme import Scheme as Scheme
from triplane.unified_ir.quantize.scheme import scheme as scheme
from triplane.unified_ir.quantize.sites import IN_PARTS as IN_PARTS
from triplane.unified_ir.quantize.sites import Sites as Sites
from triplane.unified_ir.quantize.sites import find_sites as find_sites

__all__ = list(_public_names(globals()))
