"""Child processes that open model files: they check pushed models and convert them to bundles.

The children are those of `proto/sandbox.py`, each with an empty folder that is removed with it. The
cloud gets an answer or an error: the child's refusal, or `Unavailable` if it died or was too slow,
because another attempt may succeed. Nothing that a child writes counts until the cloud has copied
it.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from triplane.cloud.registry.values import ConversionRecipe, Needs
from triplane.proto.sandbox import ChildLimits, ask_once, expected, job_folder, remove_job_folders

COMMAND: Final = (sys.executable, "-m", "triplane.cloud.registry.converting")
CHILD: Final = "the child"
"""The name of the process in errors."""
MAX_ANSWER_BYTES: Final = 64 << 10
MAX_REPORT_BYTES: Final = 4 << 20
"""Limit of a bundle's report, the same as for reading one from a bundle."""
_PREFIX: Final = "job-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionLimits:
    """Limits of one child, and of the number of children that run at a time.

    A check may take `check_s`, plus one second for every `check_bytes_per_s` of its file.
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
    """A model file, and its recipe with its samples as local files."""

    name: str
    model: Path
    recipe: ConversionRecipe
    calibration: Path | None = None
    evaluation: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A finished bundle at `path`.

    report: its measured figures, the only part that differs between two conversions of a model.
    """

    path: Path
    size: int
    root_digest: bytes
    content_digest: bytes
    needs: Needs
    report: bytes = b""


class Conversions:
    """Runs the children.

    folder: for their files. Files that an earlier process of the cloud left there are removed.
    """

    def __init__(
        self,
        folder: Path,
        limits: ConversionLimits = ConversionLimits(),
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        self._limits, self._jobs = limits, Jobs(folder, limits, command)
        self._checks = asyncio.Semaphore(limits.checks)
        self._conversions = asyncio.Semaphore(limits.conversions)

    async def check(self, files: Files) -> bytes:
        """Check a model file and return its root digest. Raises the error that the child found."""
        seconds = self._limits.check_s + files.model.stat().st_size / self._limits.check_bytes_per_s
        async with self._checks, self._jobs.folder() as job:
            done = await self._jobs.run(job, _order("check", files, job), seconds)
        with expected(CHILD):
            return bytes.fromhex(done["model_digest"])

    @contextlib.asynccontextmanager
    async def convert(
        self, files: Files, *, version: int, target: str, model_digest: bytes, report: bytes = b""
    ) -> AsyncIterator[Made]:
        """Convert a version and yield the bundle, whose file exists until the block ends.

        report: of an earlier conversion; with it, the bundle has the same bytes as that one.
        """
        async with self._conversions, self._jobs.folder() as job:
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
            done = await self._jobs.run(job, order, self._limits.convert_s)
            with expected(CHILD):
                bundle = _result_of(done, out, new_report)
            # Inside the block, because the folder with the file is removed afterwards.
            yield bundle


class Jobs:
    """Children that run one command, each for one order and with an empty folder of its own.

    folder: for those folders. Folders that an earlier process of the cloud left are removed.
    """

    def __init__(self, folder: Path, limits: ConversionLimits, command: tuple[str, ...]) -> None:
        self._folder, self._limits, self._command = folder, limits, command
        remove_job_folders(folder, _PREFIX)

    @contextlib.asynccontextmanager
    async def folder(self) -> AsyncIterator[Path]:
        """Make the folder of a job; it is removed when the block ends."""
        with job_folder(self._folder, _PREFIX) as path:
            yield path

    async def run(self, job: Path, order: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to an order. Raises the child's refusal, or Unavailable."""
        limits = ChildLimits(
            memory_bytes=self._limits.memory_bytes,
            file_bytes=self._limits.file_bytes,
            seconds=seconds,
        )
        return await ask_once(
            self._command, order, limits, name=CHILD, folder=job, max_answer_bytes=MAX_ANSWER_BYTES
        )


def _order(do: str, files: Files, job: Path) -> dict[str, Any]:
    """Return the order; its files are links in the child's folder, whose names messages show."""
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
    # A link instead of a copy: the child only reads, and messages show this name, not a digest.
    link.symlink_to(file.absolute())
    return link.name


def _result_of(done: Mapping[str, Any], path: Path, report: Path) -> Made:
    needs = done["needs"]
    # Checked before reading: a hostile model could make its child write a huge file.
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
