"""Every example runs as it stands and reaches what it says."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
GUIDE = Path(__file__).parents[2] / "docs" / "training.md"


def output_of(name, capsys):
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_digits_are_read(capsys):
    (line,) = output_of("digits.py", capsys)
    assert float(line.rpartition(" ")[2]) >= 0.97


@pytest.mark.slow
def test_a_text_is_written(capsys):
    foretold, text = output_of("char_rnn.py", capsys)
    assert float(foretold.rpartition(" ")[2]) >= 0.9
    assert text.startswith("the quick brown fox jumps over the lazy dog while the five")


@pytest.mark.slow
def test_the_guide_reaches_what_it_says(capsys):
    first = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0]
    found: dict[str, Any] = {"__name__": "guide"}
    exec(compile(first, str(GUIDE), "exec"), found)
    assert found["trainer"].history.last["validation.accuracy"] >= 0.97
    assert set(found["module"].entries) == {"predict", "evaluate", "train_step", "adapt"}
