"""Every example runs as it stands and reaches what it says."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def output_of(name, capsys):
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_digits_are_read(capsys):
    (line,) = output_of("digits.py", capsys)
    assert float(line.rpartition(" ")[2]) >= 0.97


@pytest.mark.slow
def test_a_text_is_written(capsys):
    foretold, text = output_of("char_rnn.py", capsys)
    assert float(foretold.rpartition(" ")[2]) >= 0.9
    assert text.startswith("the quick brown fox jumps over the lazy dog while the five")
