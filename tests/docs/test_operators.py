"""docs/operators.md is generated from the table of operators; TRIPLANE_ACCEPT=1 writes it."""

import os
from pathlib import Path

from triplane.unified_ir import ops
from triplane.unified_ir.ops.row import DOMAIN, Op
from triplane.unified_ir.ops.signatures import documentation, signature
from triplane.unified_ir.ops.table import TABLE

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"

HEAD = """# Operators

This page lists every operator of the IR, with the ONNX version that defines it and whether it has a
gradient. It is generated from the table of operators in `unified_ir/ops/`, which has one
[row](glossary.md#row) for each.

{onnx} operators are ONNX's, with the meaning of their newest definition up to ai.onnx 26. {own} are
the IR's own and are written to ONNX files as ONNX operators. {smooth} are differentiable, to any
order.

* *call*: the name in `triplane.unified_ir.ops` with operands and attributes, for operators that are
  called as they are. Operands stand before `/`; what follows `*` is given by name. The others are
  behind functions of `ops` and methods of tensors.
* *since*: the ai.onnx version of the definition.
* *computes*: what one of the IR's own returns. A region is a part of the graph that the node holds.
* *form*: a [primitive](glossary.md#primitive) has a kernel and, where mathematics allows, a
  gradient of its own. A [body](glossary.md#body) is written in terms of other operators, from which
  the rest follows.

[Add an operator](extending/operator.md) shows how to define one.
"""


def lines(rows):
    own = bool(rows[0].domain)
    calls = {v: f"`{n}{signature(v)}`" for n, v in vars(ops).items() if isinstance(v, Op)}
    between = "computes" if own else "since"
    yield f"| operator | call | {between} | form | gradient |"
    yield "|---|---|---|---|---|"
    for row in sorted(rows, key=lambda r: r.name):
        form = "body" if row.body else "primitive"
        gradient = "yes" if row.differentiable else "none"
        said = row.computes if own else row.id.since
        yield f"| {row.name} | {calls.get(row, '')} | {said} | {form} | {gradient} |"


def page():
    rows = list(TABLE.values())
    onnx = [row for row in rows if not row.domain]
    own = [row for row in rows if row.domain == DOMAIN]
    assert len(onnx) + len(own) == len(rows)
    smooth = sum(row.differentiable for row in rows)
    head = HEAD.format(onnx=len(onnx), own=len(own), smooth=smooth)
    parts = [head, "## ONNX's", "\n".join(lines(onnx)), "## The IR's own", "\n".join(lines(own))]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def test_the_page_of_operators_is_the_table():
    if os.environ.get("TRIPLANE_ACCEPT") == "1":
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "run this test with TRIPLANE_ACCEPT=1"


def test_each_operator_of_our_own_says_what_it_computes_and_help_shows_it():
    silent = [row.name for row in TABLE.values() if bool(row.domain) != bool(row.computes)]
    assert silent == []
    assert "min(max(x, low), high)" in documentation(TABLE[DOMAIN, "HardTanh"])
