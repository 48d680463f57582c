"""A cloud in miniature for masked rounds of several devices: a session for each of them."""

import asyncio
from collections import defaultdict

from tests.device.stage import Stage, lease

from triplane.proto import federation_pb2 as pb
from triplane.proto.status import status_of_aio
from triplane.proto.stream import ServerSession


class MaskedStage(Stage):
    """heard_of: what each device said, by its name."""

    def __init__(self, folder, authority, port=0):
        super().__init__(folder, authority, port)
        self.heard_of = defaultdict(list)
        self.sessions = {}

    async def Open(self, request_iterator, context):  # type: ignore[override]
        (name,) = context.auth_context()["x509_common_name"]
        name = name.decode()
        async with status_of_aio(context):
            first = await anext(aiter(request_iterator))
            await self.session_of(name).serve(first, aiter(request_iterator), context.write)

    def session_of(self, name):
        async def take(message):
            async with self.moved:
                self.heard_of[name].append(message)
                self.moved.notify_all()

        if name not in self.sessions:
            self.sessions[name] = ServerSession(self.epoch, take, heartbeat_s=1.0)
        return self.sessions[name]

    async def offers(self, *names):
        for name in names:
            await self._said(name, lambda m: isinstance(m, pb.Offer), 0)

    async def ask(self, name, task, settled=()):
        """What the device contributes to a task."""
        before = len(self.heard_of[name])
        self.session_of(name).send(pb.Work(tasks=[task], settled=settled))
        return await self._said(
            name, lambda m: isinstance(m, pb.Contribution) and m.lease == task.lease, before
        )

    async def _said(self, name, holds, after):
        heard = self.heard_of[name]
        async with self.moved:
            await self.moved.wait_for(lambda: any(map(holds, heard[after:])))
        return next(m for m in heard[after:] if holds(m))


class MaskedRun:
    """One masked round of real devices. names: of the devices, each with a lease of its own.

    first: number of the first lease. settled: by device, what its documents say of earlier leases.
    """

    def __init__(self, stage, round_, files, names, *, first=1, settled=()):
        self.stage, self.round, self.files, self.names = stage, round_, files, list(names)
        self.first, self.settled = first, dict(settled)
        self.positions = {}
        self.declined = {}

    async def phase(self, asks):
        """Ask every device that is left; return the answers of those that did."""

        async def one(name):
            step = asks(self.positions[name]) if callable(asks) else asks
            number = self.number(name)
            task = self.stage.task(number, **self.files, masking=step, inline_bytes=65536)
            said = await self.stage.ask(name, task, self.settled.get(name, ()))
            assert said.lease == lease(number)
            return name, said

        said = dict(await asyncio.gather(*(one(name) for name in self.left)))
        for name, contribution in said.items():
            if contribution.WhichOneof("outcome") == "declined":
                self.declined[name] = contribution.declined
        return {name: said[name].masked for name in self.left}

    def number(self, name):
        return self.first + self.names.index(name)

    @property
    def counted(self):
        """The devices whose sum was unmasked."""
        cohort, contributors = self.round.cloud.session.devices, self.round.cloud.contributors
        return [n for n, at in self.positions.items() if cohort[at] in contributors]

    @property
    def left(self):
        return [name for name in self.names if name not in self.declined]

    async def play(self, before=lambda _step: None):
        """Play all steps; return the sum. before: called with the step that comes next."""
        round_ = self.round
        answers = await self.phase(round_.step())
        asks = round_.share(*answers.values())
        self.positions = {n: round_.position(a.keys.device) for n, a in answers.items()}
        for step, ends in zip(("share", "mask", "sign", "unmask"), self._ends(), strict=True):
            before(step)
            answers = await self.phase(asks)
            asks = ends(*answers.values())
        return asks

    def _ends(self):
        return self.round.mask, self.round.sign, self.round.unmask, self.round.sum
