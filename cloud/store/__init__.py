"""The state of the cloud: tables on one metadata object, and the database that stores them."""

from triplane.cloud.store.database import Database
from triplane.cloud.store.schema import BIG, METADATA, SCHEMA_VERSION

__all__ = ["BIG", "METADATA", "SCHEMA_VERSION", "Database"]
