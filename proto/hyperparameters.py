"""Hyperparameters on the wire, by name: most have a field of their own, the rest are in `other`."""

from collections.abc import Mapping
from typing import Final

from triplane.proto import federation_pb2 as pb

OTHER: Final = "other"
FIELDS: Final = frozenset(pb.Hyperparameters.DESCRIPTOR.fields_by_name) - {OTHER}


def values_of(message: pb.Hyperparameters) -> dict[str, float]:
    """Return the values that are set. A field of 0 counts as unset."""
    named = {field.name: value for field, value in message.ListFields() if field.name in FIELDS}
    return {**named, **message.other}


def set_values(message: pb.Hyperparameters, values: Mapping[str, float]) -> None:
    """Set these values, each in its field or in `other`."""
    for name, value in values.items():
        if name in FIELDS:
            number = type(getattr(message, name))  # a count may arrive as 3.0
            setattr(message, name, number(value))
        else:
            message.other[name] = value
