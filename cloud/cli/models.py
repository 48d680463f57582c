"""Models, versions and bundles as the registry verbs list and show them."""

from __future__ import annotations

from triplane.cloud.cli.connection import Answer, Calls
from triplane.cloud.cli.text import age, enum_text, facts, size, table
from triplane.proto.registry_pb2 import (
    Bundle,
    ListModelsRequest,
    ListVersionsRequest,
    Model,
    Version,
)

DIGEST_CHARS = 12


def list_models(cloud: Calls) -> Answer:
    """List every model, one line each."""
    models = cloud.registry.ListModels(ListModelsRequest()).models
    rows = [(m.name, str(m.versions), f"@{m.latest}", aliases_text(m)) for m in models]
    empty = "no model yet; push one with: triplane registry push MODEL.tpm"
    text = table(("MODEL", "VERSIONS", "LATEST", "ALIASES"), rows) if rows else empty
    return {"models": models}, text


def list_versions(cloud: Calls, model: str) -> Answer:
    """List every version of one model, newest first."""
    versions: list[Version] = []
    before = 0
    # Page by page until version 1, the oldest, was listed.
    while before != 1:
        page = cloud.registry.ListVersions(ListVersionsRequest(model=model, before=before))
        versions += page.versions
        before = page.versions[-1].version if page.versions else 1
    rows = [
        (
            f"{v.model}@{v.version}",
            ",".join(v.aliases),
            size(v.size),
            v.model_digest.hex()[:DIGEST_CHARS],
            age(v.created_s),
            v.created_by,
            v.lineage.note,
        )
        for v in versions
    ]
    headings = ("VERSION", "ALIASES", "SIZE", "DIGEST", "PUSHED", "BY", "NOTE")
    return {"versions": versions}, table(headings, rows)


def aliases_text(model: Model) -> str:
    """Format aliases as "stable=3, canary=4"."""
    return ", ".join(f"{alias.name}={alias.version}" for alias in model.aliases)


def version_text(version: Version) -> str:
    """Describe one version."""
    recipe, lineage = version.recipe, version.lineage
    return facts(
        [
            ("version", f"{version.model}@{version.version}"),
            ("aliases", ", ".join(version.aliases)),
            ("digest", version.model_digest.hex()),
            ("size", f"{size(version.size)} ({version.size} bytes)"),
            ("pushed", f"{age(version.created_s)} by {version.created_by}"),
            ("parent", lineage.parent),
            ("source", lineage.source),
            ("note", lineage.note),
            ("recipe", f"{recipe.quantize or 'float'}, entry {recipe.entry}"),
            *(("bundle", bundle_text(bundle)) for bundle in version.bundles),
        ]
    )


def bundle_text(bundle: Bundle) -> str:
    """Describe a bundle: target, state, and what keeps it from being deployed."""
    state = enum_text(bundle, "state")
    if state != "ready":
        return f"{bundle.target}: {state}{f': {bundle.reason}' if bundle.reason else ''}"
    reference = f"{bundle.model}@{bundle.version}"
    command = f"triplane sign {reference} --target {bundle.target} --keys DIR"
    unsigned = f"not signed, so no node takes it; {command}"
    content = bundle.content_digest.hex()[:DIGEST_CHARS]
    signed = f"signed as {bundle.signed_path}" if bundle.signed_path else unsigned
    return f"{bundle.target}: ready, {size(bundle.size)}, content {content}, {signed}"
