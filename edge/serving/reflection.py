"""Reflection under the protocol's own names, from a private descriptor pool.

Only in this pool our schema is in the package `inference`. The process-wide pool does not have that
name, so a client library that declares it can be used in the same process.
"""

from collections.abc import Iterable
from typing import Final

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from triplane.proto import open_inference_pb2 as pb

WIRE_PACKAGE: Final = "inference"


def wire_schema() -> FileDescriptorProto:
    """Return our schema with every name moved to the protocol's package."""
    schema = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(schema)
    _move(schema, f".{schema.package}.", f".{WIRE_PACKAGE}.")
    schema.package = WIRE_PACKAGE
    schema.name = "inference/open_inference.proto"
    return schema


def _move(schema: FileDescriptorProto, old: str, new: str) -> None:
    """Rewrite every reference to a type: `.package.Name` of fields and methods."""
    messages = [*schema.message_type]
    while messages:
        message = messages.pop()
        messages.extend(message.nested_type)
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(old, new, 1)
    for service in schema.service:
        for method in service.method:
            method.input_type = method.input_type.replace(old, new, 1)
            method.output_type = method.output_type.replace(old, new, 1)


def private_pool(others: Iterable[FileDescriptor]) -> DescriptorPool:
    """Return a pool of the wire schema and `others`, which are files without imports."""
    pool = DescriptorPool()
    pool.AddSerializedFile(wire_schema().SerializeToString())
    for file in others:
        pool.AddSerializedFile(file.serialized_pb)
    return pool
