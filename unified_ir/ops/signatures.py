"""How a row of the table is called: its signature, its help, and its line in the type stub.

Operands are positional. Attributes are keywords; the one attribute of a row that takes a fixed
number of operands may also follow them by position, as in `softmax(x, 1)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from inspect import Parameter, Signature, cleandoc
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ops.source import user_location

if TYPE_CHECKING:
    from triplane.unified_ir.ops.row import AttrSpec, Op

ANY_NUMBER: Final = 2**31 - 1
"""Operands of a variadic row, as ONNX's schemas state it; from here on there is no limit."""

_RENAMED: Final = {"input": "x", "data_0": "data"}
_ELEMENT_TYPES: Final = {"to", "dtype", "output_dtype", "output_datatype"}
"""Attributes that hold the number of an element type."""
_TYPES: Final = {
    "INT": "int",
    "FLOAT": "float",
    "STRING": "str",
    "INTS": "Sequence[int]",
    "FLOATS": "Sequence[float]",
    "STRINGS": "Sequence[str]",
    "TENSOR": "Array",
    "DIMS": "Sequence[Dim]",
    "TYPE_PROTO": "TensorType",
}


def attributes_of(row: Op) -> dict[str, AttrSpec]:
    """Return the attributes that a caller may give, required ones first, then by name."""
    # `full_attrs` leaves out the names of data-dependent sizes, which `Build` chooses.
    specs = {name: row.attr_specs[name] for name in row.full_attrs({})}
    return dict(sorted(specs.items(), key=lambda item: (not item[1].required, item[0])))


def positional_attribute(row: Op) -> str | None:
    """Return the attribute that may follow the operands by position; None if there is none."""
    fewest, most = row.arity
    attributes = attributes_of(row)
    return next(iter(attributes)) if fewest == most and len(attributes) == 1 else None


def arguments(
    row: Op, inputs: Sequence[Any], attrs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return operands and attributes of a call; see the module."""
    by_name = [key for key in attrs if key not in row.attr_specs and key in _operands(row)]
    if by_name:
        place = user_location()
        raise InvalidInput(
            f"{by_name[0]} is an operand of {row}, and operands are passed by position: "
            f"{row}{signature(row)}{f' (at {place})' if place else ''}"
        )
    name, count = positional_attribute(row), row.arity[1]
    if name is None or len(inputs) != count + 1 or name in attrs:
        return inputs, attrs
    return inputs[:count], {**attrs, name: inputs[count]}


def signature(row: Op) -> Signature:
    """Return the signature of a call; defaults of floats are the shortest of equal float32."""
    fewest, most = row.arity
    operands = [
        Parameter(name, Parameter.POSITIONAL_ONLY, default=Parameter.empty if i < fewest else None)
        for i, name in enumerate(_operands(row))
    ]
    if most >= ANY_NUMBER:
        operands[-1] = Parameter(operands[-1].name, Parameter.VAR_POSITIONAL)
    by_position = positional_attribute(row)
    attributes = [
        Parameter(
            name,
            Parameter.POSITIONAL_OR_KEYWORD if name == by_position else Parameter.KEYWORD_ONLY,
            default=Parameter.empty if spec.required else _shortest(spec.default),
        )
        for name, spec in attributes_of(row).items()
    ]
    return Signature([*operands, *attributes])


def counted(row: Op) -> str:
    """Return how many operands the row takes, in words."""
    fewest, most = row.arity
    if most >= ANY_NUMBER:
        return f"at least {fewest} operand{'s' * (fewest != 1)}"
    number = str(most) if fewest == most else f"{fewest} to {most}"
    return f"{number} operand{'s' * (most != 1)}"


def documentation(row: Op) -> str:
    """Return the help of a row: how it is called, then what ONNX's definition says."""
    head = f"{row}{signature(row)}"
    if row.schema is None:
        return f"{head}\n\nReturn {row.computes}.\n\nAn operator that ONNX lacks.\n"
    since = f"ONNX's {row.name} as ai.onnx {row.id.since} defines it:"
    return f"{head}\n\n{since}\n\n{cleandoc(row.schema.doc or '').strip()}\n"


def stub(name: str, row: Op) -> str:
    """Return the definition of a row's function in a type stub."""
    parts = [_stub_of(row, p) for p in signature(row).parameters.values()]
    kinds = [p.kind for p in signature(row).parameters.values()]
    if Parameter.POSITIONAL_ONLY in kinds:
        parts.insert(kinds.count(Parameter.POSITIONAL_ONLY), "/")
    if Parameter.KEYWORD_ONLY in kinds and Parameter.VAR_POSITIONAL not in kinds:
        parts.insert(len(parts) - kinds.count(Parameter.KEYWORD_ONLY), "*")
    return f"def {name}({', '.join(parts)}) -> Tensor: ..."


def _stub_of(row: Op, parameter: Parameter) -> str:
    spec = attributes_of(row).get(parameter.name)
    if spec is None:
        star = "*" * (parameter.kind is Parameter.VAR_POSITIONAL)
        absent = " | None = None" * (parameter.default is None)
        return f"{star}{parameter.name}: TensorLike{absent}"
    type_ = _TYPES[spec.kind] + " | DType" * (parameter.name in _ELEMENT_TYPES)
    if spec.required:
        return f"{parameter.name}: {type_}"
    none = " | None" * (spec.default is None)
    return f"{parameter.name}: {type_}{none} = {_shortest(spec.default)!r}"


def _operands(row: Op) -> list[str]:
    names = (
        [_RENAMED.get(i.name, i.name.lower()) for i in row.schema.inputs]
        if row.schema
        else [f"x{k}" if len(row.operands) > 1 else "x" for k in range(len(row.operands))]
    )
    return list(_distinct(names, attributes_of(row)))


def _distinct(names: Sequence[str], taken: Mapping[str, Any]) -> Iterator[str]:
    for i, name in enumerate(names):
        yield f"{name}_" if name in taken or name in names[:i] else name


def _shortest(default: Any) -> Any:
    """Return a float as the shortest decimal that is the same float32."""
    return float(str(np.float32(default))) if isinstance(default, float) else default


class Described:
    """The attribute of a row that depends on it: its signature or its help."""

    def __init__(self, describe: Any, of_class: Any = None) -> None:
        self._describe, self._of_class = describe, of_class

    def __get__(self, row: Op | None, owner: type) -> Any:
        if row is not None:
            return self._describe(row)
        if self._of_class is None:
            raise AttributeError(f"{owner.__name__} has a signature by row only")
        return self._of_class
