"""How a strategy of Flower is named on the command line."""

import pytest
from click.testing import CliRunner

from triplane.cloud.cli import federate
from triplane.cloud.cli.federate import command


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--option", "eta=1"), "name one with --strategy"),
        (("--app",), "name one with --strategy"),
        (("--strategy", "fedadam", "--option", "eta"), "'eta' is not NAME=VALUE"),
        (("--strategy", "fedadam", "--option", "e ta=1"), "'e ta=1' is not NAME=VALUE"),
    ],
)
def test_options_of_no_strategy_are_told_at_once(words, why, tmp_path):
    found = CliRunner().invoke(command, ["run", "tiny", *words, "--identity", str(tmp_path)])
    assert found.exit_code == 2
    assert why in found.output


def test_an_option_that_is_no_json_is_a_string(monkeypatch, tmp_path):
    """The spec that would be sent, caught where the cloud would be called."""
    sent = []
    monkeypatch.setattr(federate, "_spec", lambda **options: sent.append(options) or 1 / 0)
    words = ["--strategy", "mine", "--app"]
    for option in ("a=1e-3", "b=true", "c=x y", "d=a=b"):
        words += ["--option", option]
    CliRunner().invoke(command, ["run", "tiny", *words, "--identity", str(tmp_path)])
    (options,) = sent
    assert options["strategy_options"] == [
        ("a", "1e-3"), ("b", "true"), ("c", '"x y"'), ("d", '"a=b"'),
    ]  # fmt: skip
    assert (options["strategy"], options["app"]) == ("mine", True)
