"""Running the trial child and judging its answer."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from triplane.edge.agent.adapting import GROWTH, Compared
from triplane.edge.agent.refusal import AttemptRefused
from triplane.proto.targets import SignedTarget

WALL_S: Final = 120.0
CPU_S: Final = 60
BASE_BYTES: Final = 512 << 20
"""For Python, onnxruntime and their threads' stacks."""
PER_BUNDLE_BYTE: Final = 8
ALLOWANCE_BYTES: Final = 64 << 20
"""What onnxruntime takes for a session beside weights and results: arenas, kernels, the graph."""
LOAD_COPIES: Final = 5
"""Of the bundle, beside what it says, that onnxruntime may hold for a moment while it loads: it
copies weights when it lays them out for its kernels. Measured at the peak: 2.1 times the bundle in
all for matrix products of 23 to 400 MB, 6.1 times for a convolution of 1,000 channels. What the
bundle says counts twice: an arena grows by powers of two."""
SLACK_BYTES: Final = 1 << 20
MAX_ANSWER_BYTES: Final = 64 << 10
IDENTIFYING: Final = ("model", "version", "target", "content_digest", "model_digest")


def run_trial(path: Path, *, size: int, golden: Path | None = None) -> dict[str, Any]:
    """The child's answer. Refused with kind "golden", "memory" or "load" where it gave none."""
    given: dict[str, Any] = {"path": str(path)}
    if golden is not None:
        given["golden"] = str(golden)
    return _run_child("trial", given, size)


def run_adaptation(
    path: Path, *, size: int, samples: Path, seed: str, out: Path, current: Path | None
) -> Compared:
    """Adapt the bundle at `path` into `out`: how it compares with the one that serves.

    seed: of the split of the samples. current: the bundle that serves now. Refused as `run_trial`,
    or with kind "adaptation" where the samples or the bundle do not allow it.
    """
    given = {"path": str(path), "samples": str(samples), "seed": seed, "out": str(out)}
    given["out_bytes"] = str(GROWTH * size + SLACK_BYTES)
    answer = _run_child("adapting", given | ({"current": str(current)} if current else {}), size)
    return Compared(**answer)


def _run_child(module: str, given: Mapping[str, Any], size: int) -> dict[str, Any]:
    limit = BASE_BYTES + PER_BUNDLE_BYTE * size
    given = {**given, "memory_bytes": limit, "cpu_s": CPU_S, "parent": os.getpid()}
    process = subprocess.Popen(
        [sys.executable, "-m", f"triplane.edge.agent.{module}", json.dumps(given)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    try:
        out, _ = process.communicate(timeout=WALL_S)
    except subprocess.TimeoutExpired as error:
        raise AttemptRefused("load", f"the trial did not end within {WALL_S:.0f} s") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode != 0:
        raise AttemptRefused(
            "load",
            f"the trial ended with {_ending(process.returncode)} under limits of {limit} bytes, "
            f"twice what the bundle says besides, and {CPU_S} s of processor time",
        )
    answer = json.loads(out[:MAX_ANSWER_BYTES])
    if "error" in answer:
        raise AttemptRefused(answer["kind"], answer["error"])
    assert isinstance(answer, dict)
    return answer


def judge_trial(answer: Mapping[str, Any], target: SignedTarget) -> None:
    """Refused where the bundle is not what was signed, or is too slow or too large for itself."""
    signed = {name: str(target.custom[name]) for name in IDENTIFYING}
    found = {name: str(answer[name]) for name in IDENTIFYING}
    if signed != found:
        wrong = ", ".join(
            f"{n} {found[n]} for {signed[n]}" for n in signed if signed[n] != found[n]
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
            f"loading and running took {answer['grown_bytes']} bytes here; the bundle says "
            f"{limit_bytes}, and {allowance} more are allowed for what the runtime holds beside "
            "it, and for its copies while it loads",
        )


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
