import subprocess
import sys

import pytest

from triplane.edge import serving


def test_the_public_names_are_these_and_all_of_them_load():
    assert serving.__all__ == [
        "Options",
        "Repository",
        "Servable",
        "Server",
        "ServingLimits",
        "open_bundle",
    ]
    for name in serving.__all__:
        assert getattr(serving, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = serving.Nothing


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, triplane.edge.serving; print({'grpc', 'numpy'} & {*sys.modules})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"
