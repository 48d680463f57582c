"""Model files are opened in children: checked when pushed, converted when a bundle is wanted.

A child has a session (and process group) of its own, limits of memory, time and file size, and an
empty folder that goes with it. Whatever happens to it, the cloud gets an answer or a family:
what the child refused, as it told it; `Unavailable` where it died or was too slow, since another
try may end otherwise. Nothing a child writes counts until the cloud has taken it over.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from triplane.cloud.registry.values import ConversionRecipe, Needs
from triplane.proto import errors
from triplane.proto.errors import TriplaneError, Unavailable

logger = logging.getLogger(__name__)

COMMAND: Final = (sys.executable, "-m", "triplane.cloud.registry.converting")
MAX_ANSWER_BYTES: Final = 64 << 10
MAX_LOGGED_CHARS: Final = 2000
MAX_REASON_CHARS: Final = 2000
MAX_REPORT_BYTES: Final = 4 << 20
"""Of a bundle's report, as it is read from a bundle."""
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_PREFIX: Final = "job-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one child, and how many convert at a time.

    A check has `check_s`, and a second more for every `check_bytes_per_s` of its file.
    """

    memory_bytes: int = 4 << 30
    file_bytes: int = 8 << 30
    check_s: float = 120.0
    check_bytes_per_s: int = 16 << 20
    convert_s: float = 1800.0
    checks: int = 2
    conversions: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """A model file and its recipe with the samples it names, as files here."""

    name: str
    model: Path
    recipe: ConversionRecipe
    calibration: Path | None = None
    evaluation: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A finished bundle at `path`.

    report: its measured figures, the one part that differs between two conversions of a model.
    """

    path: Path
    size: int
    root_digest: bytes
    content_digest: bytes
    needs: Needs
    report: bytes = b""


class Conversions:
    """Runs the children. folder: for their files; whatever an earlier cloud left there goes."""

    def __init__(
        self, folder: Path, limits: Limits = Limits(), command: tuple[str, ...] = COMMAND
    ) -> None:
        self._folder, self._limits, self._command = folder, limits, command
        self._checks = asyncio.Semaphore(limits.checks)
        self._conversions = asyncio.Semaphore(limits.conversions)
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)

    async def check(self, files: Files) -> bytes:
        """Return the root digest of a sound model file; raises what is wrong with it."""
        seconds = self._limits.check_s + files.model.stat().st_size / self._limits.check_bytes_per_s
        async with self._checks, self._job() as job:
            done = await self._run(job, _order("check", files, job), seconds)
        with _expected():
            return bytes.fromhex(done["model_digest"])

    @contextlib.asynccontextmanager
    async def convert(
        self, files: Files, *, version: int, target: str, model_digest: bytes, report: bytes = b""
    ) -> AsyncIterator[Made]:
        """Give the bundle of a version, whose file is there until the block ends.

        report: of an earlier conversion. With it the bundle is the earlier one, byte for byte.
        """
        async with self._conversions, self._job() as job:
            out, new_report = job / "made.bundle", job / "report.json"
            kept_report = job / "kept-report.json"
            if report:
                await asyncio.to_thread(kept_report.write_bytes, report)
            order = _order("convert", files, job) | {
                "version": str(version),
                "target": target,
                "model_digest": model_digest.hex(),
                "out": str(out),
                "report": str(new_report),
                "kept_report": str(kept_report) if report else None,
            }
            done = await self._run(job, order, self._limits.convert_s)
            with _expected():
                made = _made(done, out, new_report)
            yield made

    @contextlib.asynccontextmanager
    async def _job(self) -> AsyncIterator[Path]:
        try:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._folder))
        except OSError as error:
            raise Unavailable(f"no room for a conversion in {self._folder}: {error}") from error
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    async def _run(self, job: Path, order: dict[str, Any], seconds: float) -> dict[str, Any]:
        limits = {
            "memory_bytes": self._limits.memory_bytes,
            "file_bytes": self._limits.file_bytes,
            "seconds": seconds,
        }
        line = json.dumps(order | {"limits": limits}).encode() + b"\n"
        with (job / "stderr").open("wb") as stderr:
            child = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                cwd=job,
                env=_environment(),
            )
        try:
            async with asyncio.timeout(seconds):
                answer = await _talk(child, line)
        except TimeoutError:
            raise Unavailable(f"the child was ended: it took longer than {seconds:g} s") from None
        finally:
            await _end(child)
        return self._answer(answer, child.returncode, job)

    def _answer(self, answer: bytes, status: int | None, job: Path) -> dict[str, Any]:
        if not answer.endswith(b"\n"):
            tail = _tail(job / "stderr")
            logger.error("conversion child died", extra={"status": status, "stderr": tail})
            last = tail.strip().splitlines()[-1:] or ["it said nothing"]
            raise Unavailable(f"the child {_ending(status)}: {last[0][:MAX_REASON_CHARS]}")
        told = _document(answer)
        if "refused" in told:
            raise _refusal(told)
        return _document(told.get("done"))


async def _talk(child: asyncio.subprocess.Process, line: bytes) -> bytes:
    """Order and answer; standard input stays open, its end would end the child."""
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(ConnectionError):  # it died before it read; its answer is empty
        child.stdin.write(line)
        await child.stdin.drain()
    answer = bytearray()
    while chunk := await child.stdout.read(MAX_ANSWER_BYTES):
        answer += chunk
        if len(answer) > MAX_ANSWER_BYTES:
            raise Unavailable(f"the child said more than {MAX_ANSWER_BYTES} bytes")
        if answer.endswith(b"\n"):
            break
    else:
        await child.wait()
    return bytes(answer)


async def _end(child: asyncio.subprocess.Process) -> None:
    """Kill what is left of the child's group and reap it, also when cancelled meanwhile."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    if child.stdin is not None:
        child.stdin.close()
    await asyncio.shield(child.wait())


def _order(do: str, files: Files, job: Path) -> dict[str, Any]:
    """Files under names that messages may show."""
    recipe = files.recipe
    return {
        "do": do,
        "name": files.name,
        "model": _named(job / f"{files.name}.tpm", files.model),
        "entry": recipe.entry,
        "quantize": recipe.quantize,
        "max_accuracy_drop": recipe.max_accuracy_drop,
        "calibration": _named(job / "calibration.npz", files.calibration),
        "evaluation": _named(job / "evaluation.npz", files.evaluation),
    }


def _named(link: Path, file: Path | None) -> str | None:
    if file is None:
        return None
    link.symlink_to(file.absolute())
    return str(link)


def _environment() -> dict[str, str]:
    """Imports as here, whether installed or run from a clone."""
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _ending(status: int | None) -> str:
    if status is None or status >= 0:
        return f"ended with status {status}"
    return f"was ended by signal {-status} ({signal.Signals(-status).name})"


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes()[-MAX_LOGGED_CHARS:].decode(errors="replace")
    return ""


def _document(told: Any) -> dict[str, Any]:
    """A JSON object, from its text or as it is; Unavailable for anything else."""
    with _expected():
        found = json.loads(told) if isinstance(told, bytes) else told
        if not isinstance(found, dict):
            raise TypeError(type(found).__name__)
        return found


@contextlib.contextmanager
def _expected() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise Unavailable(f"what the child said is no answer: {error!r:.200}") from error


def _refusal(told: Mapping[str, Any]) -> TriplaneError:
    family = getattr(errors, str(told["refused"]), None)
    if not (isinstance(family, type) and issubclass(family, TriplaneError)):
        family = TriplaneError
    return family(str(told["text"])[:MAX_REASON_CHARS])


def _made(done: Mapping[str, Any], path: Path, report: Path) -> Made:
    needs = done["needs"]
    if report.stat().st_size > MAX_REPORT_BYTES:
        raise ValueError(f"a report of {report.stat().st_size} bytes")
    return Made(
        path=path,
        size=int(done["size"]),
        root_digest=bytes.fromhex(done["root_digest"]),
        content_digest=bytes.fromhex(done["content_digest"]),
        needs=Needs(**{**needs, "instructions": tuple(needs["instructions"])}),
        report=report.read_bytes(),
    )
