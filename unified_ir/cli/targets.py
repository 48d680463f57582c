"""The option `--target`, whose help lists the targets of the converter."""

from __future__ import annotations

from typing import Final

import click

ROWS: Final = "TARGET_ROWS"
"""Stands for all targets in the help of the option."""


class TargetOption(click.Option):
    """An option for the name of a target; the table is imported when its help is asked for."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """See `click.Option`."""
        from triplane.unified_ir.convert.targets import TARGETS

        rows = ", ".join(f"{row.name} ({row.summary})" for row in TARGETS.values())
        self.help = (self.help or "").replace(ROWS, rows)
        return super().get_help_record(ctx)
