import subprocess
import sys
from pathlib import Path

import pytest

LEAKS = {
    "thread": "import threading as t; t.Thread(target=t.Event().wait, daemon=True).start()",
    "process": "import subprocess; keep.append(subprocess.Popen(['sleep', '3']))",
    "descriptor": "keep.append(open(__file__))",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", LEAKS)
def test_a_test_that_leaves_something_behind_fails_and_names_it(tmp_path, what):
    conftest = (
        Path(__file__)
        .with_name("conftest.py")
        .read_text()
        .replace("GRACE_S = 5.0", "GRACE_S = 0.1")
    )
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_leaky.py").write_text(f"keep = []\n\ndef test_leaky():\n    {LEAKS[what]}\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        tmp_path,
    ]
    result = subprocess.run(
        [*command, tmp_path], capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path
    )
    assert result.returncode == 1, result.stdout
    assert f"left behind by this test: ['{what} " in result.stdout
