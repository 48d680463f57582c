import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WAIT_S = 60
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


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_killed_run_leaves_no_process_that_its_tests_started(tmp_path, workers):
    """In a session of its own, two below, as the processes of a supervisor are."""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_waits.py").write_text(
        "import subprocess\n\ndef test_waits():\n"
        "    script = 'sleep 3600 & echo $! > new; mv new pid; wait'\n"
        "    subprocess.run(['sh', '-c', script], start_new_session=True)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(workers)]
    with subprocess.Popen(
        [*command, "--rootdir", tmp_path, tmp_path], stdout=subprocess.DEVNULL, cwd=tmp_path
    ) as run:
        deadline = time.monotonic() + WAIT_S
        while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
            assert run.poll() is None
            time.sleep(0.05)
        started = os.pidfd_open(int((tmp_path / "pid").read_text()))
        try:
            run.kill()
            run.wait()
            poll = select.poll()
            poll.register(started, select.POLLIN)
            ended = poll.poll(1000 * WAIT_S)
            if not ended:
                signal.pidfd_send_signal(started, signal.SIGKILL)
        finally:
            os.close(started)
    assert ended


HANGS = {
    "python": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "asyncio": "import asyncio; asyncio.run(asyncio.Event().wait())",
    "c": "import ctypes; mutex = ctypes.create_string_buffer(64); "
    "lock = ctypes.CDLL(None).pthread_mutex_lock; lock(mutex); lock(mutex)",
}


@pytest.mark.slow
@pytest.mark.parametrize("where", HANGS)
def test_a_test_that_hangs_fails_alone_and_shows_every_stack(tmp_path, where):
    """In C code that gives Python no turn, the worker ends and another goes on."""
    (tmp_path / "test_hanging.py").write_text(
        f"def test_before():\n    pass\n\n"
        f"def test_hanging():\n    {HANGS[where]}\n\n"
        f"def test_after():\n    pass\n"
    )
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert 0 < settings["timeout"] < settings["faulthandler_timeout"]
    assert settings["faulthandler_exit_on_timeout"]
    options = ["timeout=2", "faulthandler_timeout=6", "faulthandler_exit_on_timeout=true"]
    (tmp_path / "test_finished.py").write_text("def test_first():\n    pass\n")
    (tmp_path / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-n1", "--dist=loadfile", "-p", "no:cacheprovider"]
    for option in options:
        command += ["-o", option]
    result = subprocess.run(
        [*command, f"--rootdir={tmp_path}", tmp_path],
        capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 1, result.stdout
    assert "1 failed, 3 passed" in result.stdout
    assert "test_hanging" in result.stdout
    shown = result.stdout + result.stderr
    assert re.search(r'test_hanging\.py(:|", line )5', shown), shown
