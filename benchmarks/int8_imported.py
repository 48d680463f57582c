"""Imported networks in int8: ours and onnxruntime's own static quantizer, beside float.

Both get the same 32 calibration samples. The three graphs take turns within one process, on one
thread and one sample a call; a ratio is float's processor time over int8's, so above 1 is faster.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from harness import peer, ratio, table
from imported import CASES, SEED
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from triplane.unified_ir import import_onnx
from triplane.unified_ir.convert import convert
from triplane.unified_ir.runtime.bundle import Bundle
from triplane.unified_ir.runtime.session import Session, SessionOptions

SAMPLES: Final = 32
CALLS: Final = 4
NETWORKS: Final = tuple(name for name in CASES if not name.startswith(("ResNet", "DenseNet")))
HEADS: Final = ("network", "float ms", "ours", "onnxruntime's quantizer", "control", "dB", "dB")


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, samples: np.ndarray) -> None:
        self._left = iter(samples)

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next sample, or None."""
        x = next(self._left, None)
        return None if x is None else {"x": x[None]}


def sessions(case: str, folder: Path, samples: np.ndarray) -> dict[str, Session]:
    """The float graph twice and the two in int8."""
    path, theirs, bundle = (folder / name for name in ("f.onnx", "q.onnx", "q.bundle"))
    side = Path(__file__).with_name("side_torchvision.py")
    python = peer("TRIPLANE_ORACLES", ".venv-oracles")
    subprocess.run([python, "-W", "ignore", side, case, path, "EVAL"], check=True, stdout=-3)
    convert(import_onnx(path), "ort-x64", quantize="int8", calibration=samples, out=bundle)
    quantize_static(
        str(path), str(theirs), _Reader(samples), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    options = SessionOptions(threads=1)
    return {
        "float": Session(path, options=options),
        "ours": Bundle.load(bundle).session(options),
        "theirs": Session(theirs, options=options),
        "again": Session(path, options=options),
    }


def take_turns(made: Mapping[str, Session], x: np.ndarray, rounds: int) -> dict[str, list[float]]:
    """Processor seconds per call of each, by round; the first rounds warm up."""
    spent: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds + 3):
        for name, session in made.items():
            start = time.process_time()
            for _ in range(CALLS):
                session.run({"x": x})
            spent[name].append((time.process_time() - start) / CALLS)
    return {name: times[3:] for name, times in spent.items()}


def decibel(y: Any, q: Any) -> float:
    """Signal to noise."""
    return float(10 * np.log10((y**2).sum() / ((y - q) ** 2).sum()))


def row(case: str, rounds: int) -> list[str]:
    """One line of the table."""
    side = CASES[case].side
    samples = np.random.default_rng(SEED).normal(size=(SAMPLES, 3, side, side)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        made = sessions(case, Path(folder), samples)
        spent = take_turns(made, samples[:1], rounds)
        y = {name: next(iter(s.run({"x": samples}).values())) for name, s in made.items()}
    return [
        f"{case.partition(' ')[0]} {side}px",
        f"{1e3 * np.median(spent['float']):.2f}",
        *(str(ratio(spent["float"], spent[name])) for name in ("ours", "theirs", "again")),
        *(f"{decibel(y['float'], y[name]):.1f}" for name in ("ours", "theirs")),
    ]


def main(cases: Sequence[str] = NETWORKS, *, rounds: int = 41) -> str:
    """The table for some networks."""
    logging.getLogger().setLevel(logging.ERROR)
    return table(HEADS, [row(case, rounds) for case in cases])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case", nargs="*", choices=[*CASES, []], help="networks")
    parser.add_argument("--rounds", type=int, default=41)
    asked = parser.parse_args()
    print(main(asked.case or NETWORKS, rounds=asked.rounds))
