"""The verbs of a device, as a person and as a script use them."""

import asyncio
import json
import subprocess
import sys
import time

import numpy as np
import pytest
from click.testing import CliRunner
from tests.cloud.federation import given
from tests.device.devices import cloud_of, save_shard, token_for
from tests.support.deadlines import within

from triplane.device.cli import device
from triplane.device.home import DeviceHome, SessionNote
from triplane.device.status import _work
from triplane.proto.errors import InvalidInput, NotFound

COMMAND = (sys.executable, "-m", "triplane.device.cli")


def verb(*args, **options):
    return subprocess.run(
        [*COMMAND, *map(str, args)], check=False, capture_output=True, text=True, timeout=60,
        **options,
    )  # fmt: skip


def begun(home, *args):
    return subprocess.Popen(
        [*COMMAND, "run", "--home", str(home), "--json", *args],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_a_device_is_enrolled_runs_and_shows_what_it_has(tmp_path):
    home, data = tmp_path / "home", tmp_path / "samples.npz"
    save_shard(data, given.shard(0))

    async def story():
        async with cloud_of(tmp_path) as cloud:
            enrolled = await asyncio.to_thread(
                verb, "enrol", await token_for(cloud, "ann"), "--cloud", cloud.enrol_address,
                "--home", home, "--data", data, "--population", given.POPULATION, "--json",
            )  # fmt: skip
            running = await asyncio.to_thread(begun, home)
            try:
                ready = json.loads(await asyncio.to_thread(running.stdout.readline))
                request = given.start_request(cohort={"devices": 1})
                made = await cloud.federation.begin(request, by="operator")
                run = await given.ended(cloud, made.id)
                during = await asyncio.to_thread(verb, "status", "--home", home)
            finally:
                running.terminate()
                code = await asyncio.to_thread(running.wait)
                running.stdout.close()
            return enrolled, ready, run, during, code

    enrolled, ready, run, during, code = within(story())
    assert json.loads(enrolled.stdout)["name"] == "ann"
    assert (ready["device"], ready["population"]) == ("ann", given.POPULATION)
    assert code == 0
    assert "(running)" in during.stdout
    assert f"of run {run.id}; " in during.stdout
    assert "of 12 held-out samples" in during.stdout
    after = json.loads(verb("status", "--home", home, "--json").stdout)
    assert (after["running"], after["pending"]) == (False, [])
    assert after["model"]["accuracy"] >= after["model"]["before"]


def until_status(home, holds):
    """The status as JSON, once something holds of it."""
    until_s = time.monotonic() + 60
    while True:
        found = json.loads(verb("status", "--home", home, "--json").stdout)
        if holds(found):
            return found
        assert time.monotonic() < until_s, found


@pytest.mark.long
def test_status_says_that_no_run_asks_for_the_population(tmp_path):
    """Also where the process runs with another population than the settings name.

    Once a run asks that population too, it is said that the device waits for its turn.
    """
    home, data = tmp_path / "home", tmp_path / "samples.npz"
    save_shard(data, given.shard(0))

    async def story():
        async with cloud_of(tmp_path) as cloud:
            await asyncio.to_thread(
                verb, "enrol", await token_for(cloud, "ann"), "--cloud", cloud.enrol_address,
                "--home", home, "--data", data, "--population", given.POPULATION,
            )  # fmt: skip
            before = await asyncio.to_thread(verb, "status", "--home", home)
            await cloud.federation.begin(given.start_request(), by="operator")
            running = await asyncio.to_thread(begun, home, "--population", "nobody")
            try:
                idle = await asyncio.to_thread(until_status, home, lambda s: asked(s) is False)
                text = await asyncio.to_thread(verb, "status", "--home", home)
                await cloud.federation.begin(
                    given.start_request(population="nobody"), by="operator"
                )
                await asyncio.to_thread(until_status, home, lambda s: asked(s) is True)
                waits = await asyncio.to_thread(verb, "status", "--home", home)
            finally:
                running.kill()
                running.communicate()
            return before.stdout, idle, text.stdout, waits.stdout

    def asked(status):
        return (status["session"] or {}).get("population_asked")

    before, idle, text, waits = within(story())
    assert "no process runs here" in before
    assert (idle["population"], idle["session"]["population"]) == ("nobody", "nobody")
    assert idle["session"]["state"] == "idle"
    assert "no run of the cloud asks the population 'nobody'" in text
    assert "a run asks the population 'nobody', and not this device now" in waits


@pytest.mark.parametrize("known", [{}, {"population_asked": None}])
def test_status_of_a_device_of_an_older_cloud_says_what_is_known(tmp_path, known):
    home = DeviceHome(tmp_path)
    told = {"state": "idle", "population": "labs", "since_s": 1.0, **known}
    home.session_file.write_text(json.dumps(told))
    assert home.session == SessionNote("idle", "labs", 1.0)
    text = _work(home.session)
    assert "no run of the cloud asks this device." in text
    assert "this device's is 'labs'" in text


@pytest.mark.parametrize(
    ("args", "family", "says"),
    [
        (("status",), NotFound, "no enrolled device in"),
        (("run",), NotFound, "no enrolled device in"),
        (("run", "--data", "{data}"), NotFound, "triplane device enrol TOKEN --cloud HOST:PORT"),
        (("run", "--data", "{bad}"), InvalidInput, "x is not a plain array of numbers"),
        (("enrol", "token", "--cloud", "127.0.0.1:1"), InvalidInput, "a token is SECRET.PIN"),
        (("enrol", "t", "--cloud", "c", "--population", ""), InvalidInput, "a population's name"),
        (("enrol", "t", "--cloud", "c", "--population", "My Phones"), InvalidInput, "a-z, 0-9"),
    ],
)
def test_mistakes_are_told_with_the_way_out(tmp_path, args, family, says):
    save_shard(tmp_path / "data.npz", given.shard(0))
    np.savez(tmp_path / "bad.npz", x=np.array([{}], object), y=np.zeros(1))
    names = {"data": tmp_path / "data.npz", "bad": tmp_path / "bad.npz"}
    asked = [*(arg.format(**names) for arg in args), "--home", str(tmp_path / "home")]
    done = CliRunner().invoke(device, asked)
    assert isinstance(done.exception, family)
    assert says in str(done.exception)


@pytest.mark.parametrize("name", ["enrol", "run", "status"])
def test_every_verb_explains_itself(name):
    assert "Usage" in CliRunner().invoke(device, [name, "--help"]).output


def test_its_help_imports_click_only():
    code = "import sys, triplane.device.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"numpy", "grpc", "onnxruntime", "cryptography"} & set(done.stdout.split())
