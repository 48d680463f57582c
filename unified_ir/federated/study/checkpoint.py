"""The progress of a study, saved completely after each round, so kill -9 loses at most one round.

The file is a container of kind "checkpoint". Its tensors are named `shared/NAME`, `slot/NAME`,
`good/NAME` (the state that a study may return to),
`personal/DEVICE/NAME` and `remainder/DEVICE/NAME`, with the device's name quoted as in a URL.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

import numpy as np

from triplane.proto.errors import Conflict, Corrupt
from triplane.unified_ir.federated.algorithms.aggregators import UNLIMITED
from triplane.unified_ir.federated.algorithms.table import algorithm
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.learn import Shard
from triplane.unified_ir.federated.core.spoilt import NO_LOSSES, LossWatch
from triplane.unified_ir.federated.study.trial import DeviceScore, RoundRow
from triplane.unified_ir.files import container
from triplane.unified_ir.files.container import Container

NAME: Final = "study.tpc"
LEFTOVER: Final = f".{NAME}.*.tmp"
"""Temporary files that a process leaves when it is killed while writing."""
STATE: Final = "state.safetensors"
PROGRESS: Final = "progress.json"
MAX_PROGRESS_BYTES: Final = 256 << 20
STUDY: Final = "study"
"""Key of the progress that identifies the study."""
ALWAYS_KEPT: Final = frozenset(
    {"lr", "meta_lr", "inner_steps", "proximal", "server_lr", "beta1", "beta2", "floor"}
)
"""Hyperparameters that are stored for every algorithm, because earlier releases stored them."""
OPEN: Final = ("rounds", "rates")
"""Options that may differ when a study is resumed."""
ROLES: Final = {
    "shared": "parameter", "good": "parameter", "slot": "optimizer",
    "personal": "personal", "remainder": "buffer",
}  # fmt: skip

Owned = Mapping[str, Mapping[str, Array]]
Shards = Mapping[str, Shard]
MAX_SHOWN: Final = 4
"""Number of differences between two studies that a message shows."""
MAX_SHOWN_CHARS: Final = 40


@dataclass(frozen=True, slots=True)
class StudyProgress:
    """The progress of a study: arrays of the cloud and of each device, and the measurements.

    watch, good: of the loss over devices, and the state that it judged good last, empty before.
    used: of a study with differential privacy, the round in which each device was used last, and
    how often it was.
    """

    shared: Mapping[str, Array]
    slots: Mapping[str, Array] = field(default_factory=dict)
    personal: Owned = field(default_factory=dict)
    remainders: Owned = field(default_factory=dict)
    rounds: tuple[RoundRow, ...] = ()
    scores: tuple[DeviceScore, ...] = ()
    watch: LossWatch = NO_LOSSES
    good: Mapping[str, Array] = field(default_factory=dict)
    used: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def taken_back(self, before: StudyProgress, devices: tuple[str, ...]) -> StudyProgress:
        """Return the progress with the devices' own arrays as they were before, if any were."""
        left = frozenset(devices)

        def restored(now: Owned, then: Owned) -> Owned:
            kept = {name: own for name, own in now.items() if name not in left}
            return kept | {name: then[name] for name in devices if name in then}

        return replace(
            self,
            personal=restored(self.personal, before.personal),
            remainders=restored(self.remainders, before.remainders),
        )


def identity(plan: str, study: Any, seen: Shards, unseen: Shards) -> dict[str, str]:
    """Return everything that determines a study's progress, by descriptive names.

    These are the model, the options and the samples. The number of rounds and the rates that are
    tried at the end are left out, since they change nothing that was saved.
    """
    options = {k: v for k, v in asdict(study).items() if k not in OPEN}
    if options["engine"] == "onnx":
        del options["engine"]  # earlier releases had no other
    for added in ("privacy", "masking"):
        if options[added] is None:
            del options[added]
    if study.masking is not None:
        plain = {"groups": 1, "follows": False}  # as in earlier releases
        kept = options["masking"].items()
        options["masking"] = {k: v for k, v in kept if k not in plain or v != plain[k]}
    limits = options.pop("robustness")
    if study.robustness != UNLIMITED:  # earlier releases had no limits
        options["limits"] = {**limits, "numbers": study.robustness.all_numbers}
    declared = {row.name for row in algorithm(study.algorithm).hyper} | ALWAYS_KEPT
    hyper = {f"hyper.{k}": v for k, v in options.pop("hyper").items() if k in declared}
    facts = {k: json.dumps(v) for k, v in (options | hyper).items()}
    facts |= {"model and algorithm": plan}
    if revision := algorithm(study.algorithm).revision:
        facts |= {"file of the algorithm": revision}
    for group, shards in (("devices that learn", seen), ("unseen devices", unseen)):
        facts[group] = json.dumps(sorted(shards))
        facts[f"samples of {group}"] = _digest(shards)
    return facts


def _digest(shards: Shards) -> str:
    """Return SHA-256 over every sample of every device, by name, type, shape and bytes."""
    state = hashlib.sha256()
    for device, shard in sorted(shards.items()):
        for part in ("train", "held_out"):
            for name, x in sorted(getattr(shard, part).items()):
                state.update(f"{device}\n{part}\n{name}\n{x.dtype.str}{x.shape}\n".encode())
                state.update(np.ascontiguousarray(x).data)
    return state.hexdigest()


class Keeper:
    """Stores the newest progress of one study in a folder. study: its `identity`."""

    def __init__(self, folder: Path, study: Mapping[str, str]) -> None:
        """Create the folder now, so that an error comes before any work."""
        self.path, self.study = Path(folder) / NAME, dict(study)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError), _locked(self.path.parent, fcntl.LOCK_EX | fcntl.LOCK_NB):
            # Nobody writes while this lock is held, so these are of processes that were killed.
            for left in self.path.parent.glob(LEFTOVER):
                left.unlink()

    def save(self, place: StudyProgress) -> None:
        """Replace the stored progress, whole or not at all."""
        tensors = _named(place)
        roles = {name: ROLES[name.partition("/")[0]] for name in tensors}
        progress = {
            "rounds": [asdict(row) for row in place.rounds],
            "scores": [asdict(row) for row in place.scores],
            "watch": asdict(place.watch),
            **({"used": place.used} if place.used else {}),
            STUDY: self.study,
        }
        parts = [
            container.part(PROGRESS, json.dumps(progress).encode()),
            container.tensor_part(STATE, tensors, roles),
        ]
        with contextlib.ExitStack() as stack:
            # Without a lock, as on some network file systems, leftovers stay and saving works.
            with contextlib.suppress(OSError):
                stack.enter_context(_locked(self.path.parent, fcntl.LOCK_SH))
            container.write(self.path, "checkpoint", parts, check=container.verified("checkpoint"))

    def newest(self) -> StudyProgress | None:
        """Return the stored progress or None; Conflict if it is of another study, or Corrupt."""
        if not self.path.exists():
            return None
        file = Container(self.path, kind="checkpoint")
        file.verify()
        try:
            progress = _progress(file)
            self._check(progress.get(STUDY))
            return _place(file, progress)
        except (KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"{self.path} does not hold the progress of a study: {error}") from error

    def _check(self, there: Any) -> None:
        """Raise Conflict with the differences if the progress is of another study."""
        if there == self.study:
            return
        known = there if isinstance(there, dict) else {}
        odd = [k for k in sorted(self.study | known) if known.get(k) != self.study.get(k)]
        shown = "; ".join(_differs(k, known.get(k), self.study.get(k)) for k in odd[:MAX_SHOWN])
        raise Conflict(
            f"{self.path} is of another study ({shown or 'of an earlier release'}); resume with "
            "its options and samples, or name another folder"
        )


@contextlib.contextmanager
def _locked(folder: Path, kind: int) -> Iterator[None]:
    """Lock the folder itself until the block ends; the kernel releases it when a process dies."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, kind)
        yield
    finally:
        os.close(handle)


def _differs(name: str, there: Any, here: Any) -> str:
    """Describe differences, as "keep is 0.1 there, 0.2 here".

    Digests and long lists are not shown.
    """
    texts = [str(x) for x in (there, here)]
    if any(len(text) > MAX_SHOWN_CHARS for text in texts) or None in (there, here):
        return f"{name} differ" if name.startswith(("samples", "devices")) else f"{name} differs"
    return f"{name} is {texts[0]} there, {texts[1]} here"


def _place(file: Container, progress: Mapping[str, Any]) -> StudyProgress:
    arrays: dict[str, dict[str, Array]] = {kind: {} for kind in ROLES}
    for name, tensor in file.tensors(STATE).items():
        kind, _, rest = name.partition("/")
        # Copies, so that the file need not stay mapped.
        arrays[kind][rest] = tensor.data.copy()
    return StudyProgress(
        shared=arrays["shared"],
        slots=arrays["slot"],
        personal=_by_device(arrays["personal"]),
        remainders=_by_device(arrays["remainder"]),
        rounds=tuple(RoundRow(**row) for row in progress["rounds"]),
        scores=tuple(DeviceScore(**row) for row in progress["scores"]),
        watch=_watch(progress.get("watch", {})),
        good=arrays["good"],
        used={name: (last, uses) for name, (last, uses) in progress.get("used", {}).items()},
    )


def _watch(stored: Mapping[str, Any]) -> LossWatch:
    return LossWatch(**{**stored, "recent": tuple(stored.get("recent", ()))})


def _named(place: StudyProgress) -> dict[str, Array]:
    tensors = {f"shared/{k}": x for k, x in place.shared.items()}
    tensors |= {f"slot/{k}": x for k, x in place.slots.items()}
    tensors |= {f"good/{k}": x for k, x in place.good.items()}
    for kind, owned in (("personal", place.personal), ("remainder", place.remainders)):
        for who, own in owned.items():
            # Quoted, because a device's name may contain the separator "/".
            tensors |= {f"{kind}/{quote(who, safe='')}/{k}": x for k, x in own.items()}
    return tensors


def _by_device(arrays: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    by_device: dict[str, dict[str, Array]] = {}
    for name, x in arrays.items():
        who, _, rest = name.partition("/")
        by_device.setdefault(unquote(who), {})[rest] = x
    return by_device


def _progress(file: Container) -> dict[str, Any]:
    data = file.part(PROGRESS)
    if len(data) > MAX_PROGRESS_BYTES:
        raise Corrupt(f"{file.path.name}: {PROGRESS} has {len(data)} bytes, too many to read")
    progress = json.loads(bytes(data))
    if not isinstance(progress, dict):
        raise TypeError(f"{PROGRESS} holds no object")
    return progress
