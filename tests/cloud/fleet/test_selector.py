import pytest

from triplane.cloud.fleet.selector import Selector
from triplane.proto.errors import InvalidInput


@pytest.mark.parametrize(
    ("text", "labels", "meant"),
    [
        ("all", {}, True),
        (" all ", {"site": "lab"}, True),
        ("site=factory", {"site": "factory"}, True),
        ("site=factory", {"site": "lab"}, False),
        ("site=factory", {}, False),
        ("camera!=old", {"camera": "old"}, False),
        ("camera!=old", {"camera": "new"}, True),
        ("camera!=old", {}, True),
        ("site=factory, camera!=old", {"site": "factory", "camera": "x1"}, True),
        ("site=factory,camera!=old", {"site": "factory", "camera": "old"}, False),
    ],
)
def test_a_selector_means_the_nodes_whose_labels_hold_all_terms(text, labels, meant):
    assert Selector.parse(text).matches(labels) is meant


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "for every node"),
        ("site", "key=value or key!=value, got 'site'"),
        ("site=factory,", "got ''"),
        ("site=a=b", "got 'site=a=b'"),
        ("Site=a", "a label's key"),
        ("site=", "value of label site"),
        ("site=a b", "value of label site"),
        ("a=b," * 400, "at most 1024 characters"),
    ],
)
def test_a_text_that_is_no_selector_is_refused_with_the_term(text, message):
    with pytest.raises(InvalidInput, match=message):
        Selector.parse(text)
