"""`python -m triplane.edge.agent.trial`: try a bundle where it can do no harm.

This is a child of `proto/sandbox.py` with limits of memory, processor time and files. It verifies
the bundle, loads the graph, runs the goldens, measures latency and, if a policy asks for it,
accuracy on labelled samples. If it crashes, hangs or exceeds its limits, the bundle is refused.
"""

import contextlib
import resource
import statistics
import timeit
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from triplane.proto.errors import TriplaneError
from triplane.proto.sandbox import allow_memory, serve_order
from triplane.proto.signed.refusal import AttemptRefused

RUNS: Final = 20
"""Timed runs of the goldens."""
CHUNK: Final = 64
"""Samples in one run."""


def trial(order: dict[str, Any]) -> dict[str, Any]:
    """Return the measurements, or why the bundle is refused: `error` and its `kind`."""
    try:
        return measure(Path(order["path"]), golden=order["golden"])
    except AttemptRefused as refusal:
        return {"error": refusal.text, "kind": refusal.kind}
    except TriplaneError as error:
        return {"error": str(error), "kind": "golden" if "golden" in str(error) else "load"}
    except MemoryError:
        return memory_refusal(order)


def memory_refusal(order: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to an order whose memory limit was too low."""
    limit_bytes = order["limits"]["memory_bytes"]
    return {"error": f"needs more than the limit of {limit_bytes} bytes", "kind": "memory"}


def measure(path: Path, *, golden: str | None = None) -> dict[str, Any]:
    """Load and measure the bundle on this machine."""
    from triplane.unified_ir.runtime import Bundle, SessionOptions, version

    version()  # loads onnxruntime, whose own memory does not count as the bundle's
    before = _peak_bytes()
    bundle = Bundle.load(path)
    _check_hardware(bundle, path.parent)
    # The bundle's own estimate is known only now that it was parsed within the base limit.
    allow_memory(2 * bundle.description.constraints.memory_bytes)
    session = bundle.session(SessionOptions(threads=1))
    error = bundle.check_goldens(session)
    answer: dict[str, Any] = {
        "model": bundle.name,
        "version": bundle.version,
        "target": bundle.target,
        "digest": bundle.digest,
        "content_digest": bundle.content_digest,
        "model_digest": bundle.description.model_digest,
        "golden_error": error,
        "adapt_steps": bundle.description.adapt_steps,
        "latency_limit_s": bundle.description.constraints.latency_s,
        "memory_limit_bytes": bundle.description.constraints.memory_bytes,
    }
    answer["latency_s"] = _latency(bundle, session)
    if golden is not None:
        answer["accuracy"] = golden_accuracy(bundle, session, Path(golden))
    answer["grown_bytes"] = _peak_bytes() - before
    return answer


def _check_hardware(bundle: Any, folder: Path) -> None:
    """Check what an honest cloud has checked before it assigned the bundle."""
    from triplane.edge.agent.capability import capability
    from triplane.proto.fitting import fits

    if why := fits(bundle.description.constraints, capability(folder)):
        what = f"{bundle.name} version {bundle.version} for {bundle.target}"
        raise AttemptRefused("hardware", f"the bundle of {what} {why}")


def _peak_bytes() -> int:
    """Return the peak memory of this process.

    It is not `ru_maxrss`, which on Linux starts with the parent's memory at the fork: a large
    parent would hide all growth.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _latency(bundle: Any, session: Any) -> float:
    """Return the median duration of a run of the goldens, which have a few rows each."""
    run = timeit.repeat(lambda: bundle.check_goldens(session), repeat=RUNS, number=1)
    return statistics.median_high(run)


def golden_accuracy(bundle: Any, session: Any, path: Path) -> float:
    """Return the share of right answers on the labelled samples in an .npz.

    `x`, `y`: samples and labels. Of a start point: episodes `support.x`, `support.y`, `query.x`,
    `query.y`, each (E, N, ...); it adapts to each support set and is scored on its query set.
    """
    import numpy as np

    from triplane.unified_ir.files.golden_set import golden_set

    arrays = golden_set(path, episodes=bundle.description.adapt_steps > 0)
    if not bundle.description.adapt_steps:
        return share_right(session, bundle.inputs[0].name, arrays["x"], arrays["y"])
    scores = [
        _episode(bundle, {name: array[i] for name, array in arrays.items()})
        for i in range(len(arrays["query.y"]))
    ]
    return float(np.mean(scores))


def _episode(bundle: Any, episode: Any) -> float:
    from triplane.unified_ir.runtime import Session, SessionOptions, adapted_weights

    options = SessionOptions(threads=1)
    labels = episode["support.y"].astype("int64")
    support = {"x": episode["support.x"], "y": labels}
    weights = adapted_weights(bundle, support, options=options)
    session = Session(bundle.model, weights=weights, options=options)
    return share_right(session, bundle.inputs[0].name, episode["query.x"], episode["query.y"])


def share_right(session: Any, name: str, x: Any, y: Any) -> float:
    """Return the share of samples whose largest output is their label."""
    import numpy as np

    right = 0
    for start in range(0, len(y), CHUNK):
        outputs = session.run({name: x[start : start + CHUNK]})
        scores = next(iter(outputs.values()))
        right += int((np.argmax(scores, axis=-1) == y[start : start + CHUNK]).sum())
    return right / len(y)


if __name__ == "__main__":
    serve_order({"trial": trial})
