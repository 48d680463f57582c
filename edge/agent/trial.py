"""`python -m triplane.edge.agent.trial JSON`: load one bundle where it can do no harm.

A child with limits on memory, processor time and files, and no descriptor of its parent but the
pipe it answers on: it verifies the bundle, loads the graph, runs the goldens, measures latency and,
where a policy asks for it, accuracy on labelled samples. It prints one JSON object; a child that
crashes, hangs or outgrows its limits has answered too.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any, Final

RUNS: Final = 20
"""Timed runs of the goldens."""
MAX_SAMPLES: Final = 10_000
FILES: Final = 64
MAX_NPZ_BYTES: Final = 256 << 20


def main(argv: list[str]) -> int:
    """Answer on standard output; the exit code is 0 whenever an answer was given."""
    given = json.loads(argv[0])
    limit_bytes, cpu_s = int(given["memory_bytes"]), int(given["cpu_s"])
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from triplane.edge.agent.refusal import Refused
    from triplane.proto.errors import TriplaneError

    try:
        answer = measure(Path(given["path"]), golden=given.get("golden"))
    except Refused as refusal:
        answer = {"error": refusal.text, "kind": refusal.kind}
    except TriplaneError as error:
        answer = {"error": str(error), "kind": "golden" if "golden" in str(error) else "load"}
    except MemoryError:
        answer = {"error": f"needs more than the limit of {limit_bytes} bytes", "kind": "memory"}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def measure(path: Path, *, golden: str | None = None) -> dict[str, Any]:
    """What the bundle is and how it fares here."""
    from triplane.unified_ir.runtime import Bundle, SessionOptions, version

    version()  # onnxruntime's own memory is not the bundle's
    before = _peak_bytes()
    bundle = Bundle.load(path)
    _check_hardware(bundle, path.parent)
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
        "latency_limit_s": bundle.description.constraints.latency_s,
        "memory_limit_bytes": bundle.description.constraints.memory_bytes,
    }
    answer["latency_s"] = _latency(bundle, session)
    if golden is not None:
        answer["accuracy"] = _accuracy(bundle, session, Path(golden))
    answer["grown_bytes"] = _peak_bytes() - before
    return answer


def _check_hardware(bundle: Any, folder: Path) -> None:
    """The cloud looks too, before it assigns; one that was taken over does not."""
    from triplane.edge.agent.capability import capability
    from triplane.edge.agent.refusal import Refused
    from triplane.proto.fitting import fits

    why = fits(bundle.description.constraints, capability(folder))
    if why:
        what = f"{bundle.name} version {bundle.version} for {bundle.target}"
        raise Refused("hardware", f"the bundle of {what} {why}")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _latency(bundle: Any, session: Any) -> float:
    """Median seconds of a run of the goldens, which are a few rows each."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        bundle.check_goldens(session)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def _accuracy(bundle: Any, session: Any, path: Path) -> float:
    """Share of the samples in an .npz (`x`, `y`) whose largest output is their label."""
    import numpy as np

    from triplane.proto.errors import Corrupt

    if path.stat().st_size > MAX_NPZ_BYTES:
        raise Corrupt(f"the golden set has more than {MAX_NPZ_BYTES} bytes")
    try:
        with np.load(path, allow_pickle=False) as file:
            x, y = file["x"], file["y"]
    except (ValueError, KeyError, OSError) as error:
        raise Corrupt(f"the golden set holds no arrays x and y: {error}") from error
    if not 1 <= len(x) == len(y) <= MAX_SAMPLES:
        raise Corrupt(f"the golden set has {len(x)} samples and {len(y)} labels")
    name = bundle.inputs[0].name
    right = 0
    for start in range(0, len(x), 64):
        outputs = session.run({name: x[start : start + 64]})
        scores = next(iter(outputs.values()))
        right += int((np.argmax(scores, axis=-1) == y[start : start + 64]).sum())
    return right / len(x)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
