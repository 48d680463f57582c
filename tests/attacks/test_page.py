import re
from pathlib import Path

from tests.attacks.page import PAGE, TABLES, rendered

REPOSITORY = Path(__file__).parents[2]
NAMED = (
    "flipped byte", "unknown key", "missing threshold", "rollback", "freeze", "mix-and-match",
    "fast-forward", "endless data", "slow retrieval", "wrong hardware", "forged report",
    "replayed token", "revoked certificate", "stolen `auto` key", "path traversal", "zip bomb",
    "custom-op library",
)  # fmt: skip


def test_the_page_shows_what_the_tests_check():
    text = PAGE.read_text()
    assert rendered(text) == text, "python -m tests.attacks.page"


def test_every_attack_that_was_promised_is_tried():
    tried = {case.attack for cases in TABLES.values() for case in cases}
    assert set(NAMED) <= tried


def test_every_case_has_a_name_of_its_own_and_is_stopped_by_a_module_that_exists():
    for cases in TABLES.values():
        ids = [case.id for case in cases]
        assert len(set(ids)) == len(ids)
    modules = {case.by for cases in TABLES.values() for case in cases}
    modules |= set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", PAGE.read_text()))
    assert [name for name in sorted(modules) if not (REPOSITORY / name).is_file()] == []
