"""Graphs without an end, for every caller or for some shapes: what loads them comes back.

A bundle may answer its goldens and run for ever on another number of rows, so the trial lets it
pass; the server tries such numbers itself, and must be able to load something else afterwards.
"""

import pytest
from tests.attacks.endless import endless_for
from tests.runtime.samples import bundle_spec

from triplane.edge.serving import probe
from triplane.edge.serving.bundles import open_bundle
from triplane.edge.serving.repository import Repository
from triplane.proto.errors import Corrupt
from triplane.unified_ir.runtime import write_bundle


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(probe, "WARM_S", 0.3)
    monkeypatch.setattr(probe, "TRIES_S", 0.3)


@pytest.fixture
def repository():
    made = Repository(probe.plan)
    yield made
    made.close()


def bundle(tmp_path, rows):
    model = endless_for(bundle_spec().model, "y", rows)
    write_bundle(tmp_path / f"{rows}.bundle", bundle_spec(model=model))
    return open_bundle(tmp_path / f"{rows}.bundle")


@pytest.mark.parametrize("rows", [4, 8, 16])
def test_a_graph_that_never_ends_for_some_rows_is_served_but_not_merged(
    tmp_path, repository, impatient, rows
):
    version = repository.switch(bundle(tmp_path, rows))  # a run that is not stopped never ends
    assert version.runner.merged_rows == 0
    repository.switch(bundle(tmp_path, 99))


def test_a_graph_that_never_ends_for_one_row_is_refused_and_the_next_one_loads(
    tmp_path, repository, impatient
):
    repository.switch(bundle(tmp_path, 99))
    with pytest.raises(
        Corrupt, match=r"'digits': a run of one generated row did not end within 0\.3 s"
    ):
        repository.switch(bundle(tmp_path, 1))
    assert [(e.version, e.state) for e in repository.index(ready_only=True)] == [("1.0", "READY")]
    repository.switch(bundle(tmp_path, 99))
