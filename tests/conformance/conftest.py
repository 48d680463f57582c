"""The databases of the cloud, for the suite of stores."""

from tests.cloud.databases import database, database_url, postgres

__all__ = ["database", "database_url", "postgres"]
