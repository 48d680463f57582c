"""Reads and writes of the registry's tables, each on a connection inside a transaction."""

import zlib
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Final

from sqlalchemy import Connection, Row, Table, exists, select

from triplane.cloud.registry.names import LATEST, Reference
from triplane.cloud.registry.tables import ALIASES, BUNDLES, MODELS, REPORTS, VERSIONS
from triplane.cloud.registry.values import (
    BundleRecord,
    ConversionRecipe,
    Lineage,
    Model,
    Needs,
    Push,
    State,
    Version,
)
from triplane.proto.errors import Conflict, NotFound
from triplane.proto.messages import value_from

MADE: Final = ("blob", "size", "root_digest", "content_digest")
"""Columns of a bundle that conversion fills."""


def version_of_push(connection: Connection, push: Push) -> Version | None:
    """Return the version that this push made before. Conflict: its key made another one."""
    row = connection.execute(select(VERSIONS).where(VERSIONS.c.push_key == push.key)).first()
    if row is None:
        return None
    # A repeated request is answered with its version; a different one must not pass as repeated.
    if bytes(row.push_digest) != push.digest:
        raise Conflict(
            f"key {push.key.hex()} registered {row.model}@{row.version} with other content; "
            "a new push needs a new random key"
        )
    return _versions(connection, [row])[0]


def insert(
    connection: Connection, push: Push, *, digest: bytes, size: int, now_s: float, by: str
) -> Version:
    """Write the next version of the model and its aliases. NotFound: its parent."""
    if push.lineage.parent:
        number(connection, Reference.parse(push.lineage.parent))
    here = MODELS.c.name == push.model
    latest = connection.scalar(select(MODELS.c.latest).where(here))
    # Safe without a sequence: only the one writer runs this, so no two pushes read the same number.
    version = (latest or 0) + 1
    if latest is None:
        connection.execute(MODELS.insert().values(name=push.model, latest=version))
    else:
        connection.execute(MODELS.update().where(here).values(latest=version))
    connection.execute(
        VERSIONS.insert().values(
            model=push.model,
            version=version,
            model_digest=digest,
            blob=push.blob,
            size=size,
            created_s=now_s,
            created_by=by,
            push_key=push.key,
            push_digest=push.digest,
            **asdict(push.recipe),
            **asdict(push.lineage),
        )
    )
    for alias in set(push.aliases):
        point(connection, push.model, alias, version)
    return get(connection, Reference(push.model, version))


def number(connection: Connection, reference: Reference) -> int:
    """Return the version number that a reference means now; NotFound lists what exists."""
    latest = connection.scalar(select(MODELS.c.latest).where(MODELS.c.name == reference.model))
    if latest is None:
        raise NotFound(f"no model {reference.model!r}; triplane registry ls lists them")
    if reference.version is not None:
        if not 1 <= reference.version <= latest:
            raise NotFound(f"no version {reference}; the newest is {latest}")
        return reference.version
    if reference.alias == LATEST:
        return int(latest)
    version = connection.scalar(
        select(ALIASES.c.version)
        .where(ALIASES.c.model == reference.model)
        .where(ALIASES.c.name == reference.alias)
    )
    if version is None:
        names = [LATEST, *(name for name, _ in aliases(connection, reference.model))]
        raise NotFound(
            f"{reference.model} has no alias {reference.alias!r}, only {', '.join(names)}"
        )
    return int(version)


def get(connection: Connection, reference: Reference) -> Version:
    """Return the version that a reference means now."""
    version = number(connection, reference)
    v = VERSIONS.c
    query = select(VERSIONS).where(v.model == reference.model, v.version == version)
    return _versions(connection, connection.execute(query))[0]


def page(connection: Connection, model: str, size: int, before: int) -> list[Version]:
    """Return up to `size` versions below `before` (0: all), newest first. NotFound."""
    number(connection, Reference(model))
    query = select(VERSIONS).where(VERSIONS.c.model == model)
    if before:
        query = query.where(VERSIONS.c.version < before)
    return _versions(
        connection, connection.execute(query.order_by(VERSIONS.c.version.desc()).limit(size))
    )


def models(connection: Connection) -> list[Model]:
    """Return all models, by name."""
    pointing: dict[str, list[tuple[str, int]]] = {}
    for row in connection.execute(select(ALIASES).order_by(ALIASES.c.name)):
        pointing.setdefault(row.model, []).append((row.name, row.version))
    rows = connection.execute(select(MODELS).order_by(MODELS.c.name))
    return [
        Model(name=row.name, latest=row.latest, aliases=tuple(pointing.get(row.name, ())))
        for row in rows
    ]


def model(connection: Connection, name: str) -> Model:
    """Return one model. NotFound."""
    latest = number(connection, Reference(name))
    return Model(name=name, latest=latest, aliases=tuple(aliases(connection, name)))


def aliases(connection: Connection, model: str) -> list[tuple[str, int]]:
    """Return (name, version) of a model's aliases, by name."""
    rows = connection.execute(
        select(ALIASES).where(ALIASES.c.model == model).order_by(ALIASES.c.name)
    )
    return [(row.name, row.version) for row in rows]


def point(connection: Connection, model: str, alias: str, version: int) -> None:
    """Set an alias to a version; 0 removes it."""
    number(connection, Reference(model, version or None))
    here = (ALIASES.c.model == model) & (ALIASES.c.name == alias)
    connection.execute(ALIASES.delete().where(here))
    if version:
        connection.execute(ALIASES.insert().values(model=model, name=alias, version=version))


def bundle(connection: Connection, model: str, version: int, target: str) -> BundleRecord | None:
    """Return the bundle of a version for a target; None if it was never requested."""
    row = connection.execute(select(BUNDLES).where(_here(model, version, target))).first()
    return None if row is None else _bundle(row)


def start(
    connection: Connection, model: str, version: int, target: str, *, is_remade: bool = False
) -> None:
    """Count an attempt to convert; the first one inserts the row.

    is_remade: a finished bundle is made again, so the count begins at 1 again. Its digests stay in
    the row, because the same bytes have to come out.
    """
    here = _here(model, version, target)
    attempts = connection.scalar(select(BUNDLES.c.attempts).where(here))
    if attempts is not None:
        n_attempts = 1 if is_remade else attempts + 1
        begun = {"state": State.CONVERTING.name, "reason": "", "attempts": n_attempts}
        connection.execute(BUNDLES.update().where(here).values(begun))
        return
    new = BundleRecord(model=model, version=version, target=target, state=State.CONVERTING)
    row = asdict(new) | {"state": new.state.name, "needs": {}, "attempts": 1, "may_retry": False}
    connection.execute(BUNDLES.insert().values(row))


def finish(
    connection: Connection,
    bundle_: BundleRecord,
    *,
    may_retry: bool = False,
    is_input_lost: bool = False,
) -> None:
    """Write the outcome of a conversion, once: a READY bundle never changes.

    is_input_lost: nothing was converted because an input file is missing, so no attempt counts.
    """
    uncounted = {"attempts": 0} if is_input_lost else {}
    connection.execute(
        BUNDLES.update()
        .where(_here(*bundle_.key))
        # The condition makes the outcome final: a late or repeated one changes no row.
        .where(BUNDLES.c.state == State.CONVERTING.name)
        .values(
            state=bundle_.state.name,
            reason=bundle_.reason,
            may_retry=may_retry or is_input_lost,
            needs=asdict(bundle_.needs),
            **uncounted,
            **{name: getattr(bundle_, name) for name in MADE},
        )
    )


def keep_report(connection: Connection, of: BundleRecord, report: bytes) -> None:
    """Store what the report of a bundle measured, so that the same bytes can be made again."""
    connection.execute(REPORTS.delete().where(_here(*of.key, REPORTS)))
    row = {"model": of.model, "version": of.version, "target": of.target}
    connection.execute(REPORTS.insert().values(**row, report=zlib.compress(report)))


def report(connection: Connection, of: BundleRecord) -> bytes:
    """Return the stored report of a bundle; empty if an earlier release made the bundle."""
    data = connection.scalar(select(REPORTS.c.report).where(_here(*of.key, REPORTS)))
    return b"" if data is None else zlib.decompress(data)


def allow_again(connection: Connection, blobs: Iterable[bytes]) -> None:
    """Allow every failed conversion that reads one of these blobs to be tried again."""
    v, b = VERSIONS.c, BUNDLES.c
    names = list(blobs)
    reads = v.blob.in_(names) | v.calibration.in_(names) | v.evaluation.in_(names)
    is_of_one = exists().where(v.model == b.model, v.version == b.version, reads)
    connection.execute(
        BUNDLES.update()
        .where(b.state == State.FAILED.name, is_of_one)
        .values(may_retry=True, attempts=0)
    )


def attempts(connection: Connection, wanted: BundleRecord) -> tuple[int, bool]:
    """Return how many conversions were begun, and whether another attempt may succeed."""
    row = connection.execute(
        select(BUNDLES.c.attempts, BUNDLES.c.may_retry).where(_here(*wanted.key))
    ).one()
    return int(row.attempts), bool(row.may_retry)


def in_state(connection: Connection, state: State) -> list[BundleRecord]:
    """Return every bundle in a state, by name."""
    order = BUNDLES.c.model, BUNDLES.c.version, BUNDLES.c.target
    query = select(BUNDLES).where(BUNDLES.c.state == state.name).order_by(*order)
    return [_bundle(row) for row in connection.execute(query)]


def sign(connection: Connection, model: str, version: int, target: str, path: str) -> BundleRecord:
    """Record the path of the signed target. NotFound: no such bundle. Conflict: it is not READY."""
    unsigned = bundle(connection, model, version, target)
    if unsigned is None:
        raise NotFound(f"no bundle of {model}@{version} for {target}")
    if unsigned.state is not State.READY:
        raise Conflict(f"{unsigned} is {unsigned.state.name}; only a finished bundle is signed")
    here = _here(model, version, target)
    connection.execute(BUNDLES.update().where(here).values(signed_path=path))
    return _bundle(connection.execute(select(BUNDLES).where(here)).one())


def referenced(connection: Connection) -> set[bytes]:
    """Return the blobs that a version or a bundle names."""
    columns = (
        VERSIONS.c.blob, VERSIONS.c.calibration, VERSIONS.c.evaluation, BUNDLES.c.blob,
    )  # fmt: skip
    blobs = {bytes(name) for column in columns for name in connection.scalars(select(column))}
    return blobs - {b""}


def _here(model: str, version: int, target: str, table: Table = BUNDLES) -> Any:
    c = table.c
    return (c.model == model) & (c.version == version) & (c.target == target)


def _versions(connection: Connection, rows: Iterable[Row[Any]]) -> list[Version]:
    """Return versions of one model with their present aliases and bundles."""
    listed = list(rows)
    if not listed:
        return []
    model, numbers = listed[0].model, [row.version for row in listed]
    b = BUNDLES.c
    bundles: dict[int, list[BundleRecord]] = {}
    # One query for a page of versions instead of one for each.
    here = (b.model == model) & b.version.between(min(numbers), max(numbers))
    for row in connection.execute(select(BUNDLES).where(here).order_by(b.target)):
        bundles.setdefault(row.version, []).append(_bundle(row))
    names: dict[int, list[str]] = {}
    for name, version in aliases(connection, model):
        names.setdefault(version, []).append(name)
    return [
        value_from(
            Version,
            row,
            recipe=value_from(ConversionRecipe, row),
            lineage=value_from(Lineage, row),
            aliases=tuple(names.get(row.version, ())),
            bundles=tuple(bundles.get(row.version, ())),
        )
        for row in listed
    ]


def _bundle(row: Row[Any]) -> BundleRecord:
    needs = {**row.needs, "instructions": tuple(row.needs.get("instructions", ()))}
    return value_from(BundleRecord, row, state=State[row.state], needs=Needs(**needs))
