"""The children that open model files for a run: a plan of a model, a model of a state.

They run as conversions do (`registry/conversions.py`), with a folder and limits of their own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from triplane.cloud.federation.spec import HYPER
from triplane.cloud.registry.conversions import Conversions, Limits
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import Unavailable

COMMAND: Final = (sys.executable, "-m", "triplane.cloud.federation.planning")
LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan and the first shared state, as files. digest: the plan's root digest."""

    plan: Path
    state: Path
    digest: str
    roles: dict[str, str]
    weighting: str
    server: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedModel:
    """A finished model file. digest: its root digest."""

    path: Path
    digest: bytes


class Children(Conversions):
    """Runs them, one at a time. folder: for their files; what an earlier cloud left there goes."""

    def __init__(
        self, folder: Path, limits: Limits = LIMITS, command: tuple[str, ...] = COMMAND
    ) -> None:
        super().__init__(folder, limits, command)

    @contextlib.asynccontextmanager
    async def plan(self, model: Path, spec: pb.Spec) -> AsyncIterator[Planned]:
        """Give the plan of a run; its files are there until the block ends."""
        async with self._conversions, self._job() as job:
            plan, state = job / "run.plan", job / "first.state"
            order = _order("plan", model, spec) | {"plan": str(plan), "state": str(state)}
            done = await self._run(job, order, self._limits.convert_s)
            try:
                made = Planned(
                    plan=plan,
                    state=state,
                    digest=str(done["digest"]),
                    roles={str(k): str(v) for k, v in done["roles"].items()},
                    weighting=str(done["weighting"]),
                    server=str(done["server"]),
                )
            except (KeyError, AttributeError) as error:
                raise Unavailable(f"what the child said is no plan: {error!r}") from error
            yield made

    @contextlib.asynccontextmanager
    async def finish(
        self, model: Path, spec: pb.Spec, state: Path, plan_digest: str
    ) -> AsyncIterator[FinishedModel]:
        """Give the model of a run's shared state; its file is there until the block ends."""
        async with self._conversions, self._job() as job:
            out = job / "result.tpm"
            order = _order("finish", model, spec) | {
                "state": str(state),
                "plan_digest": plan_digest,
                "out": str(out),
            }
            done = await self._run(job, order, self._limits.convert_s)
            try:
                made = FinishedModel(path=out, digest=bytes.fromhex(done["model_digest"]))
            except (KeyError, TypeError, ValueError) as error:
                raise Unavailable(f"what the child said is no model: {error!r}") from error
            yield made


def _order(do: str, model: Path, spec: pb.Spec) -> dict[str, Any]:
    hyper = {name: getattr(spec.hyperparameters, name) for name in HYPER}
    return {"do": do, "model": str(model), "algorithm": spec.algorithm, "hyper": hyper}
