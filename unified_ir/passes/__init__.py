"""Passes: rewrites of a function that keep what it computes."""

from triplane.unified_ir.passes.clean import clean, drop_dead, share

__all__ = ["clean", "drop_dead", "share"]
