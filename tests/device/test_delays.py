"""A run on two devices, each await, lock and thread held back by turns: the same bits.

The model, personal tensors and remainders are compared with those of an undisturbed run, and each
update must be settled once. A counted update whose state was lost changes every later round.
"""

import asyncio
import hashlib
import logging
import re
import secrets
import zlib
from collections import Counter
from contextlib import asynccontextmanager

import numpy as np
import pytest
from tests.cloud.federation import given
from tests.device.delays import Delays
from tests.device.devices import client_of, cloud_of, taking_part
from tests.support.deadlines import within

from triplane.cloud.registry import Push
from triplane.device.home import DeviceHome
from triplane.device.memory import Memory
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.ir import TensorSpec

pytestmark = pytest.mark.slow

NAMES = ("ann", "bob")
ROUNDS = 3
HELD_S = 0.05
LEAST = 8  # delays in a run
FEW = 4  # passes through one point that are held back alone
SEEDS = 200


def never(_point, _number):
    """Hold nothing back."""
    return 0.0


class Own(nn.Cell):
    """A shared layer, and a bias that stays on the device."""

    def __init__(self):
        super().__init__()
        self.head = nn.Dense(given.FEATURES, given.CLASSES)
        self.own = nn.Personal(np.zeros(given.CLASSES, np.float32))

    def construct(self, x):
        return self.head(x) + self.own


def own_model(path):
    nn.seed(3)
    trainer = train.Trainer(Own(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.prepare(TensorSpec(("N", given.FEATURES), "float32"), TensorSpec(("N",), "int64"))
    trainer.export(("predict", "evaluate", "loss")).save(path)
    return path.read_bytes()


class Scene:
    """A cloud and two devices of this process, on one loop with delays."""

    def __init__(self, cloud, folder, delays, caplog):
        self.cloud, self.folder, self.delays, self._caplog = cloud, folder, delays, caplog
        self.passes: Counter[str] = Counter()
        self.taken = 0

    def memory(self, name):
        home = DeviceHome(self.folder / name)
        return Memory(home.personal, home.pending)

    async def bits(self, delayed):
        """What a run ends with, held back at the points that `delayed` chooses."""
        for path in self.folder.glob("*/personal/*.state"):
            path.unlink()
        self._caplog.clear()
        self.delays.restart(delayed)
        begun = await self._begun()
        run = await given.ended(self.cloud, begun.id)
        await self._settled()
        self.passes, self.taken = Counter(self.delays.seen), self.delays.taken
        self.delays.restart(never)
        assert run.phase == pb.Run.DONE, run.reason
        assert all(r.counted == len(NAMES) for r in run.rounds), run.rounds
        settled = [r for r in self._caplog.records if r.msg == "update settled"]
        assert all(r.counted for r in settled), [vars(r) for r in settled]
        assert len(settled) == len(NAMES) * ROUNDS
        kept = [self.memory(name).personal(run.id) for name in NAMES]
        version = await self.cloud.registry.version(run.result)
        return version.model_digest, [digests(k.tensors) | digests(k.remainder) for k in kept]

    async def _begun(self):
        spec = given.spec(model="own@1", rounds=ROUNDS, compression="int8")
        request = pb.StartRequest(spec=spec, key=secrets.token_bytes(16))
        return await self.cloud.federation.begin(request, by="operator")

    async def _settled(self):
        """The devices have settled all; they write it down in threads of their own."""
        while any(self.memory(name).pending() for name in NAMES):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def digests(arrays):
    return {n: hashlib.sha256(x.tobytes()).hexdigest()[:16] for n, x in arrays.items()}


@asynccontextmanager
async def scene(folder, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "triplane.device")
    delays = Delays()
    delays.install(monkeypatch)
    async with cloud_of(folder) as cloud:
        blob = cloud.blobs.put(own_model(folder / "own.tpm"))
        push = Push(model="own", blob=blob, key=secrets.token_bytes(16))
        await cloud.registry.push(push, by="operator")
        clients = [await client_of(cloud, folder, name, k) for k, name in enumerate(NAMES)]
        async with taking_part(*clients), talkative(cloud):
            yield Scene(cloud, folder, delays, caplog)


@asynccontextmanager
async def talkative(cloud):
    """The cloud sends documents again and again, as one does that has many runs."""

    async def talk():
        while True:
            for name in NAMES:
                cloud.federation.devices.tell(name)
            await asyncio.sleep(
                1.5 * HELD_S
            )  # slower than a device whose each message is held back

    talking = asyncio.create_task(talk())
    try:
        yield
    finally:
        talking.cancel()


def at_random(seed, share):
    """Hold back this share of all passes; the same ones for the same seed."""

    def delayed(point, number):
        return HELD_S if zlib.crc32(f"{seed} {point} {number}".encode()) < share * 2**32 else 0.0

    return delayed


def at(where, every=1):
    """Hold back each pass, or every so many, through the points whose name has this pattern."""
    pattern = re.compile(where)
    return lambda point, n: HELD_S if n % every == 0 and pattern.search(point) else 0.0


def at_pass(where, number):
    """Hold back one pass through one point."""
    return lambda point, n: HELD_S if (point, n) == (where, number) else 0.0


def story_of(tmp_path, monkeypatch, caplog, tell, seconds):
    async def story():
        async with scene(tmp_path, monkeypatch, caplog) as made:
            await tell(made, await made.bits(never))

    within(story(), seconds)


def test_what_is_learned_does_not_depend_on_slow_settling(tmp_path, monkeypatch, caplog):
    async def tell(made, calm):
        assert await made.bits(at(r"client.*_settle|_Working\._settle")) == calm
        assert made.taken >= LEAST, made.passes

    story_of(tmp_path, monkeypatch, caplog, tell, 120)


@pytest.mark.long
def test_what_is_learned_does_not_depend_on_which_awaits_take_long(tmp_path, monkeypatch, caplog):
    async def tell(made, calm):
        settling, doing = r"client.*_settle|_Working\._settle", r"client.*_do|_Working\._do"
        for kind in (settling, doing, "write_all"):
            assert await made.bits(at(kind)) == calm, kind
            assert made.taken >= LEAST, made.passes

    story_of(tmp_path, monkeypatch, caplog, tell, 120)


@pytest.mark.deep
def test_what_is_learned_does_not_depend_on_any_single_await(tmp_path, monkeypatch, caplog):
    """Each point of an undisturbed run, of cloud and devices: each pass, every other, and one."""

    async def tell(made, calm):
        for point, passes in sorted(made.passes.items()):
            for every in (1, 2):
                assert await made.bits(at(f"^{re.escape(point)}$", every)) == calm, (point, every)
            for number in range(1, min(passes, FEW) + 1):
                assert await made.bits(at_pass(point, number)) == calm, (point, number)

    story_of(tmp_path, monkeypatch, caplog, tell, 3600)


@pytest.mark.deep
def test_what_is_learned_does_not_depend_on_random_awaits(tmp_path, monkeypatch, caplog):
    async def tell(made, calm):
        for seed in range(SEEDS):
            assert await made.bits(at_random(seed, 0.2)) == calm, seed
            assert made.taken >= LEAST, made.passes

    story_of(tmp_path, monkeypatch, caplog, tell, 3600)
