"""Names of classes in metadata, also in metadata that another program wrote."""

import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.meta import labels_if_any, labels_of


@pytest.mark.parametrize(
    ("text", "labels"),
    [('["cat", "dog"]', ("cat", "dog")), ("[1, 2]", ("1", "2")), ('{"y": ["a"]}', ()), ("5", ())],
)
def test_a_list_names_classes_and_nothing_else_does(text, labels):
    assert labels_of({"labels": text}) == labels_if_any({"labels": text}) == labels
    assert labels_of({}) == ()


@pytest.mark.parametrize("text", ["cat,dog", "", "[" * 100_000, '["\\ud800", "dog"]'])
def test_a_text_that_is_not_json_is_refused_or_no_names(text):
    with pytest.raises(InvalidInput, match="'labels' must be JSON"):
        labels_of({"labels": text})
    assert labels_if_any({"labels": text}) == ()
