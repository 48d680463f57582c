"""The processes of one run, joined by `jax.distributed`, each with some of the mesh's devices."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import groupby
from math import gcd
from pathlib import Path
from typing import Any, Final

import numpy as np

from triplane.proto.errors import Conflict, InvalidInput, TriplaneError, Unavailable
from triplane.unified_ir.engines.xla.door import coordination, exact, jax, stop_is_due
from triplane.unified_ir.engines.xla.hosts import Hosts, ProcessLost

WAIT_S: Final = 3600
"""Limit of a wait for other processes that live: to load their data, to write a checkpoint."""
MAX_MOVERS: Final = 1024
"""Programs that are kept which gather, or split otherwise, one array."""
MAX_SHOWN: Final = 200
_MACHINES: Final = "triplane/machine/"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SCATTERS: Final = (" reduce-scatter(", " reduce-scatter-start(")

_BROKEN: Final = re.compile(r"gloo|nccl|coordination|heartbeat|unavailable|barrier", re.IGNORECASE)
"""Errors of communication, in the words of its libraries; others are the program's own."""

_joined: list[Processes] = []


def join(hosts: Hosts) -> Processes:
    """Connect this process to the others, once; wait until all are there.

    InvalidInput: no Hosts, or JAX has been used before. Conflict: the process has joined another
    run. Unavailable: the first process cannot listen at its port, or the others did not come.
    """
    if not isinstance(hosts, Hosts):
        raise InvalidInput(
            "hosts is a Hosts, such as Hosts(coordinator='node1:9300', process=1, count=4), got "
            f"{hosts!r}"
        )
    if _joined:
        if _joined[0].hosts != hosts:
            raise Conflict(f"this process is already {_joined[0].hosts}, it cannot be {hosts} too")
        return _joined[0]
    if hosts.process == 1:
        _check_port(hosts)
    try:
        jax.distributed.initialize(
            hosts.coordinator,
            hosts.count,
            hosts.process - 1,
            cluster_detection_method="deactivate",
            coordinator_bind_address=hosts.bind_address,
            initialization_timeout=hosts.meet_within_s,
            heartbeat_timeout_seconds=hosts.heartbeat_s,
            # One that fails must not be kept alive by its wait for the others.
            shutdown_timeout_seconds=hosts.heartbeat_s,
        )
    except jax.errors.JaxRuntimeError as error:
        raise Unavailable(
            f"{hosts} could not join the run: is the first process reachable at that address, its "
            f"port free, and each number taken once? (JAX: {_shown(error)})"
        ) from error
    except RuntimeError as error:
        raise InvalidInput(
            "hosts must be given before JAX is used in this process: create the engine first "
            f"(JAX: {_shown(error)})"
        ) from error
    machines = _meet(hosts)
    _joined.append(Processes(hosts, neighbours(jax.devices(), machines)))
    return _joined[0]


def _check_port(hosts: Hosts) -> None:
    """Refuse a port that is taken: JAX ends in a segmentation fault, or shares it between runs."""
    host, _, port = hosts.bind_address.rpartition(":")
    on_all = host == "[::]" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if on_all or host == "[::1]" else socket.AF_INET
    name = "" if host == "[::]" else host.strip("[]")
    try:
        socket.create_server((name, int(port)), family=family, dualstack_ipv6=on_all).close()
    except OSError as error:
        if error.errno not in {errno.EADDRINUSE, errno.EACCES}:
            return  # an address that JAX may resolve otherwise
        raise Unavailable(
            f"{hosts} cannot listen on port {port} of this machine: {os.strerror(error.errno)}"
            "; does another run use it, or a second process 1? Choose another port for all of them"
        ) from error


def _meet(hosts: Hosts) -> dict[int, str]:
    """Let JAX learn of the devices of all processes; return which machine each is on, from 0."""
    store = coordination()
    try:
        store.key_value_set(f"{_MACHINES}{hosts.process - 1}", _machine())
        jax.devices()  # waits for all processes, which have said their machine by then
        said = dict(store.key_value_dir_get(_MACHINES))
    except (RuntimeError, AssertionError) as error:
        raise Unavailable(
            f"{hosts}: the devices of the other processes did not become known; one of them has "
            f"probably ended (JAX: {_shown(error)})"
        ) from error
    return {int(key.removeprefix(_MACHINES)): machine for key, machine in said.items()}


def _machine() -> str:
    """Return what only processes of this machine return."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def neighbours(devices: Iterable[Any], machines: Mapping[int, str]) -> int:
    """Return how many devices, in order, are always on one machine.

    machines: by the number of a process. The greatest common divisor, where machines have unequal
    numbers; ranks that are dealt out to machines in turn leave the devices of one process.
    """
    runs = groupby(devices, key=lambda device: machines[device.process_index])
    return gcd(*(len(list(run)) for _, run in runs))


class Processes:
    """The processes of a run, seen from one of them. All of them make the same calls in order."""

    def __init__(self, hosts: Hosts, devices_per_host: int) -> None:
        self.hosts, self.devices_per_host = hosts, devices_per_host
        self._waits = self._checks = 0

    @property
    def is_first(self) -> bool:
        """Return whether this process writes what is written once."""
        return self.hosts.process == 1

    def wait(self, what: str) -> None:
        """Return when every process has come here; ProcessLost if one has not."""
        self._waits += 1
        name = f"triplane/{self._waits}/{what}"
        with self.noticing_loss():
            coordination().wait_at_barrier(name, WAIT_S * 1000)

    def agreed(self, what: str, value: Any) -> Any:
        """Return the first process's value, which is ready for JSON, in every process."""
        self._waits += 1
        name, store = f"triplane/{self._waits}/{what}", coordination()
        with self.noticing_loss():
            if self.is_first:
                store.key_value_set(name, json.dumps(value))
            return json.loads(store.blocking_key_value_get(name, WAIT_S * 1000))

    def difference(self, facts: Mapping[str, str]) -> tuple[int, str, str, str] | None:
        """See `ProcessGroup.difference`."""
        self._waits += 1
        place, store = f"triplane/{self._waits}/", coordination()
        count = str(self.hosts.count)
        mine = {"number of processes": count, **facts, "version of JAX": jax.__version__}
        with self.noticing_loss():
            store.key_value_set(f"{place}{self.hosts.process}", json.dumps(mine))
            if self.is_first:
                store.key_value_set(f"{place}verdict", json.dumps(self._compared(place, mine)))
            verdict = json.loads(store.blocking_key_value_get(f"{place}verdict", WAIT_S * 1000))
        # Before the first process may end, which takes the store with it.
        self.wait("compared")
        return tuple(verdict) if verdict else None

    def _compared(self, place: str, mine: Mapping[str, str]) -> tuple[int, str, str, str] | None:
        for number in range(2, self.hosts.count + 1):
            text = coordination().blocking_key_value_get(f"{place}{number}", WAIT_S * 1000)
            theirs = json.loads(text)
            for part in {**mine, **theirs}:
                there, here = theirs.get(part, "none"), mine.get(part, "none")
                if here != there:
                    return number, part, there, here
        return None

    def stops(self) -> bool:
        """Return, in the same call in every process, whether one of them received SIGTERM."""
        # JAX agrees on a number of this count that no process has reached.
        self._checks += 1
        return stop_is_due(self._checks)

    def put(self, arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
        """Return arrays over the devices of all processes; each puts the parts of its own devices.

        Arrays that are not on the mesh yet are the same in every process.
        """
        return [_put(x, s) for x, s in zip(arrays, shardings, strict=True)]

    @contextmanager
    def noticing_loss(self) -> Iterator[None]:
        """Raise ProcessLost where what is done within ends early as another process is gone."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if isinstance(error, TriplaneError) or not _BROKEN.search(str(error)):
                raise
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> ProcessLost:
        """Return the error, after JAX has said which process is missing, or has ended this one."""
        try:
            # Fails as soon as a heartbeat is missing. Others may live and be cut off from the
            # missing one only indirectly, so who does not come here says nothing.
            coordination().wait_at_barrier("triplane/lost", 3000 * self.hosts.heartbeat_s)
        except jax.errors.JaxRuntimeError as verdict:
            error = verdict
        return ProcessLost(
            "the processes lost each other, so the run has ended and can go on from its "
            f"checkpoint: {_shown(error)}"
        )

    def checked(self, call: Any) -> Callable[..., Any]:
        """Return a compiled function whose program was read before it ran; see `check_program`."""
        compiled: list[Any] = []

        def run(state: Sequence[Any], batch: Sequence[Any]) -> Any:
            if not compiled:
                program = _read(call.lower(state, batch).compile())
                # One that compiles for long must not let the collectives of others run out of time.
                self.wait("compiled")
                compiled.append(program)
            return compiled[0](state, batch)

        return run


def _read(program: Any) -> Any:
    """Return a compiled program after its text was checked, where that is needed."""
    if jax.default_backend() == "cpu":
        check_program(program.as_text())
    return program


def check_program(text: str) -> None:
    """Refuse the text of a compiled program with a reduce-scatter between processes on CPUs."""
    for line in text.splitlines():
        if not any(kind in line for kind in _SCATTERS):
            continue
        raise InvalidInput(
            "the reduce-scatter of JAX between processes on CPUs returns wrong sums without an "
            f"error, and XLA compiled one, {line.partition('=')[0].strip()}; keep the state whole "
            "on each device (no --shard), choose another mesh, or run on GPUs"
        )


def gathered(x: Any) -> Any:
    """Return an array that this process can read; all call this if they hold different parts."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return x
    everywhere = jax.sharding.NamedSharding(x.sharding.mesh, jax.sharding.PartitionSpec())
    with _joined[0].noticing_loss():
        return jax.block_until_ready(_moved(x, everywhere))


def _moved(x: Any, sharding: Any) -> Any:
    return _mover(x.shape, x.dtype, x.sharding, sharding)(x)


@lru_cache(maxsize=MAX_MOVERS)
def _mover(shape: tuple[int, ...], dtype: Any, source: Any, target: Any) -> Any:
    """Return the program that takes an array over the mesh from one sharding to another."""
    with exact():
        x = jax.ShapeDtypeStruct(shape, dtype, sharding=source)
        return _read(jax.jit(lambda a: a, out_shardings=target).lower(x).compile())


def _put(x: Any, sharding: Any) -> Any:
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
        return x
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return _moved(x, sharding)
    held = np.asarray(x)
    # A copy of each part: on a CPU JAX would otherwise read the caller's memory, which may change.
    return jax.make_array_from_callback(held.shape, sharding, lambda at: held[at].copy())


def _shown(error: Exception) -> str:
    return " ".join(str(error).split())[: 2 * MAX_SHOWN]
