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


class Sent(Exception):
    """What the command would have sent."""


def test_an_option_that_is_no_json_is_a_string(monkeypatch, tmp_path):
    def told(**options):
        raise Sent(options)

    monkeypatch.setattr(federate, "_spec", told)
    words = ["--strategy", "mine", "--app"]
    for option in ("a=1e-3", "b=true", "c=x y", "d=a=b"):
        words += ["--option", option]
    argv = ["run", "tiny", *words, "--identity", str(tmp_path)]
    with pytest.raises(Sent) as sent:
        CliRunner().invoke(command, argv, catch_exceptions=False)
    (options,) = sent.value.args
    assert options["strategy_options"] == [
        ("a", "1e-3"), ("b", "true"), ("c", '"x y"'), ("d", '"a=b"'),
    ]  # fmt: skip
    assert (options["strategy"], options["app"]) == ("mine", True)
