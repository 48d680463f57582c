"""Documentation pages: their tables follow from tables of the product, and their blocks run.

A block of ```python or ```sh runs, unless `<!-- not run: REASON -->` stands above it. Below
`<!-- needs the extra NAME -->` it runs in an environment with that extra.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^(?:<!-- (?:not run: (?P<reason>[^\n]+)|needs the extra (?P<extra>\w+)) -->\n)?"
    r"```(?P<kind>python|sh)\n(?P<text>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
EXTRAS = {"flower": "flwr"}
"""A module that each extra installs."""

SANDBOX = ("unshare", "-rnpf", "--mount-proc", "--kill-child")
"""Namespaces of a page's own: its servers have the ports that it names, and end with it."""

LIMIT_S = 270.0
"""Seconds for a page; less than a test has, so that it fails with the page's output."""


@dataclass(frozen=True)
class Block:
    """A fenced block; `reason` says why it does not run, and is empty where it does."""

    kind: str
    text: str
    reason: str
    extra: str = ""
    """The extra that it needs, if any."""

    def runs(self) -> bool:
        """Return whether it runs in this environment."""
        return not self.reason and (not self.extra or find_spec(EXTRAS[self.extra]) is not None)


def blocks_of(page: Path) -> list[Block]:
    """Return the Python and shell blocks of a page, in order."""
    return [
        Block(match["kind"], match["text"], match["reason"] or "", match["extra"] or "")
        for match in BLOCK.finditer(page.read_text())
    ]


def program_of(page: Path) -> str:
    """Return one Python program of those blocks of a page that run."""
    parts = [
        block.text if block.kind == "python" else f"_sh({block.text!r})\n"
        for block in blocks_of(page)
        if block.runs()
    ]
    return "\n".join(["from page_shell import sh as _sh", *parts])


def outputs_of(page: Path) -> list[str]:
    """Return the blocks of ```text: what the blocks above them print, to the letter."""
    return re.findall(r"^```text\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def run_page(page: Path, folder: Path) -> str:
    """Run a page's blocks in an empty folder, as somebody with an empty home; return the output."""
    program = folder / "program"
    for name in ("program", "home", "empty"):
        (folder / name).mkdir()
    shutil.copy(Path(__file__).with_name("page_shell.py"), program)
    (program / "page.py").write_text(program_of(page))
    output = folder / "output"  # no pipe, which servers that go on running would hold open
    with output.open("w") as file, subprocess.Popen(
        [*sandbox(), sys.executable, "-W", "error", program / "page.py"],
        cwd=folder / "empty", env=environment(folder / "home"), text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            file.write(f"the page did not end within {LIMIT_S:g} s\n")
        finally:
            end(process)
    assert process.returncode == 0, output.read_text()
    return output.read_text()


def end(process: subprocess.Popen[str]) -> None:
    """End a page with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def sandbox() -> tuple[str, ...]:
    """Return the command in front of a page's; without it, pages of one test file take turns."""
    done = subprocess.run([*SANDBOX, "true"], capture_output=True, check=False)
    return SANDBOX if done.returncode == 0 else ()


def environment(home: Path) -> dict[str, str]:
    """Return the variables of a new user, whose `triplane` and `python` are this environment's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRIPLANE_", "XDG_"))}
    return kept | {
        "HOME": str(home), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip


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
