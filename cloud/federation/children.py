"""Child processes that open model files for a run: they make its plan, and its finished model.

They run like conversions (`registry/conversions.py`), each with its own folder and limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from triplane.cloud.registry.conversions import CHILD, ConversionLimits, Jobs
from triplane.proto import federation_pb2 as pb
from triplane.proto.hyperparameters import values_of
from triplane.proto.sandbox import expected
from triplane.unified_ir.federated.core.metric import metric_named

COMMAND: Final = (sys.executable, "-m", "triplane.cloud.federation.planning")
LIMITS: Final = ConversionLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan and the first shared state, as files. digest: the plan's root digest.

    frozen: shared tensors that learning does not move.
    """

    plan: Path
    state: Path
    digest: str
    roles: dict[str, str]
    frozen: tuple[str, ...]
    weighting: str
    server: str
    metric: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedModel:
    """A finished model file. digest: its root digest."""

    path: Path
    digest: bytes


class Children:
    """Runs the children, one at a time.

    folder: for their files. Files that an earlier process of the cloud left there are removed.
    """

    def __init__(
        self, folder: Path, limits: ConversionLimits = LIMITS, command: tuple[str, ...] = COMMAND
    ) -> None:
        self._jobs, self._seconds = Jobs(folder, limits, command), limits.convert_s
        self._one = asyncio.Semaphore(limits.conversions)

    @contextlib.asynccontextmanager
    async def plan(self, model: Path, spec: pb.Spec) -> AsyncIterator[Planned]:
        """Make the plan of a run; its files exist until the block ends."""
        # One child at a time: each may take the whole memory limit of a conversion.
        async with self._one, self._jobs.folder() as job:
            plan, state = job / "run.plan", job / "first.state"
            order = _order("plan", model, spec) | {"plan": str(plan), "state": str(state)}
            done = await self._jobs.run(job, order, self._seconds)
            # The child has opened a file from outside, so its answer is checked like other
            # input.
            with expected(CHILD):
                planned = Planned(
                    plan=plan,
                    state=state,
                    digest=str(done["digest"]),
                    roles={str(k): str(v) for k, v in done["roles"].items()},
                    frozen=tuple(map(str, done["frozen"])),
                    weighting=str(done["weighting"]),
                    server=str(done["server"]),
                    metric=metric_named(str(done["metric"])).name,
                )
            yield planned

    @contextlib.asynccontextmanager
    async def finish(
        self, model: Path, spec: pb.Spec, state: Path, plan_digest: str, meta: Mapping[str, str]
    ) -> AsyncIterator[FinishedModel]:
        """Make the model of a run's shared state; its file exists until the block ends.

        meta: what the run adds to that of the model it began with.
        """
        async with self._one, self._jobs.folder() as job:
            out = job / "result.tpm"
            order = _order("finish", model, spec) | {
                "state": str(state),
                "plan_digest": plan_digest,
                "meta": dict(meta),
                "out": str(out),
            }
            done = await self._jobs.run(job, order, self._seconds)
            with expected(CHILD):
                finished = FinishedModel(path=out, digest=bytes.fromhex(done["model_digest"]))
            # Inside the block: the caller copies the file before the folder is removed.
            yield finished


def _order(do: str, model: Path, spec: pb.Spec) -> dict[str, Any]:
    hyper = values_of(spec.hyperparameters)
    return {"do": do, "model": str(model), "algorithm": spec.algorithm, "hyper": hyper}
