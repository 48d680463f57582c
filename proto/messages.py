"""Messages and dataclasses from values whose attributes have the names of their fields."""

from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)
T = TypeVar("T")


def message_from(kind: type[M], source: object, /, **fields: object) -> M:
    """Return a message whose fields are keywords of this call, or attributes of `source`.

    None leaves a field unset. A field that is neither raises AttributeError, so a new field of the
    message is not forgotten.
    """
    known = {n: getattr(source, n) for n in kind.DESCRIPTOR.fields_by_name if n not in fields}
    return kind(**known, **fields)


def value_from(kind: type[T], source: object, /, **others: object) -> T:
    """Return a dataclass whose fields are keywords of this call, or attributes of `source`."""
    dataclass: Any = kind
    names = [field.name for field in fields(dataclass) if field.name not in others]
    return kind(**{name: getattr(source, name) for name in names}, **others)
