"""`make deep SUITE=import`: networks and models of other libraries, and what becomes of them.

The files are written by `.venv-oracles` (`make oracles`), or lie in $TRIPLANE_EXPORTS already.
"""

import os
import platform
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.onnx.exports import AGREES, GRADIENT_AGREES, measured

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "docs" / "evidence" / "import.md"
PYTHON = ROOT / ".venv-oracles" / "bin" / "python"
WRITERS = ("benchmarks.oracles.exports", "benchmarks.oracles.classical")
INT8 = os.environ.get("TRIPLANE_INT8", "1") != "0"
"""Conversion to int8 takes most of the time; 0 leaves it out."""
WORKS = 0.95
"""The share of the files that must work from the model file."""

pytestmark = pytest.mark.deep


def exported(folder):
    """The exported files; written first where $TRIPLANE_EXPORTS names no folder of them."""
    named = os.environ.get("TRIPLANE_EXPORTS")
    if named:
        return sorted(Path(named).glob("*.onnx"))
    if not PYTHON.exists():
        pytest.skip("there is no .venv-oracles; run `make oracles`")
    for writer in WRITERS:
        subprocess.run([PYTHON, "-m", writer, folder], cwd=ROOT, check=True)
    return sorted(folder.glob("*.onnx"))


def test_exports_of_other_libraries_work_from_the_model_file(tmp_path):
    began_s = time.time()
    paths = [p for p in exported(tmp_path) if p.with_suffix(".npz").exists()]
    assert len(paths) >= 96, "40 networks by two exporters, and 16 models"
    rows = []
    for path in paths:
        rows.append(measured(path, tmp_path, int8=INT8))
        EVIDENCE.write_text(page(rows, began_s))  # what was measured stays if the run is stopped
    wrong = [f"{r.network}.{r.exporter}" for r in rows if r.wrong]
    assert not wrong, "an import answers, and not as onnxruntime does"
    gradients = [r for r in rows if isinstance(r.gradient, float)]
    assert len(gradients) >= 10
    assert not [r.network for r in gradients if not r.gradient <= GRADIENT_AGREES]
    assert sum(r.works for r in rows) >= WORKS * len(rows)
    assert not [(r.network, r.exporter, r.int8) for r in rows if r.int8.startswith("refused")]


def page(rows, began_s):
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    memory = sum(isinstance(r.memory, float) and r.memory <= AGREES for r in rows)
    counts = Counter(r.exporter for r in rows)
    head = (
        "# Imports of what other libraries export\n\n"
        f"`make deep SUITE=import`, {time.strftime('%Y-%m-%d', time.gmtime(began_s))}, "
        f"commit {commit}, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}; {(time.time() - began_s) / 60:.0f} minutes.\n\n"
        f"{len(rows)} files: {', '.join(f'{n} of {e}' for e, n in sorted(counts.items()))}. "
        f"{memory} agree with onnxruntime in memory, {sum(r.works for r in rows)} from the model "
        f"file, {sum(r.wrong for r in rows)} give another answer. Weights are random and sizes "
        "small. Two sets of inputs of different sizes each.\n\n"
        "* *in memory*, *from the file*: the largest error of an output, relative to its largest "
        "number, against onnxruntime on the exported file. From the file: saved and loaded.\n"
        "* *gradient*: the largest error relative to the largest gradient, against PyTorch, over "
        "the weights that the exporter left as they were; how many.\n"
        "* *int8*: whether `convert` makes an int8 bundle.\n\n"
        "| network | exporter | in memory | from the file | gradient | int8 |\n"
        "|---|---|---|---|---|---|\n"
    )
    notes = [f"* {r.network}, {r.exporter}: {n}" for r in rows for n in r.notes]
    body = "".join(line(r) for r in rows)
    return head + body + ("\n" + "\n".join(notes) + "\n" if notes else "")


def line(row):
    gradient = shown(row.gradient) + (f" ({row.weights})" if row.weights else "")
    cells = row.network, row.exporter, shown(row.memory), shown(row.file), gradient, row.int8
    return f"| {' | '.join(cells)} |\n"


def shown(x):
    return "" if x is None else f"{x:.1e}" if isinstance(x, float) else x
