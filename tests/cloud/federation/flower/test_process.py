"""A strategy's process: what it may do, what becomes of it, and what a strategy remembers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra [flower]")

from flwr.serverapp import strategy as flower

from triplane.cloud.federation.flower import spec
from triplane.cloud.federation.flower.adapter import named_arrays, record_of
from triplane.cloud.federation.flower.drive import make_strategy, node_of
from triplane.cloud.federation.flower.memory import recall, remember
from triplane.cloud.federation.flower.process import COMMAND, StrategyLimits, StrategyProcess
from triplane.proto.errors import Conflict, InvalidInput, Unavailable
from triplane.proto.sandbox import ChildDied
from triplane.unified_ir.federated.core.files import write_state

DIGEST = "ab" * 32
STATE = {"w": np.zeros((2, 3), np.float32), "b": np.ones(2, np.float32)}
DEADLINE_S = 60


def order_of(strategy="FedAvg", **changes):
    return {
        "run": "0" * 16, "strategy": strategy, "file": "", "attribute": "", "sha256": "",
        "wraps": False, "options": {}, "app": False, "rounds": 1, "evaluate_every": 0, "quorum": 1,
        "devices": 2, "proximal": 0.0, "lr": 0.1, "seed": 0,
        "norm_bound": "off", "max_examples": 1 << 40, **changes,
    }  # fmt: skip


def of_file(folder, text, **changes):
    """An order for an operator's strategy."""
    path = folder / "mine.py"
    path.write_text(textwrap.dedent(text))
    digest = spec.digest_of(path).hex()
    return order_of(file=str(path), attribute="strategy", sha256=digest, **changes)


def begin(folder, order, **limits):
    """Begin a process and end it; what it came to is raised."""

    async def story():
        async with asyncio.timeout(DEADLINE_S):
            process = await StrategyProcess.start(folder, order, StrategyLimits(**limits))
            await process.end()

    asyncio.run(story())
    assert not list(folder.glob("strategy-*"))


def given_state(folder):
    path = folder / "first.state"
    roles = dict.fromkeys(STATE, "parameter")
    write_state(path, STATE, roles, plan=DIGEST)
    more = {"number": 1, "evaluates": False, "state": str(path), "memory": "", "plan": DIGEST}
    return {**more, "roles": roles}


FACTS = """
    import json, os, resource

    def strategy():
        kinds = ("RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE")
        limits = {kind: resource.getrlimit(getattr(resource, kind)) for kind in kinds}
        held = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")[:-1]]
        raise ValueError(json.dumps({
            "environment": sorted(os.environ), "limits": limits, "cwd": os.getcwd(),
            "session": os.getsid(0) == os.getpid(), "held": held,
        }))
"""


@pytest.mark.slow
def test_it_has_nothing_of_the_clouds_but_its_pipe(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIPLANE_DATABASE", "postgresql://cloud:secret@db/cloud")
    with (tmp_path / "cloud.db").open("wb"), pytest.raises(InvalidInput) as refused:
        begin(tmp_path, of_file(tmp_path, FACTS), memory_bytes=1 << 31, file_bytes=1 << 20)
    said = str(refused.value)
    found = json.loads(said[said.index("{") :])
    assert not [name for name in found["environment"] if name.startswith("TRIPLANE")]
    assert {"FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK"} <= set(found["environment"])
    assert found["limits"]["RLIMIT_DATA"] == [1 << 31, 1 << 31]
    assert found["limits"]["RLIMIT_FSIZE"] == [1 << 20, 1 << 20]
    assert found["limits"]["RLIMIT_CORE"] == [0, 0]
    assert found["session"]
    assert str(tmp_path / "strategy-") in found["cwd"]
    assert not [held for held in found["held"] if held.endswith(".db")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "family", "why"),
    [
        ("strategy = 3", InvalidInput, "mine.py needs 'strategy'"),
        ("def strategy():\n    return {}['eta']", InvalidInput, r"KeyError \(mine.py:2\): 'eta'"),
        ("import os\nos._exit(3)", ChildDied, "ended with status 3"),
        ("x = bytearray(8 << 30)", Unavailable, "more memory than its limit"),
    ],
)
def test_what_goes_wrong_in_it_is_told(tmp_path, text, family, why):
    with pytest.raises(family, match=why):
        begin(tmp_path, of_file(tmp_path, text), answer_s=120.0)


@pytest.mark.slow
def test_one_that_never_answers_is_ended(tmp_path):
    order = of_file(tmp_path, "import threading\nthreading.Event().wait()")
    with pytest.raises(ChildDied, match="took longer than 6 s"):
        begin(tmp_path, order, answer_s=6.0)


@pytest.mark.slow
def test_a_file_that_changed_is_not_run(tmp_path):
    order = of_file(tmp_path, "strategy = 3")
    (tmp_path / "mine.py").write_text("strategy = 4")
    with pytest.raises(Conflict, match="has changed since the run began"):
        begin(tmp_path, order)


@pytest.mark.slow
def test_options_that_a_strategy_has_not_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"FedAdam does not accept the options .*'rate'"):
        begin(tmp_path, order_of("FedAdam", options={"rate": 1}))


@pytest.mark.slow
def test_it_ends_with_the_cloud(tmp_path):
    bounds = {"memory_bytes": 1 << 32, "file_bytes": 1 << 20, "seconds": 60}
    order = {**order_of(), **given_state(tmp_path), "folder": str(tmp_path), "limits": bounds}
    child = subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    pipes: Any = child
    pipes.stdin.write(json.dumps(order).encode() + b"\n")
    pipes.stdin.flush()
    assert json.loads(pipes.stdout.readline()) == {"done": {"ready": "FedAvg"}}
    pipes.stdin.close()
    assert child.wait(DEADLINE_S) == -signal.SIGKILL
    pipes.stdout.close()


@pytest.mark.slow
def test_the_clouds_own_process_leaves_flower_alone():
    check = "import sys, triplane.cloud.server; sys.exit('flwr' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", check], env=env, check=False).returncode == 0


FIVE = {"min_train_nodes": 2, "min_evaluate_nodes": 2, "min_available_nodes": 2}


@pytest.mark.parametrize(
    "make",
    [
        lambda: flower.FedAdam(**FIVE),
        lambda: flower.FedAvgM(**FIVE, server_momentum=0.9),
        lambda: flower.DifferentialPrivacyServerSideAdaptiveClipping(
            flower.FedYogi(**FIVE), noise_multiplier=0.1, num_sampled_clients=2
        ),
    ],
)
def test_what_a_strategy_remembers_is_given_to_the_next(make, tmp_path):
    first, second = make(), make()
    held = {"a": np.arange(3.0), "b": [1, (2.5, "x")], 3: record_of(STATE), "c": np.float32(2)}
    for strategy in (first, getattr(first, "strategy", first)):
        strategy.m_t, strategy.momentum_vector, strategy.odd = {}, [np.ones(2)], held
        strategy.hook = print
    remember(first, tmp_path / "memory")
    recall(second, tmp_path / "memory")
    for strategy in (second, getattr(second, "strategy", second)):
        assert not hasattr(strategy, "hook")
        np.testing.assert_array_equal(strategy.odd["a"], held["a"])
        assert strategy.odd["b"] == held["b"]
        assert strategy.odd["c"].dtype == np.float32
        np.testing.assert_array_equal(named_arrays(strategy.odd[3])["b"], STATE["b"])
        np.testing.assert_array_equal(strategy.momentum_vector[0], np.ones(2))
        assert strategy.m_t == {}


def test_every_strategy_of_the_table_is_made(tmp_path):
    for row in spec.SHIPPED.values():
        options = {}
        if row.wraps:
            options["noise_multiplier"] = 0.1
        if row.name.endswith("FixedClipping"):
            options["clipping_norm"] = 1.0
        if not row.why_not:
            found = make_strategy(order_of(row.name, wraps=row.wraps, options=options))
            assert type(found).__name__ == row.name


def test_devices_have_numbers_of_their_own():
    assert len({node_of(f"device-{k}") for k in range(1000)}) == 1000
    assert all(1 < node_of(f"device-{k}") < 1 << 63 for k in range(1000))
