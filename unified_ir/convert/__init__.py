"""From a module to what other machines run: bundles for nodes, plans for devices, and a report.

`convert` writes a bundle, `export_plan` a plan; `line_chart` and `bar_chart` draw what they cost.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from triplane.unified_ir.convert.conversion import convert
    from triplane.unified_ir.convert.plan import export_plan
    from triplane.unified_ir.convert.report import Report
    from triplane.unified_ir.convert.targets import TARGETS, Target
    from triplane.unified_ir.files.chart import bar_chart, line_chart

_HOMES: Final = {
    "Report": ".report",
    "TARGETS": ".targets",
    "Target": ".targets",
    "bar_chart": "..files.chart",
    "convert": ".conversion",
    "export_plan": ".plan",
    "line_chart": "..files.chart",
}

__all__ = [
    "TARGETS",
    "Report",
    "Target",
    "bar_chart",
    "convert",
    "export_plan",
    "line_chart",
]


def __getattr__(name: str) -> Any:
    """Import the module that owns a public name when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
