"""A file database, where the behaviour under test is not the database's."""

import pytest

from triplane.cloud.store import Database


@pytest.fixture
def sqlite(tmp_path):
    opened = Database.open(f"sqlite:///{tmp_path / 'cloud.db'}")
    yield opened
    opened.close()
