"""What a run of a Flower strategy may ask for, checked without flwr."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

from triplane.cloud.federation.flower import spec as flower_spec
from triplane.cloud.federation.flower.spec import SHIPPED, fill_flower, options_of, shipped_row
from triplane.cloud.federation.spec import with_defaults
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import Conflict, InvalidInput, NotFound


def spec(strategy, *, app=False, given=None, **fields):
    options = [pb.Option(name=k, json=json.dumps(v)) for k, v in (given or {}).items()]
    flower = pb.Flower(strategy=strategy, app=app, options=options)
    return pb.Spec(model="tiny", flower=flower, **fields)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """As where flwr is: only its version is asked for."""
    monkeypatch.setattr(flower_spec, "installed_version", lambda: "1.41.0")


def put(folder, name="mine", mode=0o600):
    path = folder / f"{name}.py"
    path.write_text("strategy = None\n")
    path.chmod(mode)
    return path


def test_control_variates_do_not_run_with_a_strategy(tmp_path):
    for name in ("scaffold", "scaffold+adam"):
        with pytest.raises(InvalidInput, match=r"scaffold.* does not run with a strategy"):
            fill_flower(spec("FedAvg", algorithm=name), tmp_path)


def test_flowers_own_are_named_in_any_case_and_say_what_devices_do(tmp_path):
    made = spec("fed-prox", given={"proximal_mu": 0.5})
    fill_flower(made, tmp_path)
    assert (made.flower.strategy, made.flower.version) == ("FedProx", "1.41.0")
    assert (made.algorithm, made.hyperparameters.proximal) == ("fedprox", 0.5)
    assert with_defaults(made).flower == made.flower
    kept = spec("FEDAVG", algorithm="maml")
    fill_flower(kept, tmp_path)
    assert (kept.flower.strategy, kept.algorithm) == ("FedAvg", "maml")


def test_an_operators_file_is_pinned_by_its_bytes(tmp_path):
    path = put(tmp_path)
    made = spec("mine")
    fill_flower(made, tmp_path)
    assert made.flower.strategy == "mine:strategy"
    assert made.flower.sha256 == flower_spec.digest_of(path)


@pytest.mark.parametrize(
    ("asked", "family", "why"),
    [
        (spec("fedxgbbagging"), InvalidInput, "FedXgbBagging cannot run here: .*trees of xgboost"),
        (spec("DifferentialPrivacyClientSideFixedClipping"), InvalidInput, "--app"),
        (spec("fedavg", given={"min_train_nodes": 3}), InvalidInput, "--devices and --quorum"),
        (spec("../mine"), InvalidInput, "NAME:ATTRIBUTE of NAME.py"),
        (spec("yours"), NotFound, "Flower ships Bulyan, .*; .* has mine, open"),
        (spec("open"), Conflict, "users other than the cloud's may write"),
        (spec("fedavg", app=True, compression="int8"), InvalidInput, "is not compressed"),
        (spec("fedadam", hyperparameters=pb.Hyperparameters(server_lr=1)), InvalidInput, "eta"),
        (spec("fedadam", given={"eta": [1]}), InvalidInput, r"option eta is .* got '\[1\]'"),
        (spec("fedadam", given={"eta": "x" * 2000}), InvalidInput, "at most 1000 characters"),
        (spec("fedadam", given={"e t a": 1}), InvalidInput, "'e t a'"),
        (spec("fedadam", given={f"o{k}": k for k in range(65)}), InvalidInput, "at most 64"),
    ],
)
def test_what_cannot_run_is_refused_with_its_reason(asked, family, why, tmp_path):
    put(tmp_path)
    put(tmp_path, "open", 0o666)
    with pytest.raises(family, match=why):
        fill_flower(asked, tmp_path)


def test_numbers_that_json_has_not_are_no_options():
    flower = pb.Flower(options=[pb.Option(name="eta", json="NaN")])
    with pytest.raises(InvalidInput, match="option eta"):
        options_of(flower)


def test_the_table_has_what_flwr_ships():
    strategies = pytest.importorskip("flwr.serverapp.strategy", reason="needs the extra [flower]")
    assert {row.name for row in SHIPPED.values()} == {*strategies.__all__} - {"Result", "Strategy"}
    assert shipped_row("fedavgm") is not None


def test_a_cloud_without_flower_says_what_to_install(monkeypatch):
    monkeypatch.undo()

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(NotFound, match=r"pip install 'triplane\[flower\]'"):
        flower_spec.installed_version()
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.42.0")
    with pytest.raises(Conflict, match=r"need flwr 1.41.\*, the cloud has 1.42.0"):
        flower_spec.installed_version()


def test_an_algorithm_is_not_flower():
    with pytest.raises(InvalidInput, match="--strategy fedavg"):
        with_defaults(pb.Spec(model="tiny", algorithm="flower"))
