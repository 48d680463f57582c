"""From a module to what other machines run: bundles for nodes, plans for devices, and a report.

`convert` writes a bundle, `export_plan` a plan; `with_pipeline` lets a model take raw samples;
`line_chart` and `bar_chart` draw what they cost.
"""

from typing import TYPE_CHECKING

from triplane.proto.lazy import lazy_names

if TYPE_CHECKING:
    from triplane.unified_ir.convert.conversion import convert as convert
    from triplane.unified_ir.convert.plan import export_plan as export_plan
    from triplane.unified_ir.convert.preprocessing import with_pipeline as with_pipeline
    from triplane.unified_ir.convert.preprocessing import with_preprocessing as with_preprocessing
    from triplane.unified_ir.convert.report import Report as Report
    from triplane.unified_ir.convert.targets import TARGETS as TARGETS
    from triplane.unified_ir.convert.targets import Target as Target
    from triplane.unified_ir.files.chart import bar_chart as bar_chart
    from triplane.unified_ir.files.chart import line_chart as line_chart

__getattr__, __dir__, __all__ = lazy_names(__name__)
