import contextlib

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.cloud.cli.options import DIGEST, DURATION, LABEL, MOST_WAVES, SHARE, WAVES

KINDS = (DIGEST, DURATION, LABEL, SHARE, WAVES)


@pytest.mark.parametrize(
    ("kind", "given", "value"),
    [
        (SHARE, "95%", 0.95),
        (SHARE, "0%", 0.0),
        (SHARE, "12.5%", 0.125),
        (DURATION, "90", 90.0),
        (DURATION, "90s", 90.0),
        (DURATION, "1.5 h", 5400.0),
        (DURATION, "10min", 600.0),
        (DURATION, "7d", 604_800.0),
        (WAVES, "5%,25%,100%", (("percent", 5.0), ("percent", 25.0), ("percent", 100.0))),
        (WAVES, "1, 100%", (("nodes", 1), ("percent", 100.0))),
        (LABEL, "site=a=b", ("site", "a=b")),
        (LABEL, "site=", ("site", "")),
        (DIGEST, "AB" * 32, "ab" * 32),
    ],
)
def test_what_is_taken(kind, given, value):
    taken = kind.convert(given, None, None)
    assert taken == value
    assert kind.convert(taken, None, None) == value


@pytest.mark.parametrize(
    ("kind", "given", "way_out"),
    [
        (SHARE, "0.95", "write it as 95%"),
        (SHARE, "101%", "write it as 95%"),
        (DURATION, "10m", "90s, 10min, 2h or 7d"),
        (DURATION, "-1", "90s, 10min, 2h or 7d"),
        (DURATION, "1e99", "90s, 10min, 2h or 7d"),
        (WAVES, "", "5%,25%,100%"),
        (WAVES, "0%", "5%,25%,100%"),
        (WAVES, "0", "5%,25%,100%"),
        (WAVES, "101%", "5%,25%,100%"),
        (WAVES, "1," * MOST_WAVES + "1", "at most 100"),
        (LABEL, "site", "site=factory"),
        (LABEL, "=x", "site=factory"),
        (DIGEST, "ab" * 31, "all 64 hexadecimal digits"),
        (DIGEST, "xy" * 32, "all 64 hexadecimal digits"),
    ],
)
def test_what_is_refused_with_the_way_out(kind, given, way_out):
    with pytest.raises(click.BadParameter, match=way_out):
        kind.convert(given, None, None)


@given(st.sampled_from(KINDS), st.text(max_size=30))
def test_any_text_is_a_value_or_a_usage_error(kind, text):
    with contextlib.suppress(click.BadParameter):
        kind.convert(text, None, None)
