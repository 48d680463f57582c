"""docs/reference/ is generated from the public names; TRIPLANE_ACCEPT=1 writes it."""

import os

import pytest
from tests.support.reference import FOLDER, pages, plain, signature


@pytest.mark.slow
def test_the_reference_is_that_of_the_public_names():
    texts = pages()
    if os.environ.get("TRIPLANE_ACCEPT") == "1":
        FOLDER.mkdir(exist_ok=True)
        for path in FOLDER.glob("*.md"):
            path.unlink()
        for name, text in texts.items():
            (FOLDER / name).write_text(text)
    written = {path.name: path.read_text() for path in FOLDER.glob("*.md")}
    assert written == texts, "run this test with TRIPLANE_ACCEPT=1 and review the diff"


def test_a_signature_shows_names_and_short_defaults():
    def example(x: int, *rest: int, y: str = "a", z: object = object, **more: int) -> None:
        """Do nothing."""

    assert signature(example) == "(x, *rest, y='a', z=..., **more)"


def test_text_is_escaped_outside_of_code():
    assert plain("x_1 * `x_1 * y`") == r"x\_1 \* `x_1 * y`"
