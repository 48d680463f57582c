"""One name per module: a second identity would mean two copies of every class and every table."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("unified_ir", "cloud", "edge", "device", "proto")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_refuses_to_be_imported_without_its_namespace(package):
    result = subprocess.run(
        [sys.executable, "-c", f"import {package}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode != 0
    assert f"import this package as triplane.{package}" in result.stderr


def test_every_top_folder_with_code_is_linked_into_the_namespace():
    links = ROOT / ".ci" / "namespace" / "triplane"
    assert {link.name for link in links.iterdir()} == set(PACKAGES)
    for link in links.iterdir():
        assert link.resolve() == ROOT / link.name


def test_the_namespace_has_no_init_so_that_others_may_extend_it():
    import triplane

    assert getattr(triplane, "__file__", None) is None
