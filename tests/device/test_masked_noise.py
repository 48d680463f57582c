"""Devices that add noise in masked runs, over mutual TLS: what is published and charged."""

import asyncio
import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tests.cloud.federation.given import POPULATION, ended, model_bytes
from tests.cloud.federation.masked import masked_request
from tests.device.devices import client_of, cloud_of, taking_part
from tests.support.deadlines import within

from triplane.cloud.cli.federate import command
from triplane.cloud.cli.runs import run_text
from triplane.cloud.federation.masked_encoding import round_encoding
from triplane.cloud.federation.masked_spec import least_and_honest
from triplane.cloud.registry import Push
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.convert.conversion import read_model
from triplane.unified_ir.federated.masking import UpdateEncoding

NAMES = ("ann", "bob", "cem", "dia")
CLIP = 0.125
ROUNDS = 2
HIDDEN = 400
FAR = 4.9
"""Of a normal distribution, passed with a probability of 1e-6."""

pytestmark = [pytest.mark.slow, pytest.mark.long]


def request(*, norm: float | str = CLIP, **noise):
    stated: dict[str, Any] = {"placement": "distributed", "clip": CLIP, "epsilon": 4.0} | noise
    return masked_request(
        len(NAMES), norm=norm, model="wide@1", rounds=ROUNDS, colluding_share=0.25, lost_share=0.0,
        noise=pb.Noise(**stated),
    )  # fmt: skip


async def model_of(cloud, reference):
    version = await cloud.registry.version(reference)
    module, _ = await asyncio.to_thread(read_model, cloud.blobs.find(version.blob))
    return {name: x.array.astype(np.float64) for name, x in module.state.items()}, module.meta


def deviations(values, variance):
    """How far the variance of normal values is from this one, in its standard deviations.

    Wilson and Hilferty 1931: the cube root of chi-square over its degrees is nearly normal.
    """
    n = len(values)
    spread = 2 / (9 * n)
    return (np.cbrt(np.sum(np.square(values)) / variance / n) - 1 + spread) / np.sqrt(spread)


def test_the_norm_follows_noised_bits_and_one_charge_covers_them(tmp_path):
    run, *_ = private_run(tmp_path, request(norm="adaptive", adaptive=True, clip_quantile=0.3))
    assert [r.counted for r in run.rounds if not r.evaluates] == [len(NAMES)] * ROUNDS
    assert not run.refusals.reasons
    first, second = (r.norm_bound for r in run.rounds if not r.evaluates)
    assert first == CLIP
    # The noise is larger than the bits of four devices, so any step may come.
    assert np.exp(-0.2 * 0.7) - 1e-9 <= second / first <= np.exp(0.2 * 0.3) + 1e-9
    for name in NAMES:
        stored = json.loads((tmp_path / name / "privacy.json").read_text())["runs"][run.id]
        assert stored["concentrated"] == pytest.approx(ROUNDS / run.spec.noise.multiplier**2)


def private_run(tmp_path, asked):
    """The ended run of four devices, and the model's state before and after, and its meta."""

    async def story():
        async with cloud_of(tmp_path) as cloud:
            blob = cloud.blobs.put(model_bytes(tmp_path, hidden=HIDDEN))
            push = Push(model="wide", blob=blob, key=secrets.token_bytes(16))
            await cloud.registry.push(push, by="operator")
            clients = [await client_of(cloud, tmp_path, n, i) for i, n in enumerate(NAMES)]
            async with taking_part(*clients):
                begun = await cloud.federation.begin(asked, by="operator")
                run = await ended(cloud, begun.id)
            assert run.phase == pb.Run.DONE, run.reason
            before, _ = await model_of(cloud, "wide@1")
            after, meta = await model_of(cloud, run.result)
            return run, before, after, meta

    return within(story())


def test_a_private_masked_run_publishes_the_stated_noise_and_charges_every_device(tmp_path):
    run, before, after, meta = private_run(tmp_path, request())
    assert [r.counted for r in run.rounds if not r.evaluates] == [len(NAMES)] * ROUNDS
    assert not run.refusals.reasons
    check_noise(run, np.concatenate([(after[n] - before[n]).ravel() for n in before]))
    facts = json.loads(meta["privacy"])
    assert (facts["law"], facts["noise"], facts["rounds"]) == ("concentrated", "distributed", 2)
    assert facts["epsilon"] == pytest.approx(4.0, rel=1e-3)
    assert "epsilon 4 of 4 spent at delta 1e-05 for one device" in run_text(run)
    for name in NAMES:
        stored = json.loads((tmp_path / name / "privacy.json").read_text())["runs"][run.id]
        assert stored["concentrated"] == pytest.approx(ROUNDS / run.spec.noise.multiplier**2)
        assert (stored["gaussian"], stored["round"]) == (0, ROUNDS)


def check_noise(run, moved):
    """Clipped changes are next to nothing beside the noise, entry by entry."""
    encoding = round_encoding(run.spec, parameters=len(moved), buffers=0, cap=1, seed=0)
    assert isinstance(encoding.parsed, UpdateEncoding)
    section, noise = encoding.parsed.sections[0], encoding.noise
    assert noise is not None
    assert least_and_honest(run.spec) == (3, 2)
    # What two devices add is enough; here all four do, and each rounds its integers, too.
    multiplier = run.spec.noise.multiplier
    assert section.step**2 * 2 * noise.variance >= (multiplier * CLIP) ** 2
    of_sum = section.step**2 * len(NAMES) * (noise.variance + 0.25)
    published = ROUNDS * of_sum / len(NAMES) ** 2
    assert len(moved) > 4000
    assert abs(deviations(moved, published)) < FAR
    for wrong in (3 / 4, 5 / 4):  # a device more or less
        assert abs(deviations(moved, published * wrong)) > FAR


def test_devices_add_noise_in_groups_under_a_robust_aggregator(tmp_path):
    names = [f"dev{number}" for number in range(10)]
    argv = (
        "run", "tiny", "--population", POPULATION, "--rounds", "2", "--devices", "10",
        "--quorum", "1", "--steps", "2", "--mask", "--groups", "3", "--aggregator", "median",
        "--lost-share", "0", "--colluding-share", "0.1", "--noise", "distributed",
        "--epsilon", "4", "--clip", "0.125",
    )  # fmt: skip

    async def story():
        # Each device has a thread at work, and there are more of them than a loop has by default.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(32))
        async with cloud_of(tmp_path) as cloud:
            clients = [await client_of(cloud, tmp_path, n, i) for i, n in enumerate(names)]
            async with taking_part(*clients):
                verb = [*argv, "--identity", str(tmp_path / "home" / "operator")]
                said = await asyncio.to_thread(CliRunner().invoke, command, verb)
            (run,) = await cloud.federation.runs()
            return said, await cloud.federation.run(run.id)

    said, run = within(story())
    assert said.exit_code == 0, said.output
    first, rest = said.output.split("[", 1)
    assert "masking for groups of 3 of 10 devices" in first
    assert "a hash of all keys forms 3 groups, and median combines their means" in first
    assert "enough while 2 devices of a sum are honest" in first
    assert "result tiny@2" in rest
    assert [(r.counted, r.left_out) for r in run.rounds] == [(10, "")] * 2
    for name in names:
        stored = json.loads((tmp_path / name / "privacy.json").read_text())["runs"][run.id]
        assert stored["concentrated"] == pytest.approx(2 / run.spec.noise.multiplier**2)


def test_the_command_line_says_first_whom_the_noise_protects_from_and_then_what_it_spent(tmp_path):
    argv = (
        "run", "tiny", "--population", POPULATION, "--rounds", "2", "--devices", "4",
        "--quorum", "1", "--steps", "2", "--mask", "--least-cohort", "3", "--lost-share", "0",
        "--colluding-share", "0.25", "--noise", "distributed", "--epsilon", "4", "--clip", "0.125",
    )  # fmt: skip

    async def story():
        async with cloud_of(tmp_path) as cloud:
            clients = [await client_of(cloud, tmp_path, n, i) for i, n in enumerate(NAMES)]
            async with taking_part(*clients):
                verb = [*argv, "--identity", str(tmp_path / "home" / "operator")]
                return await asyncio.to_thread(CliRunner().invoke, command, verb)

    said = within(story())
    assert said.exit_code == 0, said.output
    first, rest = said.output.split("[", 1)
    assert "masking for 4 devices" in first
    assert "enough while 2 devices of a sum are honest: epsilon 4 at delta 1e-05" in first
    assert first.rstrip().endswith("and against the cloud")
    assert "epsilon 4 of 4 spent at delta 1e-05 for one device" in rest
    assert "result tiny@2" in rest
