"""An algorithm of the user's own is offered by name while it is registered."""

from dataclasses import replace

import numpy as np
import pytest
from tests.federated.study.given import HYPER, bits, module, shards, study

from triplane.proto.errors import Conflict, InvalidInput
from triplane.unified_ir.federated.algorithms import ALGORITHMS, Hyper, algorithm, registered
from triplane.unified_ir.federated.algorithms.hyper import DECAY, POSITIVE, Hyperparameter
from triplane.unified_ir.federated.core.reduce import ADAM, ServerOptimizer
from triplane.unified_ir.federated.study import simulate

FEDAVG, MAML, FEDADAM = (ALGORITHMS[name] for name in ("fedavg", "maml", "fedadam"))
OWN = replace(FEDAVG, name="own")
MAML_ADAM = replace(MAML, name="maml-adam", server=ADAM, hyper=(*MAML.hyper, *FEDADAM.hyper[3:]))


def test_it_runs_like_the_row_it_copies_and_is_gone_afterwards():
    with registered(OWN):
        own = simulate(module(), shards(), study("own"))
    assert bits(own) == bits(simulate(module(), shards(), study("fedavg")))
    with pytest.raises(InvalidInput, match="no algorithm 'own'; choose from fedavg"):
        algorithm("own")


def test_a_meta_algorithm_can_have_adam_on_the_cloud():
    with registered(MAML_ADAM):
        hyper = Hyper(**{**HYPER, "server_lr": 0.1})
        one = simulate(module(), shards(), study("maml-adam", rounds=1, hyper=hyper)).state
    mean = simulate(module(), shards(), study("maml", rounds=1)).state
    for name, x in one.items():
        start = module().initial(name).astype(np.float64)
        d = mean[name] - start
        # The first step of Adam without bias correction, with beta1 0.9 and beta2 0.99.
        expected = start + 0.1 * 0.1 * d / (np.sqrt(0.01 * d * d) + hyper.floor)
        np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (FEDAVG, "there is an algorithm 'fedavg' already"),
        (replace(OWN, name="../a"), "1 to 40 of a-z, 0-9, _ and -, got '../a'"),
        (
            replace(OWN, hyper=(Hyperparameter("lr", 0.1, DECAY, ""),)),
            "'lr' of own must have the valid values that other algorithms declare",
        ),
    ],
)
def test_a_row_that_would_shadow_another_is_refused(row, said):
    before = dict(ALGORITHMS)
    with pytest.raises(InvalidInput, match=said), registered(row):
        pass
    assert before == ALGORITHMS


def test_it_is_gone_after_an_error():
    with pytest.raises(KeyError), registered(OWN):
        raise KeyError
    assert "own" not in ALGORITHMS


def test_a_study_is_not_resumed_with_another_revision(tmp_path):
    with registered(replace(OWN, revision="1")):
        simulate(module(), shards(), study("own", rounds=1), folder=tmp_path)
    slower = ServerOptimizer("half", (), lambda x, d, _slots, _hyper: (x + d / 2, ()))
    changed = replace(OWN, revision="2", server=slower)
    with registered(changed), pytest.raises(Conflict, match="file of the algorithm is 1 there, 2"):
        simulate(module(), shards(), study("own", rounds=2), folder=tmp_path)


def test_a_number_of_its_own_is_a_hyperparameter_meanwhile():
    rate = Hyperparameter("temperature", 2.0, POSITIVE, "A number.")
    with registered(replace(OWN, hyper=(*OWN.hyper, rate))):
        assert Hyper().temperature == 2.0
    with pytest.raises(InvalidInput, match="no algorithm has a hyperparameter 'temperature'"):
        Hyper(temperature=1.0)
