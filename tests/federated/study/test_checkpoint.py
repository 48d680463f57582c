"""The folder of a study: what a killed process leaves goes, and another writer is not disturbed."""

import numpy as np

from triplane.unified_ir.federated.study.checkpoint import NAME, Keeper, StudyProgress
from triplane.unified_ir.files import container

from .given import there

FACTS = {"seed": "0"}
PLACE = StudyProgress(shared={"w": np.ones(3, np.float32)})


def test_what_a_killed_process_left_is_removed(tmp_path):
    Keeper(tmp_path, FACTS).save(PLACE)
    left, other = tmp_path / f".{NAME}.{'0' * 16}.tmp", tmp_path / ".mine.tmp"
    for path in (left, other):
        path.write_bytes(b"half")
    keeper = Keeper(tmp_path, FACTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, NAME]
    np.testing.assert_array_equal(there(keeper.newest()).shared["w"], PLACE.shared["w"])


def test_a_file_that_another_process_is_writing_stays(tmp_path, monkeypatch):
    seen = []

    def meanwhile(_):
        def check(path):
            Keeper(tmp_path, FACTS)  # as a second process would open the folder now
            seen.append(path.exists())

        return check

    monkeypatch.setattr(container, "verified", meanwhile)
    Keeper(tmp_path, FACTS).save(PLACE)
    assert seen == [True]
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
