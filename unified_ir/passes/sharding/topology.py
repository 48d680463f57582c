"""Devices and the links between them: what a collective costs by the alpha-beta model.

A collective among n devices takes ceil(log2 n) latencies and (n - 1) / n of the bytes over the
bandwidth, by recursive halving and doubling (Thakur, Rabenseifner, Gropp 2005). Devices are
numbered host by host and rack by rack, so the devices of the last mesh axis are neighbours.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from triplane.proto.errors import InvalidInput

MAX_DEVICES: Final = 4096
DEVICES_PER_HOST: Final = 8
ASSUMED: Final = "assumed rates of data-centre GPUs"
OTHERS: Final = "(--topology FILE gives others)"
MAX_FILE_BYTES: Final = 1 << 16
MAX_TEXT: Final = 200
"""Characters of a text about a measurement."""
MIN_NUMBER: Final = 1e-12
MAX_NUMBER: Final = 1e18
"""Bounds of rates and latencies, within which no time overflows."""
Mesh = tuple[int, ...]
"""Number of devices along each mesh axis."""


@dataclass(frozen=True, slots=True)
class LinkCost:
    """One device's link: seconds before the first byte, bytes a second from then on."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, n: int, sent_bytes: float) -> float:
        """Return the time of a collective of n devices in which each sends so many bytes."""
        return math.ceil(math.log2(n)) * self.latency_s + sent_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Measurement:
    """Where, when and with what rates were measured; texts for people."""

    host: str
    when: str
    devices: str
    software: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Rates of one device, and of the links inside a host, between hosts and between racks.

    hosts_per_rack: hosts that `between` joins; None where there is one rack. The defaults are
    assumptions about a host of eight data-centre GPUs, not measurements: `source` says so wherever
    a prediction is printed.
    """

    devices_per_host: int = DEVICES_PER_HOST
    hosts_per_rack: int | None = None
    inside: LinkCost = LinkCost(5e-6, 100e9)
    between: LinkCost = LinkCost(20e-6, 12.5e9)
    racks: LinkCost = LinkCost(40e-6, 6.25e9)
    flops_per_s: float = 50e12
    memory_bytes_per_s: float = 1e12
    measured: Measurement | None = None
    source: str = f"{ASSUMED}, {DEVICES_PER_HOST} a host {OTHERS}"

    def link(self, mesh: Mesh, axis: int) -> LinkCost:
        """Return the link of a collective along a mesh axis: the slowest that it crosses.

        It has the longest latency and the least bandwidth of the levels between its devices, so
        a collective is not taken apart into steps inside hosts and between them.
        """
        levels = [self.inside]
        if not _in_one(self.devices_per_host, mesh, axis):
            levels.append(self.between)
            per_rack = self.devices_per_host * (self.hosts_per_rack or MAX_DEVICES)
            if not _in_one(per_rack, mesh, axis):
                levels.append(self.racks)
        slowest = LinkCost(
            max(link.latency_s for link in levels), min(link.bytes_per_s for link in levels)
        )
        return next((link for link in levels if link == slowest), slowest)

    def meshes(self, devices: int) -> list[Mesh]:
        """Return the meshes of at most two axes for a number of devices."""
        check_devices(devices)
        pairs = [(n, devices // n) for n in range(2, devices) if devices % n == 0]
        # On one host all links are alike, so the order of the axes does not matter.
        several = devices > self.devices_per_host
        return [(devices,), *(pair for pair in pairs if several or pair[0] <= pair[1])]

    def json(self) -> dict[str, Any]:
        """Return the record that `read_topology` reads."""
        record: dict[str, Any] = {k: getattr(self, k) for k in (*_COUNTS, *_RATES)}
        record |= {k: asdict(getattr(self, k)) for k in _LINKS}
        if self.measured is not None:
            record["measured"] = asdict(self.measured)
        return {k: v for k, v in record.items() if v is not None}


def assumed_topology(devices_per_host: int) -> Topology:
    """Return the default rates, with a number of devices in a host that is known."""
    source = f"{ASSUMED}, on hosts of {devices_per_host} as joined {OTHERS}"
    return Topology(devices_per_host=devices_per_host, source=source)


_COUNTS: Final = ("devices_per_host", "hosts_per_rack")
_LINKS: Final = ("inside", "between", "racks")
_RATES: Final = ("flops_per_s", "memory_bytes_per_s")


def read_topology(path: str | Path) -> Topology:
    """Return the topology of a JSON file; a field that it leaves out keeps its default.

    InvalidInput: the file is no such record, has an unknown field, or a number out of its range.
    """
    with Path(path).open("rb") as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise InvalidInput(f"{path} is larger than {MAX_FILE_BYTES:,} bytes; it is no topology")
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON: {error}") from error
    where, default = str(path), Topology()
    record = _object(record, {*_COUNTS, *_RATES, *_LINKS, "measured"}, where)
    values: dict[str, Any] = {}
    for name, value in record.items():
        place = f"{where}: {name}"
        if name in _RATES:
            values[name] = _number(value, place)
        elif name in _COUNTS:
            values[name] = _count(value, place)
        elif name in _LINKS:
            values[name] = _link(value, getattr(default, name), place)
        else:
            values[name] = _measurement(value, place)
    return Topology(**values, source=_source(where, record, values.get("measured")))


def _source(where: str, record: Mapping[str, Any], measured: Measurement | None) -> str:
    """Say whose rates these are, and which of them are still assumptions."""
    what = "" if measured is None else f", measured on {measured.devices}"
    links = _LINKS if "hosts_per_rack" in record else ("inside", "between")
    assumed = [k for k in (*_RATES, *links) if k not in record]
    parts = [(k, f.name) for k in links if k in record for f in fields(LinkCost)]
    assumed += [f"{name} of {k}" for k, name in parts if name not in record[k]]
    if "devices_per_host" not in record:
        assumed.append(f"{DEVICES_PER_HOST} devices a host")
    return f"rates of {where}{what}" + (f"; assumed: {', '.join(assumed)}" if assumed else "")


def _in_one(group: int, mesh: Mesh, axis: int) -> bool:
    """Return whether the devices along a mesh axis are in one group of so many neighbours."""
    span, devices = math.prod(mesh[axis:]), math.prod(mesh)
    return devices <= group or group % span == 0


def _count(value: Any, where: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_DEVICES:
        raise InvalidInput(
            f"{where} must be a whole number from 1 to {MAX_DEVICES}, got {_shown(value)}"
        )
    return value


def _measurement(value: Any, where: str) -> Measurement:
    names = [f.name for f in fields(Measurement)]
    record = _object(value, set(names), where)
    for name in names:
        text = record.get(name)
        if not isinstance(text, str) or len(text) > MAX_TEXT or not text.isprintable():
            raise InvalidInput(
                f"{where}: {name} must be a printable text of at most {MAX_TEXT} characters, got "
                f"{str(text)[:MAX_TEXT]!r}"
            )
    return Measurement(**record)


def check_devices(devices: int, what: str = "devices") -> None:
    """Raise InvalidInput unless a plan can have so many devices; what: their name for the user."""
    if type(devices) is not int or not 1 <= devices <= MAX_DEVICES:
        raise InvalidInput(f"{what} must be a number from 1 to {MAX_DEVICES}, got {devices!r}")


def _link(value: Any, default: LinkCost, where: str) -> LinkCost:
    names = [f.name for f in fields(LinkCost)]
    record = _object(value, set(names), where)
    return LinkCost(
        *(
            _number(record[n], f"{where}: {n}") if n in record else getattr(default, n)
            for n in names
        )
    )


def _object(value: Any, known: set[str], where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidInput(f"{where} must be a JSON object with {', '.join(sorted(known))}")
    if odd := sorted(value.keys() - known):
        raise InvalidInput(
            f"{where} has no field {_shown(odd[0])}; it has {', '.join(sorted(known))}"
        )
    return value


def _number(value: Any, where: str) -> float:
    if type(value) not in {int, float} or not MIN_NUMBER <= value <= MAX_NUMBER:
        raise InvalidInput(
            f"{where} must be a number from {MIN_NUMBER:g} to {MAX_NUMBER:g}, got {_shown(value)}"
        )
    return float(value)


def _shown(value: Any) -> str:
    """Return a value of a file as the start of its text, on one line of an error."""
    return reprlib.repr(value)
