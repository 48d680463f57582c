"""Limits on everything that a node's report contains, checked before it is stored.

A node reports only about itself: its name comes from its certificate, and no field of a report
names another node. A report with a field out of range is refused as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from triplane.proto.documents import (
    MAX_INCIDENTS,
    MAX_MODELS,
    MAX_NUMBER,
    MAX_TEXT_CHARS,
    MAX_TIME_S,
    MAX_VERSION,
)
from triplane.proto.errors import InvalidInput
from triplane.proto.fleet_pb2 import Capability, Incident, ModelReport, NodeState, Report
from triplane.proto.signed_fields import NAME

MAX_REPORT_BYTES: Final = 1 << 20
MAX_TARGETS: Final = 16
MAX_INSTRUCTIONS: Final = 256
MAX_WORD_CHARS: Final = 64
MAX_ROLES: Final = 16
MAX_METADATA_VERSION: Final = (1 << 31) - 1
MAX_BYTES: Final = 1 << 50
MAX_OPSET: Final = 1000
MAX_ADDRESS_CHARS: Final = 260
_NAME: Final = re.compile(NAME)


def check_report(report: Report) -> None:
    """Raise InvalidInput that names the first field that is out of range."""
    size = report.ByteSize()
    _bound("size of the report in bytes", size, MAX_REPORT_BYTES)
    _bound("number", report.number, MAX_NUMBER)
    _bound("desired_number", report.desired_number, MAX_NUMBER)
    _bound("models", len(report.models), MAX_MODELS)
    _bound("incidents", len(report.incidents), MAX_INCIDENTS)
    _seconds("metadata_age_s", report.metadata_age_s, least=-1.0)
    _text("serving_address", report.serving_address, MAX_ADDRESS_CHARS)
    _check_capability(report.capability)
    for model in report.models:
        _check_model(model)
    names = [model.model for model in report.models]
    if len(set(names)) != len(names):
        raise InvalidInput("a report names each model once")
    _words("metadata_versions", report.metadata_versions, MAX_ROLES)
    _digest(report.metadata_sha256)
    for version in report.metadata_versions.values():
        _bound("metadata_versions", version, MAX_METADATA_VERSION)
    for incident in report.incidents:
        _check_incident(incident)


def _check_capability(capability: Capability) -> None:
    _words("capability.targets", capability.targets, MAX_TARGETS)
    _words("capability.instructions", capability.instructions, MAX_INSTRUCTIONS)
    one = (capability.runtime, capability.runtime_version, capability.machine, capability.software)
    _words("capability's names", one, len(one))
    _bound("capability.max_opset", capability.max_opset, MAX_OPSET)
    _bound("capability.memory_bytes", capability.memory_bytes, MAX_BYTES)
    _bound("capability.free_disk_bytes", capability.free_disk_bytes, MAX_BYTES)
    for target in capability.targets:
        if not _NAME.fullmatch(target):
            raise InvalidInput(f"a target's name matches {NAME}, got {target[:100]!r}")


def _check_model(model: ModelReport) -> None:
    if not _NAME.fullmatch(model.model):
        raise InvalidInput(f"a model's name matches {NAME}, got {model.model[:100]!r}")
    if model.state not in NodeState.values():
        raise InvalidInput(f"node state {model.state} is unknown to this cloud; update it first")
    _digest(model.committed_digest)
    _digest(model.committed_sha256)
    _bound("committed_version", model.committed_version, MAX_VERSION)
    _bound("version", model.version, MAX_VERSION)
    _bound("attempt", model.attempt, MAX_NUMBER)
    _bound("downloaded_bytes", model.downloaded_bytes, MAX_BYTES)
    _bound("total_bytes", model.total_bytes, MAX_BYTES)
    _text("reason", model.reason, MAX_TEXT_CHARS)


def _check_incident(incident: Incident) -> None:
    _seconds("incident.time_s", incident.time_s, least=0.0)
    _text("incident.kind", incident.kind, MAX_WORD_CHARS)
    _text("incident.text", incident.text, MAX_TEXT_CHARS)


def _digest(value: bytes) -> None:
    if len(value) not in {0, 32}:
        raise InvalidInput(f"a digest has 32 bytes, got {len(value)}")


def _bound(what: str, value: int, most: int) -> None:
    if value > most:
        raise InvalidInput(f"{what} is at most {most} in a report, got {value}")


def _seconds(what: str, value: float, *, least: float) -> None:
    if not least <= value <= MAX_TIME_S:  # NaN is not
        raise InvalidInput(
            f"{what} is {least:.0f} to {MAX_TIME_S:.0f} seconds in a report, got {value}"
        )


def _text(what: str, value: str, most: int) -> None:
    if len(value) > most:
        raise InvalidInput(f"{what} has at most {most} characters in a report, got {len(value)}")
    if "\0" in value:  # PostgreSQL refuses such text, and one report must not fail a transaction
        raise InvalidInput(f"{what} must not contain a NUL character")


def _words(what: str, values: Iterable[str], most: int) -> None:
    words = list(values)
    _bound(f"number of {what}", len(words), most)
    for word in words:
        _text(what, word, MAX_WORD_CHARS)
