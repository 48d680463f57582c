"""Devices and the links between them: what a collective costs by the alpha-beta model.

A collective among n devices takes ceil(log2 n) latencies and (n - 1) / n of the bytes over the
bandwidth, by recursive halving and doubling (Thakur, Rabenseifner, Gropp 2005). Devices are
numbered host by host, so the devices of the last mesh axis are neighbours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from triplane.proto.errors import InvalidInput

MAX_DEVICES: Final = 4096
MAX_FILE_BYTES: Final = 1 << 16
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Rates of one device and of the links inside a host and between hosts.

    The defaults are assumptions about a host of eight data-centre GPUs, not measurements:
    `source` says so wherever a prediction is printed.
    """

    devices_per_host: int = 8
    inside: LinkCost = LinkCost(5e-6, 100e9)
    between: LinkCost = LinkCost(20e-6, 12.5e9)
    flops_per_s: float = 50e12
    memory_bytes_per_s: float = 1e12
    source: str = "assumed rates (--topology FILE gives others)"

    def link(self, mesh: Mesh, axis: int) -> LinkCost:
        """Return the slowest link between devices along a mesh axis."""
        span, devices = math.prod(mesh[axis:]), math.prod(mesh)
        one_host = devices <= self.devices_per_host or self.devices_per_host % span == 0
        return self.inside if one_host else self.between

    def meshes(self, devices: int) -> list[Mesh]:
        """Return the meshes of at most two axes for a number of devices."""
        check_devices(devices)
        pairs = [(n, devices // n) for n in range(2, devices) if devices % n == 0]
        # On one host all links are alike, so the order of the axes does not matter.
        several = devices > self.devices_per_host
        return [(devices,), *(pair for pair in pairs if several or pair[0] <= pair[1])]

    def json(self) -> dict[str, Any]:
        """Return the record that `read_topology` reads."""
        links = {k: {f.name: getattr(getattr(self, k), f.name) for f in fields(LinkCost)}
                 for k in _LINKS}  # fmt: skip
        rates = {k: getattr(self, k) for k in ("devices_per_host", *_RATES)}
        return {**rates, **links}


_LINKS: Final = ("inside", "between")
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
    where = str(path)
    known = {"devices_per_host", *_RATES, *_LINKS}
    record = _object(record, known, where)
    fields_read: dict[str, Any] = {
        k: _number(record[k], f"{where}: {k}") for k in _RATES if k in record
    }
    for name in _LINKS:
        if name in record:
            fields_read[name] = _link(record[name], getattr(Topology(), name), f"{where}: {name}")
    if "devices_per_host" in record:
        count = record["devices_per_host"]
        if type(count) is not int or not 1 <= count <= MAX_DEVICES:
            raise InvalidInput(
                f"{where}: devices_per_host must be a whole number from 1 to {MAX_DEVICES}, got "
                f"{count!r}"
            )
        fields_read["devices_per_host"] = count
    return Topology(**fields_read, source=f"rates of {where}")


def check_devices(devices: int) -> None:
    """Raise InvalidInput unless a plan can have so many devices."""
    if type(devices) is not int or not 1 <= devices <= MAX_DEVICES:
        raise InvalidInput(f"devices must be a number from 1 to {MAX_DEVICES}, got {devices!r}")


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
        raise InvalidInput(f"{where} has no field {odd[0]!r}; it has {', '.join(sorted(known))}")
    return value


def _number(value: Any, where: str) -> float:
    if type(value) not in {int, float} or not MIN_NUMBER <= value <= MAX_NUMBER:
        raise InvalidInput(
            f"{where} must be a number from {MIN_NUMBER:g} to {MAX_NUMBER:g}, got {value!r}"
        )
    return float(value)
