"""Fixtures of every test of the cloud's state."""

from tests.cloud.databases import database, database_url, postgres

__all__ = ["database", "database_url", "postgres"]
