"""Passes: functions of a function that keep its meaning."""

from triplane.unified_ir.passes.clean import clean, drop_dead, share

__all__ = ["clean", "drop_dead", "share"]
