"""Which test functions run a line: coverage of the whole suite, a folder of tests at a time.

The folders that are done stay done, so a search that was interrupted goes on where it was.
"""

import hashlib
import os
import subprocess
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
APART = {"mutation", "support", "__pycache__"}  # they hold no tests of the product
SETTINGS = """
[run]
branch = false
patch = subprocess
parallel = true
source_pkgs = triplane.unified_ir, triplane.cloud, triplane.edge, triplane.device, triplane.proto
omit = *_pb2.py, *_pb2_grpc.py
"""


def folders() -> list[Path]:
    return [path for path in sorted(TESTS.iterdir()) if path.is_dir() and path.name not in APART]


def digest(paths: Iterable[Path]) -> str:
    """Return a name of what some files hold."""
    whole = hashlib.sha256()
    for path in sorted(paths):
        whole.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return whole.hexdigest()[:16]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of `make test`; the profile of `make deep` would search for hours."""
    inherited = {k: v for k, v in os.environ.items() if k != "HYPOTHESIS_PROFILE"}
    return {**inherited, **more}


def record(work: Path, folder: Path, workers: int) -> Path:
    """Run a folder's tests under coverage, unless that is done; return the file of coverage."""
    data = work / f"{folder.name}-{digest(folder.rglob('*.py'))}.coverage"
    if data.exists():
        return data
    parts = work / f"{folder.name}.parts"
    parts.mkdir(parents=True, exist_ok=True)
    rc = parts / "coveragerc"
    rc.write_text(SETTINGS + f"data_file = {parts / 'part'}\n")
    # fmt: off
    command = [
        sys.executable, "-m", "pytest", "-q", "-n", str(workers), "--dist", "loadfile",
        "-p", "no:cacheprovider", "-p", "tests.mutation.contexts",
        "--cov", f"--cov-config={rc}", "--cov-report=", str(folder),
    ]
    # fmt: on
    env = environment(PYTHONPATH=str(ROOT), COVERAGE_PROCESS_START=str(rc))
    subprocess.run(command, cwd=ROOT, env=env, check=False)
    combined = coverage.Coverage(data_file=str(parts / "all"), config_file=str(rc))
    with warnings.catch_warnings():  # a child that was killed leaves a file that cannot be read
        warnings.simplefilter("ignore", coverage.exceptions.CoverageWarning)
        combined.combine([str(p) for p in parts.glob("part*")], keep=True)
    combined.save()
    next(parts.glob("all*")).replace(data)
    return data


class Covering:
    """The tests of a line, those of its own package first."""

    def __init__(self, files: list[Path]) -> None:
        self._data = []
        for file in files:
            self._data.append(coverage.CoverageData(basename=str(file)))
            self._data[-1].read()

    def tests(self, path: str, line: int) -> list[str]:
        """Return node ids (parameters left out) of the functions that ran a line."""
        names: set[str] = set()
        here: Counter[str] = Counter()
        for data in self._data:
            for lines in self._measured(data, path):
                names.update(context for context in lines.get(line, ()) if context)
                for contexts in lines.values():
                    here.update(context for context in contexts if context)
        if not names:  # run on import or in a child process: whoever runs the most of the module
            names = {name for name, _ in here.most_common(60)}
        return sorted(names, key=lambda name: (-closeness(name, path), -here[name], name))

    def _measured(self, data, path):
        for file in data.measured_files():
            if file.endswith(f"/{path}"):
                lines: defaultdict[int, list[str]] = defaultdict(list)
                lines.update(data.contexts_by_lineno(file))
                yield lines


def closeness(test: str, path: str) -> int:
    """How many words of a test's path a module's path shares."""
    words = set(Path(test.partition("::")[0]).with_suffix("").parts[1:])
    return len(
        {word.removeprefix("test_") for word in words} & set(Path(path).with_suffix("").parts)
    )
