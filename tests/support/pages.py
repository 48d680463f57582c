"""Tables of documentation pages that follow from a table of the product."""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def check_table(page: str, name: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Compare the table between `<!-- NAME -->` and `<!-- end of NAME -->`.

    TRIPLANE_ACCEPT=1 writes it.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    path = ROOT / "docs" / page
    head, found, rest = path.read_text().partition(begin)
    assert found, f"{page} has no line {begin}"
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]
    text = head + begin + "\n".join(lines) + "\n" + end + rest.partition(end)[2]
    if os.environ.get("TRIPLANE_ACCEPT") == "1":
        path.write_text(text)
    assert path.read_text() == text, "run this test with TRIPLANE_ACCEPT=1 and review the diff"


def script_of(page: str) -> str:
    """Return one Python program of a page's Python and shell blocks, in their order."""
    blocks = re.findall(r"```(python|sh)\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    head = "import subprocess as _subprocess\n"
    run = "_subprocess.run({!r}, shell=True, check=True, executable='/bin/bash')\n"
    return head + "\n".join(
        text if kind == "python" else run.format("set -e\n" + text) for kind, text in blocks
    )
