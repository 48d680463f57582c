"""What a user gets: the wheel and the sdist as the build backend makes them."""

import email
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("unified_ir", "cloud", "edge", "device", "proto")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CACHED = {"__pycache__", ".ruff_cache", ".mypy_cache"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    pytest.importorskip("hatchling.build", reason="an environment older than this pyproject")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        yield archive


@pytest.fixture(scope="module")
def sdist(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        yield {member.name.partition("/")[2] for member in archive if member.isfile()}


def sources():
    """The files of the five packages, as paths from the root."""
    return {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and not CACHED & set(path.parts)
    }


def test_the_wheel_holds_the_five_packages_under_one_name_and_nothing_else(wheel):
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert shipped == {f"triplane/{name}" for name in sources()}
    assert "triplane/__init__.py" not in shipped
    for needed in ("unified_ir/data/digits.npz", "unified_ir/data/digits.txt"):
        assert f"triplane/{needed}" in shipped
    for package in PACKAGES:
        assert f"triplane/{package}/py.typed" in shipped


def test_the_wheel_carries_its_licence_commands_and_requirements(wheel):
    info = next(name for name in wheel.namelist() if name.endswith("METADATA")).rpartition("/")[0]
    assert b"Apache License" in wheel.read(f"{info}/licenses/LICENSE")
    metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    base = {line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert len(base) == len(PROJECT["dependencies"])
    commands = wheel.read(f"{info}/entry_points.txt").decode()
    for verb, target in PROJECT["entry-points"]["triplane.verbs"].items():
        assert f"{verb} = {target}" in commands


def test_the_wheel_runs_from_a_folder_that_holds_nothing_else(wheel, tmp_path):
    wheel.extractall(tmp_path)
    program = """
import sys
sys.path[:] = [p for p in sys.path if ".ci" not in p]
sys.path.insert(0, sys.argv[1])
from triplane.unified_ir import data
from triplane.proto import errors
assert data.__file__.startswith(sys.argv[1]), data.__file__
assert errors.__file__.startswith(sys.argv[1]), errors.__file__
assert len(data.digits()) == 1797
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, cwd=tmp_path)


def test_the_sdist_holds_sources_tests_and_documents_and_no_link_tree(sdist):
    assert sources() <= sdist
    assert {"LICENSE", "README.md", "pyproject.toml", "tests/conftest.py"} <= sdist
    assert not [name for name in sdist if name.startswith((".ci", ".venv", "dist"))]
    assert not [name for name in sdist if CACHED & set(Path(name).parts)]
