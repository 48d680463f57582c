"""Every comparison against PyTorch, in about twenty minutes; `make bench` runs it.

`--record` also replaces the figures in docs/benchmarks.md between its two markers.
"""

from __future__ import annotations

import argparse
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Final

import startup
import train_step
from harness import ROOT, machine, peer
from networks import SEED

DOC: Final = ROOT / "docs" / "benchmarks.md"
MARKERS: Final = ("<!-- figures -->\n", "<!-- end of figures -->\n")


def conditions() -> str:
    """What the figures were taken on and with."""
    asked = "import torch; print(torch.__version__)"
    torch = subprocess.run([peer(), "-c", asked], check=True, capture_output=True, text=True)
    packages = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "numpy", "onnx"))
    lines = [*machine().values(), f"{packages}; PyTorch {torch.stdout.strip()}"]
    return f"{'; '.join(lines)}; seed {SEED}."


def recorded(text: str, figures: str) -> str:
    """The document with new figures between its markers."""
    before, _, rest = text.partition(MARKERS[0])
    _, _, after = rest.partition(MARKERS[1])
    return f"{before}{MARKERS[0]}\n{figures}\n\n{MARKERS[1]}{after}"


def main() -> None:
    """Measures, prints and, when asked, records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", action="store_true", help=f"into {Path(DOC.name)}")
    options = parser.parse_args()
    figures = f"{conditions()}\n\n{train_step.main()}\n\n{startup.main()}"
    print(figures)
    if options.record:
        DOC.write_text(recorded(DOC.read_text(), figures))


if __name__ == "__main__":
    main()
