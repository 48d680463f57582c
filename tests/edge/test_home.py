"""`node.json`: what an operator may write there, and what is refused by name."""

import json

import pytest

from triplane.edge.home import NodeHome, NodeSettings
from triplane.proto.errors import Corrupt


@pytest.fixture
def home(tmp_path):
    made = NodeHome(tmp_path / "node")
    made.make()
    return made


def test_settings_come_back_as_they_were_saved(home):
    given = NodeSettings(
        port=0, targets=("ort-x64",), probation_s=1, tls_cert="c", patience_s=2.5, device="cuda"
    )
    home.save_settings(given)
    assert home.settings == given


def test_settings_that_are_left_out_have_their_defaults(home):
    home.settings_file.write_text('{"port": 9001}')
    assert home.settings == NodeSettings(port=9001)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "8001"), ("port", None), ("port", True), ("port", 65536), ("port", -1),
        ("metrics_port", 1.5), ("host", 7), ("host", None), ("targets", "ort-x64"),
        ("targets", [1]), ("probation_s", "long"), ("max_disk_bytes", None), ("tls_cert", 3),
        ("min_bytes_per_s", "1"), ("device", "tpu"), ("device", None), ("device", ["cuda"]),
    ],
)  # fmt: skip
def test_a_setting_of_the_wrong_kind_is_refused_by_name(home, name, value):
    home.settings_file.write_text(json.dumps({name: value}))
    with pytest.raises(Corrupt, match=rf"node\.json cannot be read: {name} is "):
        _ = home.settings


@pytest.mark.parametrize("text", ["", "null", "[]", '{"pork": 1}', "[" * 60_000])
def test_what_is_no_object_of_settings_is_refused(home, text):
    home.settings_file.write_text(text)
    with pytest.raises(Corrupt, match=r"node\.json cannot be read"):
        _ = home.settings
