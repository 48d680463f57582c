"""Tables of names, certificates, tokens and the audit log. Times are seconds since 1970, UTC."""

from typing import Final

import sqlalchemy as sa

from triplane.cloud.store.schema import METADATA

PRINCIPALS: Final = sa.Table(
    "principals",
    METADATA,
    sa.Column("name", sa.String(63), primary_key=True),
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("enrolled_s", sa.Double, nullable=False),
    sa.Column("revoked", sa.Boolean, nullable=False),
)

CERTIFICATES: Final = sa.Table(
    "certificates",
    METADATA,
    sa.Column("serial", sa.String(40), primary_key=True),
    sa.Column("name", sa.ForeignKey("principals.name"), nullable=False, index=True),
    sa.Column("issued_s", sa.Double, nullable=False),
    sa.Column("expires_s", sa.Double, nullable=False),
    sa.Column("revoked", sa.Boolean, nullable=False),
)

KEYS: Final = sa.Table(
    "certificate_keys",  # beside certificates, whose rows older releases wrote without it
    METADATA,
    sa.Column("serial", sa.ForeignKey("certificates.serial"), primary_key=True),
    sa.Column("sha256", sa.LargeBinary(32), nullable=False),  # of the public key, DER
)

TOKENS: Final = sa.Table(
    "tokens",
    METADATA,
    sa.Column("id", sa.LargeBinary(16), primary_key=True),
    sa.Column("key", sa.LargeBinary(32), nullable=False),
    sa.Column("name", sa.String(63), nullable=False),
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("labels", sa.Text, nullable=False),
    sa.Column("expires_s", sa.Double, nullable=False),
    # Empty until the token is used: a repeated request gets the same certificate.
    sa.Column("request", sa.LargeBinary),
    sa.Column("certificate", sa.LargeBinary),
)

AUDIT: Final = sa.Table(
    "audit",
    METADATA,
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("time_s", sa.Double, nullable=False),
    sa.Column("actor", sa.String(63), nullable=False),
    sa.Column("action", sa.String(64), nullable=False),
    sa.Column("subject", sa.String(256), nullable=False),
    sa.Column("details", sa.Text, nullable=False),
    sa.Column("previous", sa.LargeBinary(32), nullable=False),
    sa.Column("digest", sa.LargeBinary(32), nullable=False),
)
