"""Run the trial of a bundle in a child process, and judge its answer."""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from triplane.edge.agent.adapting import GROWTH, Compared
from triplane.proto.errors import Unavailable
from triplane.proto.sandbox import ChildDied, ChildLimits, ask_once, ended_by
from triplane.proto.signed.refusal import AttemptRefused
from triplane.proto.targets import SignedTarget

WALL_S: Final = 120.0
CPU_S: Final = 60
OPEN_FILES: Final = 64
BASE_BYTES: Final = 512 << 20
"""Memory for Python, onnxruntime and the stacks of their threads."""
PER_BUNDLE_BYTE: Final = 8
ALLOWANCE_BYTES: Final = 64 << 20
"""Memory of an onnxruntime session besides weights and results: arenas, kernels, the graph."""
LOAD_COPIES: Final = 5
"""Copies of the bundle that onnxruntime may hold while it loads, besides the bundle's own estimate:
it copies weights into the layout of its kernels. The measured peak was 2.1 times the bundle in all
for matrix products of 23 to 400 MB, and 6.1 times for a convolution of 1,000 channels. The bundle's
own estimate counts twice, because an arena grows by powers of two."""
SLACK_BYTES: Final = 1 << 20
MAX_ANSWER_BYTES: Final = 64 << 10
IDENTIFYING: Final = ("model", "version", "target", "content_digest", "model_digest")


def run_trial(path: Path, *, size: int, golden: Path | None = None) -> dict[str, Any]:
    """Return the child's answer. AttemptRefused of kind "golden", "memory" or "load".

    size: size of the bundle in bytes. golden: labelled samples to score it on.
    """
    order = {"do": "trial", "path": str(path), "golden": str(golden) if golden else None}
    return _answer("trial", order, size, file_bytes=0)


def run_adaptation(
    path: Path, *, size: int, samples: Path, seed: str, out: Path, current: Path | None
) -> Compared:
    """Write the adapted bundle to `out`, and compare it with the one that serves.

    seed: determines the split of the samples. current: the serving bundle. AttemptRefused as in
    `run_trial`, or of kind "adaptation" if the samples or the bundle do not allow it.
    """
    order = {
        "do": "adapt",
        "path": str(path),
        "samples": str(samples),
        "seed": seed,
        "out": str(out),
        "current": str(current) if current else None,
    }
    return Compared(**_answer("adapting", order, size, file_bytes=GROWTH * size + SLACK_BYTES))


def _answer(module: str, order: Mapping[str, Any], size: int, *, file_bytes: int) -> dict[str, Any]:
    limits = ChildLimits(
        memory_bytes=BASE_BYTES + PER_BUNDLE_BYTE * size,
        file_bytes=file_bytes,
        seconds=WALL_S,
        cpu_s=CPU_S,
        open_files=OPEN_FILES,
        may_grow=module == "trial",
    )
    command = (sys.executable, "-m", f"triplane.edge.agent.{module}")
    try:
        answer = asyncio.run(
            ask_once(command, order, limits, name="the trial", max_answer_bytes=MAX_ANSWER_BYTES)
        )
    except ChildDied as died:
        if died.status is None:
            raise AttemptRefused("load", f"the trial did not end within {WALL_S:.0f} s") from died
        raise AttemptRefused(
            "load",
            f"the trial {ended_by(died.status)}; its limits are {limits.memory_bytes} bytes plus "
            f"twice the bundle's own estimate, and {CPU_S} s of processor time",
        ) from died
    except Unavailable as error:  # an invalid answer, which another attempt would give again
        raise AttemptRefused("load", str(error)) from error
    if "error" in answer:
        raise AttemptRefused(answer["kind"], answer["error"])
    return answer


def judge_trial(answer: Mapping[str, Any], target: SignedTarget) -> None:
    """Raise AttemptRefused if the bundle is not the signed one, or exceeds its own limits."""
    # The file has the signed digest, but its description names another model: a mistake of the
    # signer.
    signed = {name: str(target.custom[name]) for name in IDENTIFYING}
    answered = {name: str(answer[name]) for name in IDENTIFYING}
    if signed != answered:
        wrong = ", ".join(
            f"{n} {answered[n]} for {signed[n]}" for n in signed if signed[n] != answered[n]
        )
        raise AttemptRefused(
            "wrong-target", f"the bundle is not the one signed as {target.path}: {wrong}"
        )
    limit_s, limit_bytes = answer["latency_limit_s"], answer["memory_limit_bytes"]
    if limit_s and answer["latency_s"] > limit_s:
        raise AttemptRefused(
            "latency",
            f"a run takes {answer['latency_s'] * 1e3:.2f} ms here, the bundle allows "
            f"{limit_s * 1e3:.2f} ms",
        )
    allowance = ALLOWANCE_BYTES + LOAD_COPIES * target.length + limit_bytes
    if limit_bytes and answer["grown_bytes"] > limit_bytes + allowance:
        raise AttemptRefused(
            "memory",
            f"loading and running took {answer['grown_bytes']} bytes here; the bundle states "
            f"{limit_bytes}, and {allowance} more are allowed for the runtime and its copies while "
            "it loads",
        )
