"""The child that opens model files: `python -m triplane.cloud.registry.converting`.

It reads one order (a line of JSON) from standard input and answers with one line on standard
output. It holds itself to the order's limits before it opens anything, and ends with its whole
process group when standard input closes, that is when the cloud is gone. Bytes of a model file are
never parsed in the cloud's own process.
"""

import json
import math
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

from triplane.proto import signals
from triplane.proto.errors import Corrupt, TriplaneError, Unavailable

MAX_ORDER_BYTES: Final = 64 << 10
MAX_OPEN_FILES: Final = 256
GRACE_S: Final = 10
"""For the cloud to end a child that is late; then the alarm does."""
DEFAULT_DROP_POINTS: Final = 1.0
"""What a recipe's 0 stands for; the converter's own default."""

Work = Callable[[dict[str, Any]], dict[str, Any]]
"""Does an order and gives the answer."""


def main(work: Mapping[str, Work]) -> None:
    """Do one order: `work` by the word of its field `do`."""
    signals.restore_defaults()
    answer = _answers()
    order: dict[str, Any] = json.loads(sys.stdin.buffer.readline(MAX_ORDER_BYTES))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    limit(**order["limits"])
    with answer:
        answer.write(json.dumps(_outcome(work, order)).encode() + b"\n")


def limit(*, memory_bytes: int, seconds: float, file_bytes: int) -> None:
    """Bound this process for good. Mapped files do not count as memory, allocations do.

    Time is the kernel's alarm, which ends also what holds the interpreter, should the cloud be gone
    by then. Not RLIMIT_CPU: with it Linux counts processor time in ticks, too coarse to measure by.
    """
    signal.alarm(math.ceil(seconds) + GRACE_S)
    for what, most in (
        (resource.RLIMIT_DATA, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def _answers() -> BinaryIO:
    """The caller's end of standard output; whatever else is printed goes to standard error."""
    kept = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return kept


def _end_with_parent() -> None:
    while os.read(0, 1):  # not through `sys.stdin`, whose lock the interpreter wants at its end
        pass
    os.killpg(0, signal.SIGKILL)


def _outcome(work: Mapping[str, Work], order: dict[str, Any]) -> dict[str, Any]:
    memory_mib = order["limits"]["memory_bytes"] >> 20
    try:
        return {"done": work[order["do"]](order)}
    except MemoryError:
        error: TriplaneError = Unavailable(f"it needs more than the {memory_mib} MiB it may take")
    except TriplaneError as refused:
        error = refused
    return {"refused": type(error).__name__, "text": str(error)}


def check(order: dict[str, Any]) -> dict[str, Any]:
    """Verify every byte of a model file, that its functions mean what they say, and its samples."""
    from triplane.unified_ir.convert.conversion import read_model

    module, digest = read_model(Path(order["model"]))
    _samples(order, module)
    return {"model_digest": digest}


def convert(order: dict[str, Any]) -> dict[str, Any]:
    """Make the bundle at `order["out"]`, and its report at `order["report"]`.

    The measured figures of a report are those of `order["kept_report"]`, if that is given.
    """
    from triplane.unified_ir.convert.conversion import convert as run
    from triplane.unified_ir.convert.conversion import read_model
    from triplane.unified_ir.runtime.bundle import Bundle, encoded_report, write_with_report

    module, digest = read_model(Path(order["model"]))
    if digest != order["model_digest"]:
        raise Corrupt(
            f"the stored model file is {digest}, the version's is {order['model_digest']}"
        )
    calibration, evaluation = _samples(order, module)
    quantize: Literal["int8"] | None = order["quantize"] or None
    out = Path(order["out"])
    run(
        module,
        order["target"],
        entry=order["entry"],
        quantize=quantize,
        calibration=calibration,
        evaluation=evaluation,
        name=order["name"],
        version=order["version"],
        max_accuracy_drop=order["max_accuracy_drop"] or DEFAULT_DROP_POINTS,
        model_digest=digest,
        out=out,
    )
    if order["kept_report"]:
        measured = out.rename(out.with_suffix(".measured"))
        write_with_report(measured, out, Path(order["kept_report"]).read_bytes())
    made = Bundle.load(out)
    Path(order["report"]).write_bytes(encoded_report(made.report))
    return {
        "size": out.stat().st_size,
        "root_digest": made.digest,
        "content_digest": made.content_digest,
        "needs": asdict(made.description.constraints),
    }


def _samples(order: dict[str, Any], module: Any) -> tuple[Any, Any]:
    """What the recipe shows to the entry, checked against its inputs."""
    from triplane.unified_ir.convert.samples import read_labelled, read_samples

    inputs = module.inputs(order["entry"])
    calibration, evaluation = order["calibration"], order["evaluation"]
    return (
        read_samples(calibration, inputs) if calibration else None,
        read_labelled(evaluation, inputs) if evaluation else None,
    )


WORK: Final = {"check": check, "convert": convert}

if __name__ == "__main__":
    main(WORK)
