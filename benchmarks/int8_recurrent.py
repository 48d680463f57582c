"""Character LSTMs in int8: ours and onnxruntime's own dynamic quantizer, beside float.

The networks are the zoo's, with the weights they start with. The three graphs take turns within one
process, on one thread; a ratio is float's processor time over int8's, so above 1 is faster.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from harness import ratio, table
from int8_imported import decibel, take_turns
from onnxruntime.quantization import quantize_dynamic

from triplane.unified_ir import nn, train, zoo
from triplane.unified_ir.convert import convert
from triplane.unified_ir.convert.fold import fold
from triplane.unified_ir.onnx import EmittedInitializer, emit, serialize
from triplane.unified_ir.optim import SGD
from triplane.unified_ir.quantize import freeze
from triplane.unified_ir.runtime.bundle import Bundle
from triplane.unified_ir.runtime.session import Session, SessionOptions

SEED: Final = 0
LETTERS: Final = 80
LENGTH: Final = 80
SAMPLES: Final = 32
UNITS: Final = (64, 128, 256, 512)
ROWS: Final = (1, 8)
HEADS: Final = (
    "network", "rows", "float ms", "ours", "onnxruntime's quantizer", "control",
    "dB", "dB", "kB", "kB", "kB",
)  # fmt: skip


def sessions(hidden: int, folder: Path, samples: np.ndarray) -> dict[str, Session]:
    """The float graph twice and the two in int8; their files lie in the folder."""
    nn.seed(SEED)
    made = train.Trainer(
        zoo.CharLstm(LETTERS, hidden=hidden), loss=nn.SoftmaxCrossEntropy(), optimizer=SGD(0.1)
    )
    made.prepare(samples[:1], np.zeros(1, np.int64))
    module = made.export(("predict",))
    plain, theirs, bundle = (folder / name for name in ("f.onnx", "q.onnx", "q.bundle"))
    frozen = fold(freeze(module, "predict"))
    held = {name: EmittedInitializer(array) for name, array in frozen.weights.items()}
    plain.write_bytes(serialize(emit(frozen.function, initializers=held)))
    convert(module, "ort-x64", quantize="int8", calibration=samples, out=bundle)
    quantize_dynamic(str(plain), str(theirs))
    options = SessionOptions(threads=1)
    return {  # in this order both forms in int8 run after float, which fills the caches
        "float": Session(plain, options=options),
        "ours": Bundle.load(bundle).session(options),
        "again": Session(plain, options=options),
        "theirs": Session(theirs, options=options),
    }


def rows_of(hidden: int, rounds: int) -> list[list[str]]:
    """The lines of the table for one size."""
    samples = np.random.default_rng(SEED).integers(0, LETTERS, (SAMPLES, LENGTH))
    with tempfile.TemporaryDirectory() as folder:
        made = sessions(hidden, Path(folder), samples)
        sizes = [(Path(folder) / n).stat().st_size for n in ("f.onnx", "q.bundle", "q.onnx")]
        y = {name: next(iter(s.run({"x": samples}).values())) for name, s in made.items()}
        lines = []
        for rows in ROWS:
            spent = take_turns(made, samples[:rows], rounds)
            lines.append(
                [
                    f"2 x {hidden} units",
                    str(rows),
                    f"{1e3 * np.median(spent['float']):.2f}",
                    *(str(ratio(spent["float"], spent[n])) for n in ("ours", "theirs", "again")),
                    *(f"{decibel(y['float'], y[name]):.1f}" for name in ("ours", "theirs")),
                    *(f"{size / 1e3:.0f}" for size in sizes),
                ]
            )
    return lines


def main(units: Sequence[int] = UNITS, *, rounds: int = 41) -> str:
    """The table for some sizes."""
    logging.getLogger().setLevel(logging.ERROR)
    return table(HEADS, [line for hidden in units for line in rows_of(hidden, rounds)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("units", nargs="*", type=int, help="units of a layer")
    parser.add_argument("--rounds", type=int, default=41)
    asked = parser.parse_args()
    print("load", *(f"{load:.1f}" for load in os.getloadavg()))
    print(main(asked.units or UNITS, rounds=asked.rounds))
