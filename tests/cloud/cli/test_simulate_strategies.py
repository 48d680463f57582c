"""`federate simulate --strategy`: what it refuses, names, prints and keeps."""

import csv
import importlib.util
import json

import pytest
from click.testing import CliRunner
from tests.support.digits_model import saved_digits

from triplane.cloud.cli.federate import command
from triplane.proto.errors import MissingExtra
from triplane.unified_ir.cli.simulate import simulate as plain

VERB = command.commands["simulate"]
ARGS = ("--data", "digits", "--population", "4", "--rounds", "2", "--steps", "1")
needs_flwr = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None, reason="needs the extra [flower]"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_digits(tmp_path_factory.mktemp("model"))


def run(verb, model, *more):
    return CliRunner().invoke(verb, [str(model), *ARGS, *more], catch_exceptions=False)


def test_without_a_strategy_it_is_the_plain_verb(model):
    ours, theirs = (run(verb, model, "--json", "--algorithm", "fedavg") for verb in (VERB, plain))
    first, second = (json.loads(x.stdout)["trials"][0]["training"] for x in (ours, theirs))
    assert first == second
    lost = run(VERB, model, "--option", "eta=1")
    assert lost.exit_code == 2
    assert "--option belongs to a strategy; name one with --strategy" in lost.output
    lost = run(VERB, model, "--quorum", "0.5")
    assert lost.exit_code == 2
    assert "--quorum belongs to a strategy; name one with --strategy" in lost.output
    assert "NAME=VALUE" in run(VERB, model, "--strategy", "fedavg", "--option", "eta").output


def test_without_flwr_it_names_the_extra_before_it_reads_anything(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"triplane\[flower\]"):
        run(VERB, "absent.tpm", "--strategy", "fedavg")


@pytest.mark.slow
@needs_flwr
def test_results_are_named_by_strategy_and_algorithm(model, tmp_path):
    out, table = tmp_path / "study.html", tmp_path / "scores.csv"
    done = run(
        VERB, model, "--strategy", "fedadam", "--option", "eta=0.02", "--json",
        "--algorithm", "fedavg", "--algorithm", "fomaml", "--out", str(out),
        "--out-csv", str(table), "--folder", str(tmp_path / "kept"),
    )  # fmt: skip
    assert done.exit_code == 0
    names = ["FedAdam over fedavg", "FedAdam over fomaml"]
    assert [trial["algorithm"] for trial in json.loads(done.stdout)["trials"]] == names
    with table.open() as file:
        assert sorted({row["algorithm"] for row in csv.DictReader(file)}) == names
    assert "FedAdam over fomaml round 2/2  loss" in done.stderr
    page = out.read_text()
    assert names[1] in page
    assert "<td>strategy</td><td>FedAdam</td>" in page
    assert "<td>strategy options</td><td>eta=0.02</td>" in page
    assert "<td>server lr</td>" not in page
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == names


@needs_flwr
def test_a_strategy_decides_what_devices_do_unless_the_user_does(model, tmp_path):
    options = ("--strategy", "fed-prox", "--option", "proximal_mu=0.5", "--json")
    page = tmp_path / "study.html"
    (trial,) = json.loads(run(VERB, model, *options, "--out", str(page)).stdout)["trials"]
    assert trial["algorithm"] == "FedProx over fedprox"
    assert "<td>proximal</td><td>0.5</td>" in page.read_text()
    few = (*options, "--option", "fraction_train=0.25", "--quorum", "0.7")
    (trial,) = json.loads(run(VERB, model, *few, "--out", str(page)).stdout)["trials"]
    assert {row["devices"] for row in trial["rounds"]} == {3}
    assert "<td>quorum</td><td>0.7</td>" in page.read_text()
    (trial,) = json.loads(run(VERB, model, *options[:2], "--json", "--algorithm", "maml").stdout)[
        "trials"
    ]
    assert trial["algorithm"] == "FedProx over maml"


@needs_flwr
def test_a_file_of_ones_own_is_in_the_folder_of_the_home(model, tmp_path):
    path = tmp_path / "home" / "strategies" / "mine.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "from flwr.serverapp.strategy import FedMedian\n"
        "def make(**options):\n"
        "    return FedMedian(min_train_nodes=1, min_available_nodes=1, **options)\n"
    )
    path.chmod(0o600)
    options = ("--strategy", "mine:make", "--home", str(tmp_path / "home"), "--json")
    (trial,) = json.loads(run(VERB, model, *options).stdout)["trials"]
    assert trial["algorithm"] == "mine:make over fedavg"
