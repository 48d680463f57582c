"""`simulate`: what it prints and writes, from a model file and a dataset's name."""

import json
import re

import click
import pytest
from click.testing import CliRunner
from tests.support.digits_model import saved_digits

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli.simulate import simulate
from triplane.unified_ir.federated.algorithms import ALGORITHMS

ARGS = ("--data", "digits", "--partition", "labels", "--population", "6", "--unseen", "0.5",
        "--rounds", "2", "--steps", "1")  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_digits(tmp_path_factory.mktemp("model"))


def run(model, *more):
    return CliRunner().invoke(simulate, [str(model), *ARGS, *more], catch_exceptions=False)


def test_it_compares_algorithms_in_a_table_and_a_page(model, tmp_path):
    out = tmp_path / "study.html"
    made = run(model, "--rate", "0.1", "--rate", "0.3", "--out", str(out))
    assert made.exit_code == 0
    rows = [line.split() for line in made.stdout.splitlines()]
    assert [row[:3] for row in rows[1:5]] == [
        ["fedavg", "3", "training"], ["fedavg", "3", "unseen"],
        ["maml", "3", "training"], ["maml", "3", "unseen"],
    ]  # fmt: skip
    assert [" ".join(row[:2]) for row in rows[5:]] == ["On training", "On unseen"]
    assert "maml round 2/2  loss" in made.stderr
    text = out.read_text()
    assert text.startswith("<!doctype html>")
    assert "<td>rates</td><td>0.1, 0.3</td>" in text
    assert "<td>label shards</td><td>2</td>" in text
    assert "<td>alpha</td>" not in text


@pytest.mark.long
def test_the_first_line_says_where_the_engine_runs(model):
    made = run(model, "--algorithm", "fedavg", "--engine", "xla")
    lines = made.stderr.splitlines()
    assert re.fullmatch(r"engine xla on (CPU, because JAX finds no GPU|.*[1-9].*)", lines[0])
    rows = [line.split()[:3] for line in made.stdout.splitlines()]
    assert ["fedavg", "3", "unseen"] in rows


def test_the_record_is_whole_and_the_same_again(model, tmp_path):
    options = ("--json", "--algorithm", "meta-sgd", "--rate", "0.1", "--folder", str(tmp_path))
    first, second = (json.loads(run(model, *options).stdout) for _ in range(2))
    assert first == second
    (trial,) = first["trials"]
    assert [row["number"] for row in trial["rounds"]] == [1, 2]
    assert {score["samples"] > 0 for score in trial["unseen"]} == {True}
    assert trial["rates"] == {}
    assert (tmp_path / "meta-sgd" / "study.tpc").is_file()


@pytest.mark.slow
def test_all_names_every_algorithm_once(model):
    options = ("--json", "--algorithm", "maml", "--algorithm", "all")
    names = [t["algorithm"] for t in json.loads(run(model, *options).stdout)["trials"]]
    assert names[0] == "maml"
    assert sorted(names) == sorted(ALGORITHMS)


def test_compression_is_by_name(model):
    plain, packed = (
        json.loads(run(model, "--json", "--algorithm", "fedavg", *more).stdout)["trials"][0]
        for more in ((), ("--compression", "top-k", "--keep", "0.1"))
    )
    assert packed["bytes_up"] < plain["bytes_up"] / 3


def test_what_happens_is_told_on_the_way(model, tmp_path):
    options = ("--algorithm", "fedavg", "--rate", "0.3", "--folder", str(tmp_path))
    told = run(model, *options).stderr.splitlines()
    assert told[0] == "3 devices learn, 3 are only scored; each has 299 to 300 samples"
    assert [line.split("  ")[0] for line in told[1:]] == [
        "fedavg scored at the start", "fedavg round 1/2", "fedavg round 2/2",
        "fedavg scored after round 2", "fedavg scored after round 2",
    ]  # fmt: skip
    assert "at rate 0.3" in told[-1]
    again = run(model, *options).stderr.splitlines()
    assert [line.split("  ")[0] for line in again[1:]] == [
        "fedavg scored after round 2",
        f"fedavg was already finished; read from {tmp_path / 'fedavg'}",
    ]  # fmt: skip


def test_a_study_that_goes_on_says_so(model, tmp_path):
    options = ("--algorithm", "fedavg", "--rounds", "6", "--folder", str(tmp_path))
    with pytest.raises(Stopped):
        at_round(3, lambda: run(model, *options))
    told = run(model, *options).stderr
    assert "fedavg continues after round 2\n" in told
    assert "round 2/6" not in told


class Stopped(BaseException):
    """As a signal would."""


def at_round(number, go):
    """Calls `go` and ends it where the study would tell of a round."""
    original = click.echo

    def echo(text, **options):
        if f"round {number}/" in text:
            raise Stopped
        original(text, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(click, "echo", echo)
        go()


DIVERGING = ("--algorithm", "fedavg", "--algorithm", "maml", "--meta-lr", "1e38", "--steps", "3")


@pytest.mark.slow
def test_an_algorithm_that_diverges_is_named_and_others_go_on(model, tmp_path):
    out = tmp_path / "study.html"
    made = run(model, *DIVERGING, "--json", "--out", str(out))
    assert made.exit_code == 2
    record = json.loads(made.stdout)
    assert [trial["algorithm"] for trial in record["trials"]] == ["fedavg"]
    assert list(record["stopped"]) == ["maml"]
    assert "in round 1: " in record["stopped"]["maml"]
    assert "smaller rate" in record["stopped"]["maml"]
    assert "maml stopped: device-" in run(model, *DIVERGING).stdout
    assert "smaller rate" in out.read_text()


def test_more_devices_than_there_are_are_refused_before_the_work(model, monkeypatch):
    monkeypatch.setattr("triplane.unified_ir.cli.simulate._trial", None)
    with pytest.raises(InvalidInput, match="--devices 9 is more than the 3 devices"):
        run(model, "--devices", "9")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--held-out", "1"), "0.0<x<1.0|0<x<1"),
        (("--unseen", "1"), "x<1"),
        (("--keep", "0"), "0<x<=1|0.0<x"),
        (("--rounds", "0"), "x>=1"),
        (("--lr", "-1"), "x>=0"),
        (("--out", "no/such/folder/a.html"), "the folder 'no/such/folder' does not exist"),
    ],
)
def test_options_out_of_range_are_refused_by_name(model, options, said):
    made = run(model, *options)
    assert made.exit_code == 2
    assert f"'{options[0]}'" in made.stderr
    assert re.search(said, made.stderr)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--keep 0.1", "--keep belongs to --compression top-k; add that, or leave it out"),
        ("--keep 0.1 --compression int8", "--keep belongs to --compression top-k"),
        ("--alpha 0.5", "--alpha belongs to --partition dirichlet"),
        ("--partition even --label-shards 3", "--label-shards belongs to --partition labels"),
        ("--least 3", "--least belongs to --group; add --group COLUMN"),
        ("--group person", "--partition divides samples without --group; give one of them"),
        ("--split part", "no column of groups is named"),
    ],
)
def test_an_option_without_effect_is_refused_with_the_way_out(model, options, said):
    with pytest.raises(InvalidInput, match=re.escape(said)):
        run(model, *options.split())


def test_help_tells_the_algorithms_apart():
    text = CliRunner().invoke(simulate, ["--help"], catch_exceptions=False).stdout
    _, _, after = text.partition("Examples:")
    for name in ALGORITHMS:
        assert f"  {name} " in after


def test_the_page_is_not_written_over_the_model(model):
    before = model.read_bytes()
    with pytest.raises(InvalidInput, match="which is an input"):
        run(model, "--out", str(model))
    assert model.read_bytes() == before
