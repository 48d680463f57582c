"""Messages from values whose attributes have the names of their fields, and the way back."""

from dataclasses import fields
from typing import TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)
V = TypeVar("V")


def message_from(kind: type[M], source: object, **fields: object) -> M:
    """Return a message whose fields are keywords of this call, or attributes of `source`.

    None leaves a field unset. A field that is neither raises AttributeError, so a new field of the
    message is not forgotten.
    """
    known = {n: getattr(source, n) for n in kind.DESCRIPTOR.fields_by_name if n not in fields}
    return kind(**known, **fields)


def value_from(kind: type[V], source: object, **others: object) -> V:
    """Return a dataclass value whose fields are keywords of this call, or attributes of `source`.

    source: a message, or a row of a table.
    """
    names = (field.name for field in fields(kind))  # type: ignore[arg-type]  # a dataclass
    return kind(**{name: getattr(source, name) for name in names if name not in others}, **others)
