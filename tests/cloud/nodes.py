"""Nodes that speak the real protocol with real certificates, and do what they are told at once."""

import asyncio
import contextlib
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from triplane.proto import fleet_pb2 as pb
from triplane.proto.channels import connect_aio
from triplane.proto.identity import IdentityFolder, enrol
from triplane.proto.stream import SessionClient

CAPABILITY = pb.Capability(
    runtime="onnxruntime", runtime_version="1.23.2", max_opset=26, machine="x86_64",
    instructions=["avx2", "avx512_vnni"], memory_bytes=8 << 30, targets=["ort-x64"],
)  # fmt: skip


@dataclass
class TestNode:
    """One node. outcome: the state it reports for a new attempt; reports: sent and acknowledged."""

    __test__ = False

    identity: IdentityFolder
    outcome: int = pb.COMMITTED
    desired: pb.Desired = field(default_factory=pb.Desired)
    committed: dict[str, int] = field(default_factory=dict)
    acknowledged: list[pb.Report] = field(default_factory=list)
    number: int = 0
    incidents: list[pb.Incident] = field(default_factory=list)

    def __post_init__(self):
        self._obeyed = asyncio.Event()
        self.client = SessionClient(
            lambda: connect_aio(self.identity), self._told, rng=lambda: 0.2, software="test"
        )

    async def _told(self, desired):
        if desired.number >= self.desired.number:
            self.desired = desired
            self._obeyed.set()

    def report(self):
        self.number += 1
        report = pb.Report(
            number=self.number, desired_number=self.desired.number, capability=CAPABILITY,
            serving_up=True, incidents=self.incidents,
        )  # fmt: skip
        for wanted in self.desired.assignments:
            if self.outcome == pb.COMMITTED:
                self.committed[wanted.model] = wanted.version
            report.models.add(
                model=wanted.model, version=wanted.version, attempt=wanted.attempt,
                state=self.outcome, committed_version=self.committed.get(wanted.model, 0),
                reason="" if self.outcome == pb.COMMITTED else "golden sample 3",
            )  # fmt: skip
        return report

    async def send(self, report):
        await self.client.send(report)
        self.acknowledged.append(report)

    async def obey(self):
        """Report at once, then after each new document."""
        while True:
            self._obeyed.clear()
            await self.send(self.report())
            await self._obeyed.wait()

    @asynccontextmanager
    async def live(self):
        tasks = [asyncio.create_task(self.client.run()), asyncio.create_task(self.obey())]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result


async def enrolled(cloud, folder, name, **labels):
    """A new node of the cloud, with a certificate from its enrolment port."""
    from triplane.cloud.identity.rights import PrincipalRole

    invited = await cloud.principals.invite(
        "operator", PrincipalRole.NODE, name=name, labels=labels
    )
    identity = await asyncio.to_thread(enrol, invited.token, cloud.enrol_address, folder / name)
    return TestNode(identity)


@asynccontextmanager
async def living(nodes):
    async with contextlib.AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(node.live())
        yield
