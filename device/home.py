"""The home of a device: its files, and its settings (`device.json`).

identity/      key and certificate          plans/     plans and states by SHA-256
personal/      what never leaves            pending/   updates that were not settled yet
trust/         signed metadata              lock       held by the one process that uses it
device.json    settings                     privacy.json  what it has spent of its privacy
device.json    settings
masking.ledger what it signed in masked rounds
"""

import contextlib
import fcntl
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from triplane.proto.disk import OS_DISK, AppendFile, lock_file, write_atomic
from triplane.proto.errors import Conflict, InvalidInput, Unavailable
from triplane.proto.machine_home import MachineHome
from triplane.proto.plan_statement import Least, LeastMasking
from triplane.unified_ir.federated.core.defaults import HELD_OUT
from triplane.unified_ir.federated.privacy.accountant import DELTA, check_delta, check_epsilon

DEFAULT_HOME: Final = "~/.triplane/device"
MAX_NOTE_BYTES: Final = 64 << 10
POPULATION: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
"""Pattern of a population's name."""
RENEWAL_S: Final = 60.0
CHILD_ENDS_S: Final = 10.0
"""Longest wait for the child of a killed device to end."""
BOOTSTRAP: Final = "bootstrap.json"
"""The first root, as `proto/signed/trust.py` stores it; it is not imported here for its size."""
TEMPORARY: Final = ".*.tmp"
"""Pattern of temporary files, which a killed process may leave."""
FORM: Final[Mapping[str, str]] = {
    "window": "a whole number",
    "size": "[height, width] or [channels, height, width]",
    "query": "a text",
    "pixels": "true or false",
    "keep": "a list of columns",
}
"""Options of `data.load` beside the columns, and their values in `device.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSettings:
    """The settings in `device.json`.

    population: the device takes part in runs of this population. data: the file or folder of its
    samples, for the command. x, y: the columns of inputs and target in it. form: more options of
    reading it (`FORM`). held_out: share of the samples that are never used for learning.
    max_disk_bytes: limit for all plans and states; max_blob_bytes: limit for each of them.
    max_memory_bytes, max_cpu_s: limits of one task beyond what the process takes without it, 0 for
    none; they apply if tasks run in a child process. max_cpu_s limits the sum over all threads.
    least_devices, least_batch, least_steps, least_held_out: smallest rounds that the device takes
    part in, and fewest samples of a score, beyond what a plan's signature demands. scores: whether
    it scores at all. algorithms: the only ones that it runs, if there are any.
    plans_by_people: run no plan that only the cloud's key has signed, within the policy.
    privacy_epsilon, privacy_delta: what updates to all runs together may spend, 0 for no limit;
    with a limit, the device learns only in runs with differential privacy.
    roster_required: take part only while a signed roster of devices lists this device.
    masked_only: send no update and no score in the clear. least_colluding_share, most_failure: the
    weakest masking that the device takes part in, see `LeastMasking`.
    """

    population: str = "default"
    data: str = ""
    x: tuple[str, ...] = ()
    y: tuple[str, ...] = ()
    form: Mapping[str, Any] = field(default_factory=dict)
    held_out: float = HELD_OUT
    max_disk_bytes: int = 4 << 30
    max_blob_bytes: int = 1 << 30
    max_memory_bytes: int = 4 << 30
    max_cpu_s: float = 3600.0 * (os.cpu_count() or 1)
    least_devices: int = 1
    least_batch: int = 1
    least_steps: int = 1
    least_held_out: int = 2
    algorithms: tuple[str, ...] = ()
    plans_by_people: bool = False
    privacy_epsilon: float = 0.0
    privacy_delta: float = DELTA
    roster_required: bool = False
    masked_only: bool = False
    scores: bool = True
    least_colluding_share: float = 0.0
    most_failure: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("x", "y", "algorithms"):
            choices = getattr(self, name)
            if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
                object.__setattr__(self, name, tuple(choices))  # JSON has lists
        object.__setattr__(self, "form", checked_form(self.form))
        wanted = {f.name: type(f.default) for f in fields(DeviceSettings) if f.name != "form"}
        for name, kind in wanted.items():
            value = getattr(self, name)
            # Not isinstance: true is an int in Python. A whole number may stand for a float in
            # JSON.
            if type(value) is not kind and not (kind is float and type(value) is int):
                raise InvalidInput(f"{name} is {kind.__name__}, got {value!r}")
        if not POPULATION.fullmatch(self.population):
            raise InvalidInput(
                "a population's name has 1 to 63 of a-z, 0-9, '.', '_', '-' and begins with a "
                f"letter or digit, got {self.population[:80]!r}"
            )
        if not (math.isfinite(self.max_cpu_s) and min(self.max_cpu_s, self.max_memory_bytes) >= 0):
            raise InvalidInput(
                "max_memory_bytes and max_cpu_s are positive, or 0 for no limit, got "
                f"{self.max_memory_bytes} and {self.max_cpu_s}"
            )
        check_delta(self.privacy_delta)
        if self.privacy_epsilon:
            check_epsilon(self.privacy_epsilon)
        _ = self.least, self.least_masking  # raise InvalidInput
        if not (math.isfinite(self.held_out) and 0 <= self.held_out < 1):
            raise InvalidInput(f"held_out must be a share in [0, 1), got {self.held_out}")

    @property
    def least(self) -> Least:
        """The smallest round that the device takes part in."""
        sizes = self.least_devices, self.least_batch, self.least_steps, self.least_held_out
        return Least(*sizes)

    def scoring_samples(self, held_out: int) -> int:
        """Return the number of held-out samples to offer: 0 if the owner's rules let none score."""
        return held_out if self.scores and held_out >= self.least_held_out else 0

    @property
    def least_masking(self) -> LeastMasking:
        """The weakest masking that the device takes part in."""
        return LeastMasking(self.least_colluding_share, self.most_failure)

    def but(
        self,
        *,
        data: Path | None,
        population: str | None,
        held_out: float | None,
        x: Sequence[str] = (),
        y: Sequence[str] = (),
        form: Mapping[str, Any] | None = None,
    ) -> "DeviceSettings":
        """Return these settings with the arguments that are not None or empty in their place."""
        # Absolute, because the service may start in another folder than the command that enrolled.
        path = None if data is None else str(Path(data).absolute())
        changes: dict[str, Any] = {"data": path, "population": population, "held_out": held_out}
        changes |= {"x": tuple(x) or None, "y": tuple(y) or None}
        changes["form"] = {**self.form, **(form or {})}
        return replace(self, **{k: v for k, v in changes.items() if v is not None})


def checked_form(form: Any) -> dict[str, Any]:
    """Return options of reading data; InvalidInput unless they are some of `FORM`."""
    if not isinstance(form, Mapping):
        raise InvalidInput(f"form is an object of options, got {form!r}")
    for name, value in form.items():
        if name not in FORM:
            raise InvalidInput(f"options of reading data are {', '.join(FORM)}, got {name!r}")
        if not _is_form(name, value):
            raise InvalidInput(f"{name} is {FORM[name]}, got {value!r}")
    return {name: tuple(v) if isinstance(v, list) else v for name, v in form.items()}


def _is_form(name: str, value: Any) -> bool:
    if name == "size":
        is_list = isinstance(value, list | tuple) and len(value) in {2, 3}
        return is_list and all(type(n) is int and n > 0 for n in value)
    if name == "keep":
        return isinstance(value, list | tuple) and all(type(k) is str for k in value)
    return type(value) is {"window": int, "query": str, "pixels": bool}[name]


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """The facts of a certificate that a device needs.

    renew_at_s: seconds since 1970. key: SHA-256 of the public key in hexadecimal, by which a roster
    lists the device.
    """

    name: str
    renew_at_s: float
    key: str


@dataclass(frozen=True, slots=True)
class SessionNote:
    """The newest state of a device's session with its cloud.

    state: "connecting" until the first document, then "idle" (no run asks this device) or
    "working". population: the one that was offered. since_s: seconds since 1970. population_asked:
    whether a run asks that population, this device or others; None if the cloud has not said so.
    """

    state: str
    population: str
    since_s: float
    population_asked: bool | None = None


class DeviceHome(MachineHome[DeviceSettings]):
    """Paths of a device's home."""

    role, verb, settings_name = "device", "device", "device.json"

    def __init__(self, path: Path | str) -> None:
        super().__init__(path, DeviceSettings)
        self.plans = self.path / "plans"
        self.personal = self.path / "personal"
        self.pending = self.path / "pending"
        self.model = self.personal / "model"
        self.trust = self.path / "trust"
        self.roster_file = self.trust / "roster.json"
        self.enrolled_file = self.path / "enrolled.json"
        self.session_file = self.path / "session.json"
        self.privacy_file = self.path / "privacy.json"
        self.masking_ledger = self.path / "masking.ledger"

    def make(self) -> None:
        """Make the folders; only this user may enter."""
        self.make_folders(self.plans, self.personal, self.pending, self.trust)

    @property
    def has_root(self) -> bool:
        """Whether the home has a first root of signed metadata, from its enrolment."""
        return (self.trust / BOOTSTRAP).is_file()

    @property
    def enrolled(self) -> DeviceIdentity:
        """The stored facts of the certificate, so that the device's process need not parse it."""
        try:
            parsed = json.loads(self.enrolled_file.read_bytes()[:MAX_NOTE_BYTES])
            name, key = str(parsed["name"]), str(parsed["key"])
            return DeviceIdentity(name, float(parsed["renew_at_s"]), key)
        except (OSError, ValueError, TypeError, KeyError):
            return self.note_certificate()

    def note_certificate(self) -> DeviceIdentity:
        """Read the certificate, and store and return the facts that a device needs."""
        from triplane.proto.identity import key_digest, renewal_due_s

        key = key_digest(self.identity.certificate).hex()
        device = DeviceIdentity(self.identity.name, renewal_due_s(self.identity), key)
        write_atomic(self.enrolled_file, json.dumps(asdict(device)).encode())
        return device

    @property
    def session(self) -> SessionNote | None:
        """The note that `note_session` wrote last; None if none can be read."""
        try:
            parsed = json.loads(self.session_file.read_bytes()[:MAX_NOTE_BYTES])
            asked = parsed.get("population_asked")
            return SessionNote(
                state=str(parsed["state"]),
                population=str(parsed["population"]),
                since_s=float(parsed["since_s"]),
                population_asked=None if asked is None else bool(asked),
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def note_session(self, session: SessionNote) -> None:
        """Store a note for `triplane device status`. It expires with the process: no sync."""
        new = self.session_file.with_suffix(".new")
        with contextlib.suppress(OSError):  # a full disk must not end the device
            new.write_text(json.dumps(asdict(session)))
            new.replace(self.session_file)

    def renew(self) -> None:
        """Renew the certificate in a short-lived process, because its imports take much memory.

        Unavailable if that fails, with the last line of the process.
        """
        command = [sys.executable, "-m", "triplane.device.renewing", str(self.path)]
        try:
            done = subprocess.run(command, capture_output=True, check=False, timeout=RENEWAL_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"the certificate was not renewed: {error}") from error
        if done.returncode:
            reason = done.stderr.decode(errors="replace").strip()[-500:]
            raise Unavailable(f"the certificate was not renewed: {reason}")

    @property
    def is_held(self) -> bool:
        """Whether a process uses this home."""
        try:
            with (self.path / "lock").open("rb") as file:
                # A shared lock, so that two `status` commands at once do not take each other for a
                # device.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lock the home during the block; a kill unlocks it. Conflict if it is locked already."""
        try:
            file = lock_file(self.path / "lock")
        except BlockingIOError as error:
            raise Conflict(
                f"another process works in {self.path}; one home is one device"
            ) from error
        with file:
            # Only wait here: the child takes this lock itself when it starts.
            self.lock_for_tasks().close()
            self.recover()
            yield

    def lock_for_tasks(self) -> BinaryIO:
        """Lock the tasks of this home until the file is closed.

        It waits for the child of a killed device, which ends soon. Conflict if it does not end.
        """
        until_s = time.monotonic() + CHILD_ENDS_S
        while True:
            try:
                return lock_file(self.path / "tasks.lock")
            except BlockingIOError as error:
                if time.monotonic() > until_s:
                    raise Conflict(
                        f"another process does tasks in {self.path}; one home is one device"
                    ) from error
                time.sleep(0.01)

    def recover(self) -> None:
        """Remove incomplete files of a killed process, and sync incomplete downloads.

        A download that is completed later gets its name without being read again, so bytes that the
        killed process had not synced are synced here; otherwise a power cut might damage it.
        """
        unfinished = [*self.pending.glob("*.new")]
        folders = (self.path, self.personal, self.pending, self.trust, self.trust / "metadata")
        for folder in folders:
            unfinished += folder.glob(TEMPORARY)
        for path in self.pending.glob("*.out"):
            unfinished += [path] if not path.with_suffix(".update").exists() else []
        for path in unfinished:
            OS_DISK.remove(path)
        for path in (self.plans / "partial").glob("*"):
            file = AppendFile(path)
            file.sync()
            file.close()
