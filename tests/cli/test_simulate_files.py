"""`simulate`: seeds, files of results, algorithms of files, warnings in the first line."""

import csv
import importlib
import json
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from triplane.proto.errors import InvalidInput, NotFound, Unavailable
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.cli.simulate import simulate
from triplane.unified_ir.federated.algorithms import ALGORITHMS

OWN = """
from dataclasses import replace
from triplane.unified_ir.federated.algorithms import ALGORITHMS
from triplane.unified_ir.federated.algorithms.hyper import POSITIVE, Hyperparameter
from triplane.unified_ir.federated.core.reduce import ServerOptimizer

def step(x, d, slots, hyper):
    return x + hyper["brake"] * d, ()

number = Hyperparameter("brake", 0.5, POSITIVE, "Share of a mean change that is taken.")
fedavg = ALGORITHMS["fedavg"]
Slow = replace(fedavg, name="slow", server=ServerOptimizer("slow", (), step),
               hyper=(*fedavg.hyper, number))
"""
# Adapting to a single sample, with large steps.
HARMFUL = ("--algorithm=fedavg", "--support=1", "--lr=10", "--steps=5", "--rounds=10")
DEVICES, SAMPLES = 5, 16
NAMES = ["ann", "bob", "Zoë", "d,e", "eve"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and a CSV whose column `who` names the device of each sample."""
    path = tmp_path_factory.mktemp("files")
    nn.seed(1)
    trainer = train.Trainer(nn.Dense(3, 2), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((1, 3), np.float32), np.zeros(1, np.int64))
    trainer.export().save(path / "m.tpm")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(DEVICES * SAMPLES, 3))
    with (path / "d.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["a", "b", "c", "label", "who"])
        for k, row in enumerate(x):
            rows.writerow([*row, int(row.sum() > 0), NAMES[k // SAMPLES]])
    (path / "own.py").write_text(OWN)
    return path


def call(folder, *more):
    return [
        str(folder / "m.tpm"), "--data", str(folder / "d.csv"), "--x", "a,b,c:3", "--y", "label",
        "--group", "who", "--rounds", "2", "--steps", "1", *more,
    ]  # fmt: skip


def run(folder, *more):
    return CliRunner().invoke(simulate, call(folder, *more), catch_exceptions=False)


def test_several_seeds_are_run_and_shown_with_their_spread(folder, tmp_path):
    files = [f"--out-{kind}={tmp_path / kind}" for kind in ("csv", "json")]
    done = run(folder, "--seeds", "2", "--seed", "5", *files, "--folder", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "fedavg seed 6 round 2/2" in done.stderr
    assert " ± " in done.stdout
    record = json.loads((tmp_path / "json").read_text())
    assert [(t["algorithm"], t["seed"]) for t in record["trials"]] == [
        ("fedavg", 5), ("maml", 5), ("fedavg", 6), ("maml", 6)
    ]  # fmt: skip
    with (tmp_path / "csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["seed"] for row in rows} == {"5", "6"}
    # The seed of a study of one seed continues where it was.
    again = run(folder, "--seed", "5", "--folder", str(tmp_path))
    assert "fedavg was already finished" in again.stderr


def test_names_of_groups_are_in_every_file(folder, tmp_path):
    csv_file, json_file, page = (tmp_path / name for name in ("a.csv", "a.json", "a.html"))
    done = run(
        folder, "--algorithm", "fedavg", "--out-csv", str(csv_file), "--out-json", str(json_file),
        "--out", str(page), "--json",
    )  # fmt: skip
    with csv_file.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["device"] for row in rows} == set(NAMES)
    assert json.loads(json_file.read_text()) == json.loads(done.stdout)
    (trial,) = json.loads(done.stdout)["trials"]
    assert {score["device"] for score in trial["training"]} == set(NAMES)
    text = page.read_text()
    assert all(f"<td data-label='device'>{name}</td>" in text for name in NAMES)
    assert "<td>group</td><td>who</td>" in text


@pytest.mark.parametrize("seeds", ["0", "101", "1,", "a", "1,-2", "9" * 30, ""])
def test_seeds_that_are_none_are_refused(folder, seeds):
    done = run(folder, "--seeds", seeds)
    assert done.exit_code == 2
    assert "'--seeds'" in done.stderr


def test_a_list_names_the_seeds(folder):
    done = run(folder, "--seeds", "7,0,7", "--algorithm", "fedavg", "--json")
    assert [t["seed"] for t in json.loads(done.stdout)["trials"]] == [7, 0]


@pytest.mark.slow
def test_an_algorithm_that_diverges_is_named_with_its_seed(folder):
    diverging = ("--meta-lr=3e38", "--steps=5", "--rounds=10", "--seeds=2")
    done = run(folder, *diverging, "--json")
    assert done.exit_code == 2
    record = json.loads(done.stdout)
    assert list(record["stopped"]) == ["maml seed 0", "maml seed 1"]
    assert [(t["algorithm"], t["seed"]) for t in record["trials"]] == [("fedavg", 0), ("fedavg", 1)]
    with pytest.raises(InvalidInput, match="in round "):
        run(folder, *diverging, "--algorithm=maml")


def test_a_warning_is_the_first_line(folder):
    done = run(folder, *HARMFUL)
    first, second, *_ = done.stdout.splitlines()
    assert first.startswith("Adaptation does not help here: fedavg on training devices -")
    assert second.startswith(("The end is ", "algorithm"))
    record = json.loads(run(folder, *HARMFUL, "--json").stdout)
    assert record["warnings"][0].startswith("Adaptation ")


def test_an_algorithm_of_a_file_is_compared_by_name(folder):
    own = f"{folder / 'own.py'}:Slow"
    arguments = ("--algorithm", "fedavg", "--algorithm", own, "--json")
    half, full = (json.loads(run(folder, *arguments, *more).stdout) for more in (
        (), ("--brake", "1")
    ))  # fmt: skip
    names = [trial["algorithm"] for trial in half["trials"]]
    assert names == ["fedavg", "slow"]
    plain, slow = full["trials"]
    assert plain["training"] == slow["training"]
    assert half["trials"][1]["rounds"] != slow["rounds"]
    assert "slow" not in ALGORITHMS


def test_its_numbers_are_in_the_help(folder):
    done = run(folder, f"--algorithm={folder / 'own.py'}:Slow", "--help")
    text = " ".join(done.stdout.split())
    assert "--brake NUMBER Share of a mean change that is taken. [default: 0.5]" in text
    assert "slow" not in ALGORITHMS


def test_a_usage_error_leaves_no_algorithm_behind(folder):
    done = run(folder, "--algorithm", f"{folder / 'own.py'}:Slow", "--brake", "0")
    assert done.exit_code == 2
    assert "'--brake'" in done.stderr
    assert "slow" not in ALGORITHMS


@pytest.mark.parametrize(
    ("name", "content", "error", "said"),
    [
        ("own.py:Fast", OWN, NotFound, "own.py defines no 'Fast'; algorithms there: Slow"),
        ("own.py:step", OWN, InvalidInput, "own.py:step is of type function"),
        ("gone.py:Slow", None, NotFound, "no file .*gone.py"),
        ("bad.py:Slow", "\n1 / 0\n", InvalidInput, "bad.py:2: ZeroDivisionError: "),
        ("bad.py:Slow", "def (", InvalidInput, "bad.py:1: SyntaxError: "),
        ("bad.py:Slow", "import nothing_there", InvalidInput, "bad.py:1: ModuleNotFoundError: "),
        ("bad.py:Slow", "\nraise SystemExit(0)\n", InvalidInput, "bad.py:2: SystemExit: 0"),
        ("own.py:Slow", OWN.replace('"slow", server', '"all", server'), InvalidInput, "'all'"),
        ("own.py:Slow", OWN.replace('"slow", server', "None, server"), InvalidInput, "got None"),
        ("own.py:Slow", OWN.replace('"brake"', '"rounds"'), InvalidInput, "an option of this"),
        ("own.py:Slow", OWN.replace('"brake"', '"way"'), InvalidInput, "an option of this"),
        ("own.py:Slow", OWN.replace('"brake"', '"help"'), InvalidInput, "an option of this"),
        ("own.py:Slow", OWN.replace('"brake"', '"a b"'), InvalidInput, "a hyperparameter's name"),
        ("own.py:Slow", OWN.replace('hyper["b', 'hyper["x'), InvalidInput, "own.py:8: KeyError"),
        (
            "own.py:Slow",
            OWN.replace("server=", "gradient=lambda of, k: None, server="),
            InvalidInput,
            "the gradient of slow must be a Function, got NoneType",
        ),
    ],
)
def test_a_file_that_gives_no_algorithm_is_refused(folder, tmp_path, name, content, error, said):
    if content is not None:
        (tmp_path / name.partition(":")[0]).write_text(content)
    with pytest.raises(error, match=said):
        run(folder, "--algorithm", str(tmp_path / name))


def test_what_a_file_prints_is_no_part_of_the_json(folder, tmp_path):
    loud = OWN.replace("    return x +", "    print('hello')\n    return x +")
    (tmp_path / "loud.py").write_text(f"print('begin')\n{loud}")
    done = run(folder, "--algorithm", f"{tmp_path / 'loud.py'}:Slow", "--json")
    assert json.loads(done.stdout)["trials"]
    assert done.stderr.index("begin") < done.stderr.index("hello")


@pytest.mark.parametrize("name", ["json", "csv", "numpy", "types"])
def test_a_file_may_have_the_name_of_a_library(folder, tmp_path, name, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "csv", raising=False)
    (tmp_path / f"{name}.py").write_text(OWN)
    done = run(folder, "--algorithm", f"{tmp_path / name}.py:Slow", "--json")
    assert done.exit_code == 0, done.output
    assert str(tmp_path) not in str(importlib.import_module(name))


def test_an_algorithm_of_a_file_may_have_adam_on_the_cloud(folder):
    own = f"{folder / 'own.py'}:Slow"
    done = run(folder, "--algorithm", f"{own}+adam", "--algorithm", own, "--json")
    trials = json.loads(done.stdout)["trials"]
    assert [trial["algorithm"] for trial in trials] == ["slow+adam", "slow"]
    assert trials[0]["rounds"][1]["loss"] != trials[1]["rounds"][1]["loss"]


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_file_that_cannot_be_written_costs_no_other_result(folder, tmp_path, form):
    too_long, csv_file = (tmp_path / name for name in ("a" * 255, "a.csv"))
    arguments = ("--algorithm=fedavg", "--out", str(too_long), "--out-csv", str(csv_file), *form)
    done = CliRunner().invoke(simulate, call(folder, *arguments))
    assert isinstance(done.exception, Unavailable)
    assert csv_file.read_text().startswith("algorithm,")
    assert bool(done.stdout) is not bool(form)


def test_two_files_of_results_have_two_names(folder, tmp_path):
    with pytest.raises(InvalidInput, match="--out-csv and --out-json are both"):
        run(folder, "--out-csv", str(tmp_path / "a"), "--out-json", str(tmp_path / "a"))


def test_a_result_does_not_replace_the_file_of_an_algorithm(folder):
    own = folder / "own.py"
    with pytest.raises(InvalidInput, match=r"--out-csv is .*own.py, which is an input"):
        run(folder, f"--algorithm={own}:Slow", "--out-csv", str(own))
    assert own.read_text() == OWN


def test_a_seed_that_cannot_divide_the_samples_costs_no_other_seed(folder, tmp_path):
    rows = [f"{k % 2},{k if k < 4 else 0},0,{k % 2}" for k in range(40)]
    (tmp_path / "equal.csv").write_text("\n".join(["a,b,c,label", *rows]))
    arguments = [
        str(folder / "m.tpm"), "--data", str(tmp_path / "equal.csv"), "--x", "a,b,c:3", "--y",
        "label", "--population", "6", "--rounds", "1", "--steps", "1", "--algorithm", "fedavg",
        "--seeds", "3", "--json",
    ]  # fmt: skip
    done = CliRunner().invoke(simulate, arguments)
    record = json.loads(done.stdout)
    assert [trial["seed"] for trial in record["trials"]] == [0, 2]
    assert "samples of device-" in record["stopped"]["seed 1"]
    assert done.exit_code == 2
    with pytest.raises(InvalidInput, match="are equal"):
        CliRunner().invoke(simulate, [*arguments, "--seed=1"], catch_exceptions=False)
