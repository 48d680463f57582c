"""A package's public names are stated once, for type checkers, and load on first use."""

import compileall
import subprocess
import sys
from pathlib import Path

import pytest

from triplane.proto.lazy import public_names

NAMESPACE = Path(__file__).parents[2] / ".ci" / "namespace"

SOURCE = """
from typing import TYPE_CHECKING
from triplane.proto.lazy import lazy_names
if TYPE_CHECKING:
    from lazily import below as below
    from lazily.shapes import Square as Square
    from lazily.shapes import area as area
__getattr__, __dir__, __all__ = lazy_names(__name__)
"""


@pytest.fixture
def lazily(tmp_path, monkeypatch):
    folder = tmp_path / "lazily"
    folder.mkdir()
    (folder / "__init__.py").write_text(SOURCE)
    (folder / "below.py").write_text("")
    (folder / "shapes.py").write_text("class Square: ...\ndef area(): return 4\n")
    monkeypatch.syspath_prepend(tmp_path)
    import lazily  # type: ignore[import-not-found]

    yield lazily
    for name in [name for name in sys.modules if name.split(".")[0] == "lazily"]:
        del sys.modules[name]


def test_names_load_when_they_are_first_used(lazily):
    assert "lazily.shapes" not in sys.modules
    assert lazily.area() == 4
    assert lazily.Square is sys.modules["lazily.shapes"].Square
    assert lazily.below is sys.modules["lazily.below"]


def test_the_names_are_those_for_type_checkers(lazily):
    assert lazily.__all__ == ["Square", "area", "below"] == dir(lazily)


def test_another_name_is_no_attribute(lazily):
    with pytest.raises(AttributeError, match="module 'lazily' has no attribute 'circle'"):
        _ = lazily.circle


def test_names_load_from_an_installation_without_sources(tmp_path):
    """As programs that bundle their interpreter ship it."""
    folder = tmp_path / "lazily"
    folder.mkdir()
    (folder / "__init__.py").write_text(SOURCE)
    (folder / "below.py").write_text("")
    (folder / "shapes.py").write_text("class Square: ...\ndef area(): return 4\n")
    assert compileall.compile_dir(folder, legacy=True, quiet=1)
    for path in folder.glob("*.py"):
        path.unlink()
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(NAMESPACE)!r}]\n"
    program += "from lazily import area, below; assert area() == 4"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_names_of_a_package_that_imports_at_once_leave_out_modules_and_private_names():
    namespace = {"Square": int, "area": len, "SIDES": 4, "_hidden": 1, "__name__": "x", "sys": sys}
    assert public_names(namespace) == ["SIDES", "Square", "area"]
