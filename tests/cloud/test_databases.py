"""What a test sees where PostgreSQL is not installed."""

import pytest
from tests.cloud import databases


def test_absent_postgresql_skips_with_the_reason(monkeypatch):
    monkeypatch.delenv("TRIPLANE_REQUIRE", raising=False)
    with pytest.raises(pytest.skip.Exception, match="initdb"):
        databases.missing("initdb is not installed")


def test_absent_postgresql_fails_where_it_is_required(monkeypatch):
    monkeypatch.setenv("TRIPLANE_REQUIRE", "browser,postgres")
    with pytest.raises(pytest.fail.Exception, match="asks for PostgreSQL"):
        databases.missing("initdb is not installed")
