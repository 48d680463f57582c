"""What this device has spent of its privacy over all runs: `privacy.json` in its home.

A use is charged before its update leaves: the file is written, synced and read back first. An
update whose charge was written and whose bytes were lost is sent again with the same bytes or not
at all, so that a crash gives no second update for one charge. A damaged file stops the device from
taking part in such runs, as it would otherwise forget what was spent.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from triplane.device.home import DeviceHome, DeviceSettings
from triplane.proto import federation_pb2 as pb
from triplane.proto.disk import OS_DISK, lock_file, refusal, write_atomic
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, Unavailable
from triplane.unified_ir.federated.privacy.accountant import (
    CONCENTRATED,
    GAUSSIAN,
    MAX_EPSILON,
    NoiseEvent,
    check_delta,
)
from triplane.unified_ir.federated.privacy.budget import DeviceBudget
from triplane.unified_ir.federated.privacy.clipping import check_norm

MAX_FILE_BYTES: Final = 64 << 20
MAX_STD: Final = 2.0**25
"""Largest deviation of the device's own noise, in steps of its integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseTask:
    """What a task asks of the device's change, and what the round costs it.

    clip: the norm to which the change is clipped. event: one use. variance: of the noise that the
    device adds to each of its masked integers, in steps squared; 0: the cloud adds the noise.
    bit_variance: of that in its clipping bit; 0: a masked update has none.
    """

    clip: float
    event: NoiseEvent
    variance: int = 0
    bit_variance: int = 0


def noise_task(message: pb.NoiseTerms, *, masked: bool) -> NoiseTask:
    """Parse what a cloud asks for. InvalidInput: a value is out of range.

    masked: whether the update is masked; then, and only then, the device adds the noise.
    """
    check_norm(message.clip)
    check_delta(message.delta)
    if message.own_std and not masked:
        raise InvalidInput(
            "this device adds no noise of its own to an update in the clear, which its noise alone "
            "would not hide; the task states a deviation of "
            f"{message.own_std:g} steps and no masking"
        )
    if masked and not message.own_std:
        raise InvalidInput(
            "this device relies on no noise of the cloud in masked rounds, where the integers are "
            "longer than what was clipped; the task states none for the device to add"
        )
    if bool(message.own_bit_std) != (masked and message.clip_bit):
        raise InvalidInput(
            "a clipping bit gets noise of the device exactly if the update is masked; the task "
            f"states a deviation of {message.own_bit_std:g} for it"
        )
    law = CONCENTRATED if message.own_std else GAUSSIAN
    return NoiseTask(
        clip=message.clip,
        event=NoiseEvent(message.multiplier, 1, law, message.separation),
        variance=_variance(message.own_std),
        bit_variance=_variance(message.own_bit_std),
    )


def _variance(std: float) -> int:
    if std and not 1 <= std <= MAX_STD:
        raise InvalidInput(
            f"a device's own noise has a deviation of 1 to {MAX_STD:g} steps, got {std:g}"
        )
    # Variances are whole, and the root of one in float64 leads back to it.
    return round(std * std)


class PrivacyAccount:
    """The account of a home, and the limits of its owner."""

    def __init__(self, home: DeviceHome, settings: DeviceSettings) -> None:
        self._path = home.privacy_file
        self._limited = settings.privacy_epsilon > 0
        self._epsilon = settings.privacy_epsilon or MAX_EPSILON
        self._delta = settings.privacy_delta

    def check(self, run: str, round_: int, lease: str, noise: NoiseTask | None) -> None:
        """Raise Conflict if the round may not have a new update of this device."""
        if noise is not None:
            budget = self._budget()
            if budget.charge(run, round_, noise.event, lease) is budget:
                raise Conflict(
                    f"the update of round {round_} was charged before, and is not here any more; a "
                    "second one under the same lease would be free"
                )
        else:
            self._check_unlimited()

    def charge(self, run: str, round_: int, lease: str, noise: NoiseTask | None) -> None:
        """Charge a use, durably. Conflict: it does not fit. Unavailable: the disk failed.

        noise: None if the task asks for none, which may differ from what it asked when the device
        learned.
        """
        if noise is None:
            self._check_unlimited()
            return
        with self._locked():
            before = self._budget()
            after = before.charge(run, round_, noise.event, lease)
            if after is before:
                # A kill, or an error of the last sync, may have left the name unsynced.
                try:
                    OS_DISK.sync_folder(self._path.parent)
                except OSError as error:
                    raise refusal(error, f"could not sync {self._path}: {error}") from error
                return
            write_atomic(self._path, json.dumps(after.to_json()).encode())
            if self._budget() != after:
                raise Unavailable(f"{self._path} does not hold what was just written to it")

    def _check_unlimited(self) -> None:
        if self._limited:
            raise Conflict(
                "this device takes part in runs with differential privacy only, because its owner "
                f"limits what it spends (privacy_epsilon {self._epsilon:g} in device.json); the "
                "run has no noise"
            )

    @property
    def spent(self) -> float:
        """Epsilon that is spent, at the delta of the settings."""
        return self._budget().spent

    def _budget(self) -> DeviceBudget:
        if not self._path.exists():
            return DeviceBudget(self._epsilon, self._delta)
        try:
            with self._path.open("rb") as file:
                stored = json.loads(file.read(MAX_FILE_BYTES))
            runs = DeviceBudget.from_json(stored).runs
        except OSError as error:
            raise Unavailable(f"{self._path} cannot be read: {error}") from error
        except (ValueError, RecursionError) as error:
            raise Corrupt(
                f"{self._path} does not hold what this device has spent ({error}); restore it from "
                "a backup, because without it nobody knows what updates of this device revealed"
            ) from error
        # The owner's present limits, which may have changed since.
        return DeviceBudget(self._epsilon, self._delta, runs)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            file = lock_file(self._path.with_suffix(".lock"))
        except BlockingIOError as error:
            raise Unavailable(f"another process charges {self._path}; try again") from error
        with file:
            yield
