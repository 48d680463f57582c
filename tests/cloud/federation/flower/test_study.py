"""Studies whose cloud's step is a strategy of Flower, against our own reduction and a real run."""

import asyncio
import importlib.util
import textwrap

import numpy as np
import pytest
from tests.cloud.federation import given as clouds
from tests.device.devices import cloud_of
from tests.federated.study import given
from tests.support.deadlines import within
from tests.support.liars import LyingServer, scaled

from triplane.cloud.federation.flower import spec as flower_spec
from triplane.cloud.federation.flower.study import FlowerServer
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import Conflict, InvalidInput, MissingExtra, NotFound, Unavailable
from triplane.unified_ir.convert.conversion import read_model
from triplane.unified_ir.federated.algorithms import (
    Algorithm,
    Hyper,
    Robustness,
    module_of,
    registered,
)
from triplane.unified_ir.federated.algorithms.table import ALGORITHMS
from triplane.unified_ir.federated.core.reduce import ServerOptimizer
from triplane.unified_ir.federated.study import Study, simulate

DEADLINE_S = 120.0
HYPER = {"lr": 0.2, "meta_lr": 0.1, "inner_steps": 2}
needs_flwr = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None, reason="needs the extra [flower]"
)


def server(folder, name, **options):
    return FlowerServer(name, options, strategies=folder)


def written(folder, text, name="mine"):
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(text))
    path.chmod(0o600)
    return path


def run(study, server=None, **options):
    return simulate(given.module(), given.shards(), study, server=server, **options)


def assert_near(ours, theirs):
    assert ours.state.keys() == theirs.state.keys()
    for name, x in ours.state.items():
        assert theirs.state[name].dtype == x.dtype
        np.testing.assert_allclose(theirs.state[name], x, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.slow
@needs_flwr
@pytest.mark.parametrize("options", [{}, {"compression": "int8"}, {"devices": 2}])
def test_fedavg_of_flower_ends_where_ours_does(tmp_path, options):
    study = given.study(evaluate_every=2, **options)
    ours, theirs = run(study), run(study, server(tmp_path, "fedavg"))
    assert_near(ours, theirs)
    assert theirs.algorithm == "FedAvg over fedavg"
    assert [(r.devices, r.bytes_up) for r in ours.rounds] == [
        (r.devices, r.bytes_up) for r in theirs.rounds
    ]
    assert [s.device for s in ours.scores] == [s.device for s in theirs.scores]


@needs_flwr
def test_fedadam_of_flower_ends_where_ours_does(tmp_path):
    """Without decay: Flower corrects its rate for bias, algorithm 2 of the paper does not."""
    hyper = Hyper(**HYPER, server_lr=0.03, beta1=0, beta2=0, floor=0.01)
    ours = run(given.study("fedadam", hyper=hyper))
    adam = server(tmp_path, "fedadam", eta=0.03, beta_1=0.0, beta_2=0.0, tau=0.01)
    assert_near(ours, run(given.study(), adam))


def _momentum(x, d, slots, _hyper):
    (v,) = slots
    v = 0.8 * v.astype(np.float64) + d
    return x + v, (v,)


@pytest.mark.slow
@needs_flwr
def test_fedavgm_of_flower_ends_where_a_row_with_momentum_does(tmp_path):
    base = ALGORITHMS["fedavg"]
    names = {name: getattr(base, name) for name in base.__dataclass_fields__}
    optimizer = ServerOptimizer("momentum", ("v",), _momentum)
    with registered(Algorithm(**{**names, "name": "heavy", "server": optimizer})):
        ours = run(given.study("heavy"))
    theirs = run(given.study(), server(tmp_path, "fedavgm", server_momentum=0.8))
    assert_near(ours, theirs)


LEARNING = """
    from flwr.serverapp.strategy import FedAvgM

    class Learning(FedAvgM):
        "Asks half of the devices, and damps its momentum by how they did."

        def __init__(self):
            super().__init__(
                fraction_train=0.5, min_train_nodes=1, min_available_nodes=1, server_momentum=0.9
            )
            self.rounds = []

        def aggregate_train(self, server_round, replies):
            self.rounds.append(server_round)
            return super().aggregate_train(server_round, replies)

        def aggregate_evaluate(self, server_round, replies):
            replies = list(replies)
            assert self.rounds == list(range(1, server_round + 1))
            self.server_momentum *= sum(dict(r.content["metrics"])["accuracy"] for r in replies) / 9
            return super().aggregate_evaluate(server_round, replies)

    strategy = Learning
"""


@needs_flwr
def test_a_quorum_is_that_of_a_run(tmp_path):
    few = FlowerServer("fedavg", {"fraction_train": 0.25}, strategies=tmp_path, quorum=0.7)
    assert [row.devices for row in run(given.study(rounds=2), few).rounds] == [3, 3]
    assert few.facts["quorum"] == "0.7"
    one = server(tmp_path, "fedavg", fraction_train=0.25)
    assert [row.devices for row in run(given.study(rounds=1), one).rounds] == [1]
    written(tmp_path, LEARNING)
    half = FlowerServer("mine", strategies=tmp_path, quorum=0.7)
    rule = "asks 2 of 4 devices, a round needs 3 updates; give a smaller --quorum"
    with pytest.raises(InvalidInput, match=rule):
        run(given.study(rounds=1), half)


@pytest.mark.slow
@needs_flwr
def test_a_strategy_of_ones_own_draws_learns_and_resumes_to_the_same_bits(tmp_path):
    written(tmp_path, LEARNING)
    every = {"evaluate_every": 2, "rounds": 6}
    whole, again = (run(given.study(**every), server(tmp_path, "mine")) for _ in range(2))
    assert whole.algorithm == "mine:strategy over fedavg"
    assert [row.devices for row in whole.rounds] == [2] * 6
    for rounds in (4, 6):
        options = given.study(**every | {"rounds": rounds})
        part = run(options, server(tmp_path, "mine"), folder=tmp_path / "study")
    for trial in (again, part):
        for name, x in whole.state.items():
            np.testing.assert_array_equal(trial.state[name], x)
    other = run(given.study(**every, seed=5), server(tmp_path, "mine"))
    assert any((other.state[k] != x).any() for k, x in whole.state.items())


@pytest.mark.slow
@needs_flwr
def test_an_error_of_a_strategy_stops_the_study_with_its_file_and_line(tmp_path):
    written(
        tmp_path,
        """
        from flwr.serverapp.strategy import FedAvg

        class Failing(FedAvg):
            def aggregate_train(self, server_round, replies):
                if server_round == 2:
                    raise ValueError("it is over")
                return super().aggregate_train(server_round, replies)

        strategy = Failing(min_train_nodes=1, min_available_nodes=1)
        wants_five = FedAvg(min_available_nodes=5)
        asks_nobody = FedAvg(fraction_train=0.0)
        """,
    )
    with pytest.raises(InvalidInput, match=r"raised ValueError \(mine.py:7\): it is over"):
        run(given.study(), server(tmp_path, "mine"))
    with pytest.raises(InvalidInput, match=r"asks 0 of 4 devices, a round needs 1 updates$"):
        run(given.study(), server(tmp_path, "mine:asks_nobody"))
    with pytest.raises(Unavailable, match="waits for more than the 4 devices of round 1"):
        run(given.study(), server(tmp_path, "mine:wants_five"))
    old = server(tmp_path, "mine")
    written(tmp_path, "strategy = 1")
    with pytest.raises(Conflict, match=r"mine.py has changed since the run began"):
        run(given.study(), old)


@needs_flwr
def test_a_study_says_which_strategies_and_options_it_does_not_take(tmp_path):
    for name, why in {
        "FedXgbBagging": "cannot run here: .*trees of xgboost",
        "DifferentialPrivacyClientSideFixedClipping": "clip .*ClientApp.*`triplane federate run`",
    }.items():
        with pytest.raises(InvalidInput, match=why):
            server(tmp_path, name)
    with pytest.raises(InvalidInput, match="min_train_nodes is set by the run"):
        server(tmp_path, "fedavg", min_train_nodes=2)
    with pytest.raises(NotFound, match="no strategy 'mine'"):
        server(tmp_path, "mine")
    with pytest.raises(InvalidInput, match=r"FedAdam does not accept the options \['lr'\]"):
        run(given.study(), server(tmp_path, "fedadam", lr=0.1))
    with pytest.raises(InvalidInput, match="server_lr applies to our own optimizers"):
        run(given.study(hyper=Hyper(**HYPER, server_lr=0.5)), server(tmp_path, "fedavg"))


@needs_flwr
def test_fedprox_has_devices_add_its_term(tmp_path):
    prox = server(tmp_path, "fedprox", proximal_mu=0.5)
    assert prox.algorithm == "fedprox"
    assert prox.hyper("fedprox", {"lr": 0.1}) == {"lr": 0.1, "proximal": 0.5}
    hyper = Hyper(**HYPER, proximal=0.5)
    ours = run(given.study("fedprox", hyper=hyper))

    async def notebook():
        """Within a running event loop."""
        return run(given.study("fedprox", hyper=hyper), prox)

    assert_near(ours, asyncio.run(notebook()))


def test_without_flwr_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"pip install 'triplane\[flower\]'"):
        server(tmp_path, "fedavg")


def test_a_changed_file_option_or_release_of_flwr_makes_another_study(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(flower_spec, "installed_version", lambda: "1.41.0")
    path = written(tmp_path, "strategy = None")
    facts = server(tmp_path, "mine", eta=1).facts
    assert facts["strategy"] == "mine:strategy"
    assert facts["flwr"] == "1.41.0"
    assert server(tmp_path, "mine", eta=1).facts == facts
    assert server(tmp_path, "mine", eta=2).facts != facts
    path.write_text("strategy = 1")
    assert server(tmp_path, "mine", eta=1).facts != facts


@pytest.mark.slow
@needs_flwr
@pytest.mark.parametrize("algorithm", ["fedavg", "maml"])
def test_a_study_predicts_a_run_of_the_same_strategy_over_grpc_to_the_bit(tmp_path, algorithm):
    names = ("ann", "bob", "cy")
    adam = pb.Flower(strategy="fedadam", options=[pb.Option(name="eta", json="0.05")])
    request = clouds.start_request(
        algorithm=algorithm, flower=adam, rounds=3, cohort={"devices": len(names)}
    )

    async def story():
        async with cloud_of(tmp_path) as cloud:
            devices = await clouds.devices_of(cloud, tmp_path, names)
            async with clouds.living(devices):
                begun = await cloud.federation.begin(request, by="operator")
                ended = await clouds.ended(cloud, begun.id)
            assert ended.phase == pb.Run.DONE, ended.reason
            version = await cloud.registry.version(ended.result)
            return read_model(cloud.blobs.find(version.blob))[0]

    theirs = within(story(), DEADLINE_S)
    (tmp_path / "source.tpm").write_bytes(clouds.model_bytes(tmp_path))
    module, _ = read_model(tmp_path / "source.tpm")
    shards = {name: clouds.shard(number) for number, name in enumerate(names)}
    study = Study(algorithm=algorithm, rounds=3, steps=3, batch_size=8, support=6, query=6, seed=7)
    trial = simulate(module, shards, study, server=server(tmp_path, "fedadam", eta=0.05))
    ours = module_of(module, algorithm, study.hyper, dict(trial.state))
    for name in trial.state:
        np.testing.assert_array_equal(
            ours.state[name].array, theirs.state[name].array, err_msg=name
        )


@pytest.mark.long
@needs_flwr
def test_a_change_is_scaled_before_the_strategy_sees_it(tmp_path):
    def lied(study, strategy=None, by=5.0):  # what is ten times too long ours leaves out
        return run(study, LyingServer({"device-1"}, scaled(by), server=strategy))

    ours, theirs = (lied(given.study(), x) for x in (None, server(tmp_path, "fedavg")))
    assert_near(ours, theirs)
    assert [r.scaled for r in theirs.rounds] == [1] * len(theirs.rounds)
    off = given.study(robustness=Robustness(norm_bound="off"), rounds=1)
    free = lied(off, server(tmp_path, "fedavg"), by=1e6)
    assert max(float(np.abs(x).max()) for x in free.state.values()) > 1e3


@needs_flwr
def test_a_private_strategy_has_no_bound_that_depends_on_other_updates(tmp_path):
    spec = pb.Spec(
        model="m", flower=pb.Flower(strategy="DifferentialPrivacyServerSideFixedClipping")
    )
    flower_spec.fill_flower(spec, tmp_path)
    assert spec.robustness.norm_bound == "off"
    spec.robustness.norm_bound = "adaptive"
    with pytest.raises(InvalidInput, match="no private strategy"):
        flower_spec.fill_flower(spec, tmp_path)
