"""A study whose cloud's side is brought from elsewhere: who is asked, and what changes become."""

import contextlib

import numpy as np
import pytest
from tests.federated.study import given

from triplane.proto.errors import Conflict
from triplane.unified_ir.federated.study import RoundRow, simulate
from triplane.unified_ir.federated.study.server import Next


class HalvingServer:
    """The plain mean of the first half of the devices of a round, halved; keeps a count."""

    facts = {"strategy": "halving"}  # noqa: RUF012 -- a test's

    follows_limits = False

    def __init__(self):
        self.seen, self.judged = [], []

    def title(self, algorithm):
        return f"halving over {algorithm}"

    def serving(self, study):
        self.study = study
        return contextlib.nullcontext(self)

    def choose(self, _at, leases):
        return sorted(leases)[: len(leases) // 2]

    def reduce(self, at, contributions):
        self.seen.append([x.device for x in contributions])
        count = at.slots.get("count", np.zeros(1, np.int64)) + 1
        shared = {
            name: (x + np.mean([c.change[name] for c in contributions], axis=0) / 2).astype(x.dtype)
            for name, x in at.shared.items()
        }
        return Next(shared, {"count": count})

    def judge(self, at):
        number = len(at.rounds)
        self.judged.append((number, sum(score.round == number for score in at.scores)))


def test_a_server_of_its_own_asks_reduces_and_is_told_of_scores():
    server = HalvingServer()
    rows: list[RoundRow] = []
    options = given.study(evaluate_every=3, rounds=4)
    trial = simulate(given.module(), given.shards(), options, server=server, on_round=rows.append)
    assert server.seen == [["device-0", "device-1"]] * 4
    assert [row.devices for row in rows] == [2] * 4
    assert server.judged == [(3, 4), (4, 4)]
    assert trial.algorithm == "halving over fedavg"
    assert (server.study.devices, server.study.rounds, server.study.seed) == (4, 4, 0)
    assert server.study.roles.keys() == trial.state.keys()
    own = simulate(given.module(), given.shards(), options)
    assert any((trial.state[k] != own.state[k]).any() for k in own.state)


def test_what_a_server_remembers_is_resumed_and_only_by_the_same_server(tmp_path):
    whole = simulate(given.module(), given.shards(), given.study(), server=HalvingServer())
    for rounds in (2, 4):
        options = given.study(rounds=rounds)
        parts = simulate(
            given.module(), given.shards(), options, server=HalvingServer(), folder=tmp_path
        )
    for name, x in whole.state.items():
        np.testing.assert_array_equal(parts.state[name], x)
    with pytest.raises(Conflict, match=r"of another study .*strategy differs"):
        simulate(given.module(), given.shards(), given.study(), folder=tmp_path)
