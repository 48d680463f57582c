"""`.ci/venv`, the one maker of environments, run on a project of one empty requirements file."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "venv"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not SCRIPT.exists(), reason="an sdist does not carry the repository's tools"
    ),
]


@pytest.fixture
def project(tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci" / "venv")
    (tmp_path / "wanted.txt").write_text("# nothing\n")
    return tmp_path


def make(project, *wanted, **variables):
    variables = {"PYTHON": sys.executable, "OFFLINE": ""} | variables
    return subprocess.run(
        [".ci/venv", "env", *(wanted or ("-r", "wanted.txt"))],
        cwd=project,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_an_environment_is_made_once_and_anew_when_its_files_change(project):
    first = make(project)
    assert first.returncode == 0, first.stderr
    assert "making env" in first.stderr
    assert (project / "env" / "bin" / "python").exists()
    assert make(project).stderr == ""
    (project / "wanted.txt").write_text("no/such/file.whl\n")
    failed = make(project)
    assert failed.returncode != 0
    assert "making env" in failed.stderr
    assert "could not be filled" in failed.stderr
    assert not (project / "env" / ".stamp").exists(), "what is not whole is made anew next time"


def test_a_folder_that_is_no_environment_is_left_alone(project):
    (project / "env").mkdir()
    (project / "env" / "thesis.txt").write_text("years of work")
    result = make(project)
    assert result.returncode != 0
    assert "no virtual environment" in result.stderr
    assert (project / "env" / "thesis.txt").read_text() == "years of work"


def test_a_missing_interpreter_is_named_with_the_way_out(project):
    result = make(project, PYTHON="/nonexistent/python")
    assert result.returncode != 0
    assert "needs Python 3.11 or newer; /nonexistent/python is missing" in result.stderr
    assert "make PYTHON=" in result.stderr


def interpreter(folder, refused):
    """An interpreter that fails whenever its program contains `refused`."""
    path = folder / "python"
    real = sys.executable
    path.write_text(f'#!/bin/sh\ncase "$2" in *{refused}*) exit 1;; esac\nexec "{real}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_an_old_interpreter_is_named_with_its_version(project):
    result = make(project, PYTHON=interpreter(project, "version_info"))
    assert "needs Python 3.11 or newer" in result.stderr
    assert f"Python {sys.version.split()[0]}" in result.stderr


def test_debian_without_its_venv_package_gets_the_line_that_installs_it(project):
    result = make(project, PYTHON=interpreter(project, "ensurepip"))
    assert result.returncode != 0
    assert "sudo apt-get install python3-venv" in result.stderr


def test_offline_without_wheels_says_how_to_get_them(project):
    result = make(project, OFFLINE="1")
    assert result.returncode != 0
    assert "make wheels" in result.stderr
