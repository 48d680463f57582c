"""What a box says of one node: operator with its settings, type, and everything in its tip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from triplane.unified_ir.cli.drawing.item import Item
from triplane.unified_ir.ir.graph import Node, Value
from triplane.unified_ir.ir.text import attributes_text

MAX_LINE: Final = 40
"""Characters of a line in a box; longer ones are cut."""
MAX_TIP: Final = 200
"""Characters of a line in a tip."""
MAX_OPERANDS: Final = 32
"""Operands, and results, that a tip lists."""
_SHORT: Final = 24
"""Characters of attributes that fit beside an operator's name."""


def cut(text: str, length: int = MAX_LINE) -> str:
    """Return the text on one line of at most `length` characters, printable ones."""
    if len(text) <= length and text.isprintable():
        return text
    text = "".join(
        c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[: 2 * length]
    )
    return text if len(text) <= length else text[: length - 1] + "\N{HORIZONTAL ELLIPSIS}"


def node_item(
    node: Node, kind: str, place: str, read: Mapping[Value, str], changed: Mapping[Value, str]
) -> Item:
    """Return the box of a node.

    read, changed: names of the state among its operands and of the new state among its results.
    """
    tip = [f"{place}: {node.op}"]
    operands = [v for v in node.inputs[:MAX_OPERANDS] if v is not None]
    tip += [f"reads {read[v]}: {v.type}" if v in read else f"operand {v.type}" for v in operands]
    for value in node.outputs[:MAX_OPERANDS]:
        new = f", the new {changed[value]}" if value in changed else ""
        tip.append(f"gives {value.type}{new}")
    tip += [attributes_text(node.attrs)] if node.attrs else []
    tip += [str(node.meta.location)] if node.meta.location else []
    tip += [f"in {node.meta.scope}"] if node.meta.scope else []
    return Item(
        kind,
        cut(" ".join(filter(None, (node.op.name, settings(node))))),
        cut(str(node.outputs[0].type)),
        tip=tuple(cut(line, MAX_TIP) for line in tip),
    )


def settings(node: Node) -> str:
    """Return window, stride and padding of a node with a window, other attributes if short."""
    if "kernel_shape" not in node.attrs and not node.op.name.startswith("Conv"):
        text = attributes_text(node.attrs)[1:-1]
        return text if len(text) <= _SHORT else ""
    parts = ["\N{MULTIPLICATION SIGN}".join(map(str, _window(node)))]
    for words, name, usual in (
        ("stride", "strides", 1),
        ("pad", "pads", 0),
        ("dilation", "dilations", 1),
        ("groups", "group", 1),
    ):
        value = node.attrs.get(name, usual)
        sizes = value if isinstance(value, tuple) else (value,)
        if any(size != usual for size in sizes):
            same = len(set(sizes)) == 1
            parts.append(f"{words} {sizes[0] if same else ','.join(map(str, sizes))}")
    return ", ".join(filter(None, parts))


def _window(node: Node) -> Sequence[object]:
    shape = node.attrs.get("kernel_shape")
    if isinstance(shape, tuple):
        return shape
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    sizes = getattr(weight.type, "shape", ()) if weight else ()
    # (outputs, inputs, *window) in ONNX, of Conv as of ConvTranspose.
    return sizes[2:]
