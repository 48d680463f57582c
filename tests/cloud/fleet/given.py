"""What tests of the fleet say for bundles and nodes."""

import asyncio
from dataclasses import dataclass, field

from triplane.cloud.fleet.capability import BundleNeeds
from triplane.cloud.fleet.values import BundleReady, Limit
from triplane.proto import fleet_pb2 as pb
from triplane.proto.errors import NotFound

CAPABILITY = pb.Capability(
    runtime="onnxruntime", runtime_version="1.23.2", max_opset=21, machine="x86_64",
    memory_bytes=1 << 30, targets=["ort-x64"],
)  # fmt: skip


@dataclass
class Shelf:
    """Versions, bundles and signatures that the test puts there."""

    latest: dict[str, int] = field(default_factory=lambda: {"digits": 9})
    bundles: dict[tuple[str, int, str], BundleReady] = field(default_factory=dict)
    share: Limit | None = None

    def put(self, model, version, target="ort-x64", *, signed=True):
        path = f"release/{model}@{version}+{target}.bundle" if signed else ""
        needs = BundleNeeds(runtime="onnxruntime", opset=21)
        self.bundles[model, version, target] = BundleReady(target, needs, path)

    async def resolve(self, reference):
        model, _, version = reference.partition("@")
        number = self.latest.get(model, 0) if version in {"", "latest"} else int(version)
        if not 1 <= number <= self.latest.get(model, 0):
            raise NotFound(f"no version {reference}")
        return model, number

    async def look(self, model, version, target, role):
        return self.bundles.get((model, version, target))

    async def limit(self, model, version, role):
        return self.share if role == "auto" else None


def said(fleet, name, model="digits", **options):
    """What the node `name` reports of the model, as far as its desired document goes."""
    report = pb.Report(capability=CAPABILITY, serving_up=True)
    held = fleet.node(name).held.get(model)
    if held is not None or options:
        report.models.add(model=model, attempt=held.attempt if held else 0, **options)
    return report


async def obey(fleet, *names, model="digits"):
    """These nodes commit whatever they were told to serve."""
    for name in names:
        held = fleet.node(name).held[model]
        report = said(
            fleet, name, committed_version=held.version, version=held.version, state=pb.COMMITTED
        )
        await fleet.report(name, report)


async def until(fleet, holds):
    """Wait until `holds()`, looking after each change of the fleet."""
    while True:
        moved = fleet.moved
        found = holds()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        await moved.wait()


def request(**options):
    defaults = {"reference": "digits@3", "selector": "all", "key": b"k" * 16, "role": "release"}
    return pb.DeployRequest(**defaults | options)
