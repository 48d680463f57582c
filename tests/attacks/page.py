"""`python -m tests.attacks.page`: the tables of docs/attacks.md, anew from the tests."""

import re
from pathlib import Path

from tests.attacks import test_hostile_callers, test_stolen_cloud
from tests.attacks.cases import table

PAGE = Path(__file__).parents[2] / "docs" / "attacks.md"
TABLES = {"node": test_stolen_cloud.CASES, "cloud": test_hostile_callers.CASES}


def rendered(text):
    """The page with the tables of today between its markers."""
    for name, cases in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        pattern = f"(?<={re.escape(begin)}).*?(?={re.escape(end)})"
        parts = re.split(pattern, text, flags=re.DOTALL)
        assert len(parts) == 2, name
        text = f"{table(cases)}\n".join(parts)
    return text


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
