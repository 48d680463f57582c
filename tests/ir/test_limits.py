"""The limits that the documentation states are the limits in force."""

from pathlib import Path

from triplane.unified_ir.files.manifest import MAX_FILE_BYTES
from triplane.unified_ir.ir import dims, limits
from triplane.unified_ir.ir.encode import FORMAT_VERSION, MAX_INLINE_BYTES
from triplane.unified_ir.ir.types import MAX_RANK

DOCS = (Path(__file__).parents[2] / "docs" / "ir.md").read_text("utf-8")


def test_documented_limits_are_those_in_force():
    for words in (
        f"{limits.MAX_MODULE_BYTES >> 20} MiB, {limits.MAX_MESSAGES:,} messages",
        f"messages, {limits.MAX_FIELDS:,} fields",
        f"| nodes of a module, regions included | {limits.MAX_NODES:,} |",
        f"state tensors | {limits.MAX_STRINGS:,}; {limits.MAX_TYPES:,} each |",
        f"| regions inside one another | {limits.MAX_REGION_DEPTH} |",
        f"| functions | {limits.MAX_FUNCTIONS:,} |",
        f"parameters or results of a function | {limits.MAX_OPERANDS:,} |",
        f"| {MAX_RANK}; 2^{dims.MAX_DIM.bit_length() - 1} |",
        f"| slices of an operand, over all its axes | {limits.MAX_SLICES:,} |",
        f"| {limits.MAX_NAME_BYTES} bytes; {limits.MAX_STRING_BYTES >> 10} KiB |",
        f"{dims.MAX_EXPRESSION_CHARS} characters; {limits.MAX_DIMS_CHARS >> 10} Ki characters",
        f"{dims.MAX_TERMS} terms of degree {dims.MAX_DEGREE}, {dims.MAX_NESTING} floor divisions",
        f"constants above {MAX_INLINE_BYTES >> 10} KiB",
        f"The format is version {FORMAT_VERSION}.",
    ):
        assert words in DOCS, words
    assert MAX_FILE_BYTES == limits.MAX_TENSOR_BYTES == 2**32 - 1
