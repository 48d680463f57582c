"""Every row on XLA: forward, gradient and second order, against the reference engine."""

import numpy as np
import pytest
from tests.conformance import checks
from tests.conformance.rows import NO_RULE_FOR_XLA, REFUSED_BY_XLA, ids
from tests.conformance.uses import differentiable, recorded, uses_of

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines.xla.engine import XlaEngine
from triplane.unified_ir.engines.xla.lower import check, rule_of
from triplane.unified_ir.ops.table import TABLE

EVERY = uses_of()
SLOPED = differentiable()


@pytest.fixture(scope="module", autouse=True)
def started():
    """The driver of a GPU opens files that stay open, which a test would count as leaking."""
    return str(XlaEngine().devices)


def first_short(uses, step):
    """Each row's first use, of every few rows; the others in the long run: compiling takes long."""
    rows = list(dict.fromkeys(str(use.row) for use in uses))[::step]
    short = {f"{row}-0" for row in rows}
    return [u if str(u) in short else pytest.param(u, marks=pytest.mark.long) for u in uses]


@pytest.mark.parametrize("use", first_short(EVERY, 4), ids=ids(EVERY))
def test_xla_agrees_with_reference(use):
    if {str(use), str(use.row)} & REFUSED_BY_XLA:
        checks.xla_refuses_by_name(use)
    else:
        checks.xla_agrees(use)


@pytest.mark.parametrize("use", first_short(SLOPED, 16), ids=ids(SLOPED))
def test_gradients_of_both_orders_agree(use):
    if not {str(use), str(use.row)} & REFUSED_BY_XLA:
        checks.xla_gradients_agree(use)


def test_rows_that_xla_refuses_are_these():
    refused = set()
    for use in EVERY:
        try:
            check(recorded(use, np.float32)[0])
        except InvalidInput:
            refused.add(use)
    by_row = {row: [u for u in EVERY if u.row is row] for row in TABLE.values() if row.samples}
    whole = {str(row) for row, uses in by_row.items() if refused.issuperset(uses)}
    assert whole | {str(u) for u in refused if str(u.row) not in whole} == REFUSED_BY_XLA


def test_rows_without_a_rule_are_these():
    lacking = {
        str(row)
        for row in TABLE.values()
        if rule_of(row) is None and row.body is None and not row.inline_region
    }
    assert lacking == NO_RULE_FOR_XLA
