"""Run graphs of int8 products whose sums of two products exceed 16 bits; print the answers as JSON.

A program of its own, so that a test can run it on an emulated processor. It imports no onnx.
"""

import json
import sys
from pathlib import Path

import numpy as np

from triplane.unified_ir.runtime.session import Session, saturates


def main() -> None:
    folder = Path(sys.argv[1])
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)
    answers = {"saturates": saturates()}
    for name in sys.argv[2:]:
        session = Session((folder / name).read_bytes())
        answers[name] = session.run({"x": x})["y"].tolist()
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main()
