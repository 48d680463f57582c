"""Reads and writes of the registry's tables, each on a connection inside a transaction."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from sqlalchemy import Connection, Row, exists, select

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

MADE: Final = ("blob", "size", "root_digest", "content_digest")
"""Columns of a bundle that conversion fills."""


def pushed(connection: Connection, push: Push) -> Version | None:
    """The version that an earlier push of the same key made; Conflict where it asked otherwise."""
    row = connection.execute(select(VERSIONS).where(VERSIONS.c.push_key == push.key)).first()
    if row is None:
        return None
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
    latest = connection.scalar(select(MODELS.c.latest).where(MODELS.c.name == push.model))
    version = (latest or 0) + 1
    if latest is None:
        connection.execute(MODELS.insert().values(name=push.model, latest=version))
    else:
        connection.execute(
            MODELS.update().where(MODELS.c.name == push.model).values(latest=version)
        )
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
    """The version number that a reference means now; NotFound tells what there is."""
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
    """The version that a reference means now."""
    version = number(connection, reference)
    rows = connection.execute(
        select(VERSIONS).where(VERSIONS.c.model == reference.model, VERSIONS.c.version == version)
    )
    return _versions(connection, rows)[0]


def page(connection: Connection, model: str, size: int, before: int) -> list[Version]:
    """Up to `size` versions below `before` (0: all), newest first; NotFound: no such model."""
    number(connection, Reference(model))
    query = select(VERSIONS).where(VERSIONS.c.model == model)
    if before:
        query = query.where(VERSIONS.c.version < before)
    return _versions(
        connection, connection.execute(query.order_by(VERSIONS.c.version.desc()).limit(size))
    )


def models(connection: Connection) -> list[Model]:
    """All, by name."""
    pointing: dict[str, list[tuple[str, int]]] = {}
    for row in connection.execute(select(ALIASES).order_by(ALIASES.c.name)):
        pointing.setdefault(row.model, []).append((row.name, row.version))
    rows = connection.execute(select(MODELS).order_by(MODELS.c.name))
    return [
        Model(name=row.name, latest=row.latest, aliases=tuple(pointing.get(row.name, ())))
        for row in rows
    ]


def model(connection: Connection, name: str) -> Model:
    """One model."""
    latest = number(connection, Reference(name))
    return Model(name=name, latest=latest, aliases=tuple(aliases(connection, name)))


def aliases(connection: Connection, model: str) -> list[tuple[str, int]]:
    """(name, version) of a model's aliases, by name."""
    rows = connection.execute(
        select(ALIASES).where(ALIASES.c.model == model).order_by(ALIASES.c.name)
    )
    return [(row.name, row.version) for row in rows]


def point(connection: Connection, model: str, alias: str, version: int) -> None:
    """Let an alias mean a version; 0 takes it away."""
    number(connection, Reference(model, version or None))
    here = (ALIASES.c.model == model) & (ALIASES.c.name == alias)
    connection.execute(ALIASES.delete().where(here))
    if version:
        connection.execute(ALIASES.insert().values(model=model, name=alias, version=version))


def bundle(connection: Connection, model: str, version: int, target: str) -> BundleRecord | None:
    """The bundle of a version for a target, where it was ever asked for."""
    row = connection.execute(select(BUNDLES).where(_here(model, version, target))).first()
    return None if row is None else _bundle(row)


def start(
    connection: Connection, model: str, version: int, target: str, *, is_remade: bool = False
) -> None:
    """Count an attempt to convert; the row appears with the first.

    is_remade: a finished bundle is made again, so the count begins again too. Its digests stay in
    the row: they say which bytes have to come out.
    """
    here = _here(model, version, target)
    attempts = connection.scalar(select(BUNDLES.c.attempts).where(here))
    if attempts is not None:
        n_attempts = 1 if is_remade else attempts + 1
        begun = {"state": State.CONVERTING.name, "reason": "", "attempts": n_attempts}
        connection.execute(BUNDLES.update().where(here).values(begun))
        return
    connection.execute(
        BUNDLES.insert().values(
            model=model,
            version=version,
            target=target,
            state=State.CONVERTING.name,
            attempts=1,
            reason="",
            may_retry=False,
            blob=b"",
            size=0,
            root_digest=b"",
            content_digest=b"",
            signed_path="",
            needs={},
        )
    )


def finish(
    connection: Connection,
    bundle_: BundleRecord,
    *,
    may_retry: bool = False,
    is_input_lost: bool = False,
) -> None:
    """Write what became of a conversion, once: a READY bundle never changes.

    is_input_lost: nothing was converted because a file it reads is not here, so no attempt counts.
    """
    uncounted = {"attempts": 0} if is_input_lost else {}
    connection.execute(
        BUNDLES.update()
        .where(_here(bundle_.model, bundle_.version, bundle_.target))
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
    r = REPORTS.c
    here = (r.model == of.model) & (r.version == of.version) & (r.target == of.target)
    connection.execute(REPORTS.delete().where(here))
    row = {"model": of.model, "version": of.version, "target": of.target}
    connection.execute(REPORTS.insert().values(**row, report=zlib.compress(report)))


def report(connection: Connection, of: BundleRecord) -> bytes:
    """The stored report of a bundle; empty where an earlier release made it."""
    r = REPORTS.c
    here = (r.model == of.model) & (r.version == of.version) & (r.target == of.target)
    data = connection.scalar(select(r.report).where(here))
    return b"" if data is None else zlib.decompress(data)


def allow_again(connection: Connection, blobs: Iterable[bytes]) -> None:
    """Let every failed conversion that reads one of these blobs be tried again."""
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
    """(conversions begun, whether another may end otherwise)."""
    row = connection.execute(
        select(BUNDLES.c.attempts, BUNDLES.c.may_retry).where(
            _here(wanted.model, wanted.version, wanted.target)
        )
    ).one()
    return int(row.attempts), bool(row.may_retry)


def unfinished(connection: Connection) -> list[BundleRecord]:
    """Bundles whose conversion was begun and has not ended."""
    rows = connection.execute(
        select(BUNDLES)
        .where(BUNDLES.c.state == State.CONVERTING.name)
        .order_by(BUNDLES.c.model, BUNDLES.c.version, BUNDLES.c.target)
    )
    return [_bundle(row) for row in rows]


def ready(connection: Connection) -> list[BundleRecord]:
    """Every finished bundle, in the order of its name."""
    order = BUNDLES.c.model, BUNDLES.c.version, BUNDLES.c.target
    rows = connection.execute(
        select(BUNDLES).where(BUNDLES.c.state == State.READY.name).order_by(*order)
    )
    return [_bundle(row) for row in rows]


def sign(connection: Connection, model: str, version: int, target: str, path: str) -> BundleRecord:
    """Note where the signed target is. NotFound: no such bundle. Conflict: it is not READY."""
    unsigned = bundle(connection, model, version, target)
    if unsigned is None:
        raise NotFound(f"no bundle of {model}@{version} for {target}")
    if unsigned.state is not State.READY:
        raise Conflict(f"{unsigned} is {unsigned.state.name}; only a finished bundle is signed")
    here = _here(model, version, target)
    connection.execute(BUNDLES.update().where(here).values(signed_path=path))
    return _bundle(connection.execute(select(BUNDLES).where(here)).one())


def referenced(connection: Connection) -> set[bytes]:
    """Blobs that a version or a bundle names."""
    columns = (
        VERSIONS.c.blob, VERSIONS.c.calibration, VERSIONS.c.evaluation, BUNDLES.c.blob,
    )  # fmt: skip
    blobs = {bytes(name) for column in columns for name in connection.scalars(select(column))}
    return blobs - {b""}


def _here(model: str, version: int, target: str) -> Any:
    b = BUNDLES.c
    return (b.model == model) & (b.version == version) & (b.target == target)


def _versions(connection: Connection, rows: Iterable[Row[Any]]) -> list[Version]:
    """Versions of one model, with aliases and bundles as they are now."""
    listed = list(rows)
    if not listed:
        return []
    model, numbers = listed[0].model, [row.version for row in listed]
    b = BUNDLES.c
    bundles: dict[int, list[BundleRecord]] = {}
    here = (b.model == model) & b.version.between(min(numbers), max(numbers))
    for row in connection.execute(select(BUNDLES).where(here).order_by(b.target)):
        bundles.setdefault(row.version, []).append(_bundle(row))
    names: dict[int, list[str]] = {}
    for name, version in aliases(connection, model):
        names.setdefault(version, []).append(name)
    return [
        _version(row, names.get(row.version, ()), bundles.get(row.version, ())) for row in listed
    ]


def _version(row: Row[Any], names: Sequence[str], bundles: Sequence[BundleRecord]) -> Version:
    return Version(
        model=row.model,
        version=row.version,
        model_digest=bytes(row.model_digest),
        blob=bytes(row.blob),
        size=row.size,
        created_s=row.created_s,
        created_by=row.created_by,
        recipe=ConversionRecipe(
            quantize=row.quantize,
            calibration=bytes(row.calibration),
            entry=row.entry,
            max_accuracy_drop=row.max_accuracy_drop,
            evaluation=bytes(row.evaluation),
        ),
        lineage=Lineage(parent=row.parent, source=row.source, note=row.note),
        aliases=tuple(names),
        bundles=tuple(bundles),
    )


def _bundle(row: Row[Any]) -> BundleRecord:
    needs = {**row.needs, "instructions": tuple(row.needs.get("instructions", ()))}
    return BundleRecord(
        model=row.model,
        version=row.version,
        target=row.target,
        state=State[row.state],
        reason=row.reason,
        signed_path=row.signed_path,
        needs=Needs(**needs),
        **{name: _plain(getattr(row, name)) for name in MADE},
    )


def _plain(value: Any) -> Any:
    return value if isinstance(value, int) else bytes(value)
