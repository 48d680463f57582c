"""The common form of two values when a tensor decides between them.

Two tensors of one type become one result. A Python number is promoted to the dtype of the other
side. Equal values and identical objects stay as they are. Any other two values have no common form,
and the error names both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np

from triplane.unified_ir.ir.dims import Expr
from triplane.unified_ir.ir.types import DType, TensorType, bool_, float32, int64, type_of
from triplane.unified_ir.ops.tensor import Tensor


class _Unbound:
    """Marks a variable without a value."""

    def __repr__(self) -> str:
        return "UNBOUND"


UNBOUND: Final = _Unbound()


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for a tensor; `soft` while it held only Python numbers, so its dtype may widen."""

    type: TensorType
    soft: bool = False


class NoCommonForm(Exception):
    """Two values have no common form; the text says what each is."""

    def __init__(self, a: Any, b: Any) -> None:
        super().__init__(f"{describe(a)} and {describe(b)}")
        self.a, self.b = describe(a), describe(b)


def merge(a: Any, b: Any) -> Any:
    """Return the common form of two values: a tree whose varying leaves are `Slot`s."""
    if same(a, b):
        return a
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return {k: merge(a[k], b[k]) for k in a}
    if isinstance(a, (tuple, list)) and type(a) is type(b) and len(a) == len(b):
        return _like(a, map(merge, a, b))
    first, second = slot(a), slot(b)
    if first is None or second is None:
        raise NoCommonForm(a, b)
    return _merged_slots(first, second, a, b)


def _merged_slots(first: Slot, second: Slot, a: Any, b: Any) -> Slot:
    if first.type.shape != second.type.shape:
        raise NoCommonForm(a, b)
    x, y = first.type.dtype, second.type.dtype
    if x == y:
        return Slot(first.type, soft=first.soft and second.soft)
    if first.soft and _promotes(x, y):
        return second
    if second.soft and _promotes(y, x):
        return first
    raise NoCommonForm(a, b)


def _promotes(number: DType, wanted: DType) -> bool:
    """Return whether a Python number of one dtype may become a tensor of the other dtype."""
    # As in numpy (NEP 50), a Python number takes the dtype of the tensor beside it where the kinds
    # allow it: an int any numeric dtype, a float only floating point, a bool only bool.
    if number.kind == "int":
        return wanted.kind in {"int", "uint", "float"}
    return number.kind == wanted.kind


def same(a: Any, b: Any) -> bool:
    """Return whether two values are the same object or tensor, or equal plain constants."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.value is b.value
    if isinstance(a, Slot) and isinstance(b, Slot):
        return a == b
    if isinstance(a, (bool, int, float, str, bytes, Enum, Expr)) and type(a) is type(b):
        # By text, because NaN must equal itself and 0.0 must differ from -0.0.
        return repr(a) == repr(b)
    return False


def slot(x: Any) -> Slot | None:
    """Return the slot a value fills; None if it is no tensor, array or number."""
    if isinstance(x, Slot):
        return x
    if isinstance(x, Tensor):
        return Slot(x.type)
    if isinstance(x, (np.ndarray, np.generic)):
        return Slot(type_of(np.asarray(x)))
    if isinstance(x, Expr):
        return Slot(TensorType(int64, ()), soft=True)
    if isinstance(x, (bool, int, float)):
        dtype = bool_ if isinstance(x, bool) else int64 if isinstance(x, int) else float32
        return Slot(TensorType(dtype, ()), soft=True)
    return None


def varying(value: Any) -> Any:
    """Return the form of a value in which every tensor, array and number is a slot."""
    if isinstance(value, (dict, tuple, list)):
        return _like(value, map(varying, _parts(value)))
    own_slot = slot(value)
    return value if own_slot is None else own_slot


def slots(form: Any) -> list[Slot]:
    """Return the slots of a merged form, in order."""
    return fillers(form, form)


def fillers(form: Any, value: Any) -> list[Any]:
    """Return the values that `value` contributes to the slots of a form it was merged into."""
    if isinstance(form, Slot):
        return [value]
    values = [value[k] for k in form] if isinstance(form, dict) else value
    pairs = zip(parts, values, strict=True) if (parts := _parts(form)) else ()
    return [f for part, v in pairs for f in fillers(part, v)]


def fill_form(form: Any, tensors: list[Tensor]) -> Any:
    """Return the form with its slots replaced by tensors taken from the front of the list."""
    if isinstance(form, Slot):
        return tensors.pop(0)
    if isinstance(form, (dict, tuple, list)):
        return _like(form, [fill_form(v, tensors) for v in _parts(form)])
    return form


def _parts(tree: Any) -> list[Any]:
    """Return the items of a dict, tuple or list; none for a leaf."""
    if isinstance(tree, dict):
        return list(tree.values())
    return list(tree) if isinstance(tree, (tuple, list)) else []


def _like(tree: Any, items: Iterable[Any]) -> Any:
    """Return a dict, tuple or list like `tree` with other items."""
    if isinstance(tree, dict):
        return dict(zip(tree, items, strict=True))
    # A named tuple takes its items as separate arguments.
    return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)


def describe(x: Any) -> str:
    """Describe a value for an error message."""
    if isinstance(x, (Tensor, Slot)):
        return str(x.type)
    if isinstance(x, (np.ndarray, np.generic)):
        return f"the array {type_of(np.asarray(x))}"
    if x is None or isinstance(x, (bool, int, float, str, Expr)):
        return repr(x)
    if isinstance(x, (tuple, list)):
        inner = ", ".join(describe(v) for v in x)
        return f"({inner})" if isinstance(x, tuple) else f"[{inner}]"
    if isinstance(x, dict):
        return "{" + ", ".join(f"{k!r}: {describe(v)}" for k, v in x.items()) + "}"
    return f"a {type(x).__name__}"
