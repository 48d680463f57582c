"""The tables of docs/data.md are those of the product; TRIPLANE_ACCEPT=1 writes them."""

import inspect
from dataclasses import MISSING, fields

import pytest
from tests.support.pages import check_table

from triplane.unified_ir.data.registry import SOURCES, STEPS


def signature(kind):
    """Return the fields of a source or step, those with defaults as name=default."""
    parts = [f.name if f.default is MISSING else f"{f.name}={f.default!r}" for f in fields(kind)]
    return ", ".join(parts)


@pytest.mark.parametrize(("name", "table"), [("sources", SOURCES), ("steps", STEPS)])
def test_the_page_lists_all(name, table):
    rows = [
        (f"`{key}`", f"`{signature(kind)}`" if fields(kind) else "",
         (inspect.getdoc(kind) or "").partition("\n")[0].replace("|", "\\|"))
        for key, kind in table.items()
    ]  # fmt: skip
    check_table("data.md", name, ("in JSON", "fields", "what it is"), rows)
