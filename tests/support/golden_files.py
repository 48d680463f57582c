"""Golden files of PyTorch's results, and whether their generator still writes them."""

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PEER = Path(os.environ.get("TRIPLANE_PEERS", ROOT / ".venv-peers" / "bin" / "python"))
needs_peers = pytest.mark.skipif(
    not PEER.exists(), reason="no peers' interpreter; run `make peers`"
)


def parts_of(path: Path, dtype: Any = np.float64) -> dict[str, dict[str, np.ndarray]]:
    """Return the arrays of a file by part and name, {"x": {"q": ...}, ...}; floats in `dtype`."""
    parts: dict[str, dict[str, np.ndarray]] = {part: {} for part in "xwyvguhb"}
    with np.load(path) as file:
        for key, array in file.items():
            part, _, label = key.partition(".")
            parts[part][label] = array.astype(dtype) if array.dtype.kind == "f" else array
    return parts


def check_generator(
    name: str, kept: Path, folder: Path, *, rtol: float = 1e-12, atol: float = 1e-14
) -> None:
    """Run the generator `benchmarks.oracles.NAME` into `folder` and compare with the kept files.

    Operands, whose names begin with "x.", bit for bit; results to the last digits, which depend on
    the processor.
    """
    subprocess.run([PEER, "-m", f"benchmarks.oracles.{name}", folder], cwd=ROOT, check=True)
    assert {path.name for path in folder.iterdir()} == {path.name for path in kept.iterdir()}
    for path in kept.iterdir():
        with np.load(path) as old, np.load(folder / path.name) as new:
            assert old.files == new.files
            for key in old.files:
                if key.startswith("x."):
                    np.testing.assert_array_equal(new[key], old[key])
                else:
                    np.testing.assert_allclose(new[key], old[key], rtol=rtol, atol=atol)
