"""The place of a study, kept after each round: whole files, so kill -9 loses one round's work.

The file is a container of kind "checkpoint"; tensors are named by what they belong to:
`shared/NAME`, `slot/NAME`, `personal/DEVICE/NAME`, `remainder/DEVICE/NAME`, a device's name quoted
as in a URL.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

from triplane.proto.errors import Conflict, Corrupt
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.study.trial import DeviceScore, RoundRow
from triplane.unified_ir.files import container
from triplane.unified_ir.files.container import Container

NAME: Final = "study.tpc"
STATE: Final = "state.safetensors"
PROGRESS: Final = "progress.json"
MAX_PROGRESS_BYTES: Final = 256 << 20
STUDY: Final = "study"
"""Property: which study this is of."""
OPEN: Final = ("rounds", "rates")
"""Options that a study may be gone on with at other values."""
ROLES: Final = {
    "shared": "parameter", "slot": "optimizer", "personal": "personal", "remainder": "buffer",
}  # fmt: skip

Owned = Mapping[str, Mapping[str, Array]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a study stands: arrays of the cloud and of each device, and what was measured."""

    shared: Mapping[str, Array]
    slots: Mapping[str, Array] = field(default_factory=dict)
    personal: Owned = field(default_factory=dict)
    remainders: Owned = field(default_factory=dict)
    rounds: tuple[RoundRow, ...] = ()
    scores: tuple[DeviceScore, ...] = ()


def identity(plan: str, study: Any, sizes: Mapping[str, tuple[int, int]]) -> str:
    """Names a study: equal plans, options and devices give the same one.

    How many rounds there are and which rates are tried at the end changes nothing that is kept.
    """
    kept = {k: v for k, v in asdict(study).items() if k not in OPEN}
    text = json.dumps([plan, kept, dict(sizes)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class Keeper:
    """Keeps the newest place of one study in a folder of its own."""

    def __init__(self, folder: Path, study: str) -> None:
        """The folder is made now: one that cannot be is known before any work is done."""
        self.path, self.study = Path(folder) / NAME, study
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def save(self, place: Place) -> None:
        """Replace what is there, whole or not at all."""
        tensors = dict(_named(place))
        roles = {name: ROLES[name.partition("/")[0]] for name in tensors}
        progress = {
            "rounds": [asdict(row) for row in place.rounds],
            "scores": [asdict(row) for row in place.scores],
        }
        parts = [
            container.part(PROGRESS, json.dumps(progress).encode()),
            container.tensor_part(STATE, tensors, roles),
        ]
        container.write(self.path, "checkpoint", parts, properties={STUDY: self.study})

    def newest(self) -> Place | None:
        """What is there, None for nothing. Conflict: of another study; Corrupt: damaged."""
        if not self.path.exists():
            return None
        file = Container(self.path, kind="checkpoint")
        file.verify()
        if dict(file.manifest.properties).get(STUDY) != self.study:
            raise Conflict(
                f"{self.path} is of another study: other options, model or devices; go on with "
                "those, or name another folder"
            )
        try:
            return _place(file, _progress(file))
        except (KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"{self.path} is no study's place: {error}") from error


def _place(file: Container, progress: Mapping[str, Any]) -> Place:
    arrays: dict[str, dict[str, Array]] = {kind: {} for kind in ROLES}
    for name, tensor in file.tensors(STATE).items():
        kind, _, rest = name.partition("/")
        arrays[kind][rest] = tensor.data.copy()
    return Place(
        shared=arrays["shared"],
        slots=arrays["slot"],
        personal=_by_device(arrays["personal"]),
        remainders=_by_device(arrays["remainder"]),
        rounds=tuple(RoundRow(**row) for row in progress["rounds"]),
        scores=tuple(DeviceScore(**row) for row in progress["scores"]),
    )


def _named(place: Place) -> dict[str, Array]:
    found = {f"shared/{k}": x for k, x in place.shared.items()}
    found |= {f"slot/{k}": x for k, x in place.slots.items()}
    for kind, owned in (("personal", place.personal), ("remainder", place.remainders)):
        for who, own in owned.items():
            found |= {f"{kind}/{quote(who, safe='')}/{k}": x for k, x in own.items()}
    return found


def _by_device(arrays: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    found: dict[str, dict[str, Array]] = {}
    for name, x in arrays.items():
        who, _, rest = name.partition("/")
        found.setdefault(unquote(who), {})[rest] = x
    return found


def _progress(file: Container) -> dict[str, Any]:
    data = file.part(PROGRESS)
    if len(data) > MAX_PROGRESS_BYTES:
        raise Corrupt(f"{file.path.name}: {PROGRESS} has {len(data)} bytes, too many to read")
    found = json.loads(bytes(data))
    if not isinstance(found, dict):
        raise TypeError(f"{PROGRESS} holds no object")
    return found
