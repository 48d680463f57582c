"""Notes inform and never decide."""

import logging

from tests.quantize import nets

from triplane.unified_ir.convert.notes import Converted, notes
from triplane.unified_ir.convert.targets import target_row
from triplane.unified_ir.quantize import freeze, scheme


def test_a_note_that_cannot_be_computed_is_a_sentence_and_no_failure(caplog):
    module = nets.lenet()
    converted = Converted(
        module=module,
        entry="absent",
        target=target_row("ort-x64"),
        frozen=freeze(module, "predict"),
        scheme=scheme("u8s8"),
    )
    with caplog.at_level(logging.ERROR):
        first, *_, last = notes(converted)
    assert first.startswith("scheme u8s8: 8-bit weights")
    assert last.startswith("the note on forgotten state could not be computed: InvalidInput: ")
    assert caplog.records[0].part == "the note on forgotten state"
