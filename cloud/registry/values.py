"""The registry's values and requests, validated when they are constructed."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Final

from triplane.cloud.registry.names import Reference, check_alias, check_name
from triplane.proto.errors import InvalidInput

KEY_BYTES: Final = 16
DIGEST_BYTES: Final = 32
MAX_ALIASES: Final = 16
"""Largest number of aliases that one push sets."""
MAX_ENTRY_CHARS: Final = 200
MAX_SOURCE_CHARS: Final = 200
MAX_NOTE_CHARS: Final = 2000
MAX_DROP_POINTS: Final = 100.0
SCHEMES: Final = ("", "int8")


class State(Enum):
    """The state of a bundle; the names are those of `registry.proto`."""

    CONVERTING = 1
    READY = 2
    FAILED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionRecipe:
    """How bundles are made; see `registry.proto`. Blobs are 32 bytes, or empty."""

    quantize: str = ""
    calibration: bytes = b""
    entry: str = "predict"
    max_accuracy_drop: float = 0.0
    evaluation: bytes = b""

    def __post_init__(self) -> None:
        if self.quantize not in SCHEMES:
            raise InvalidInput(f"quantize is '' for float or 'int8', got {self.quantize[:40]!r}")
        if self.quantize and not self.calibration:
            raise InvalidInput("int8 learns its ranges from samples; give a calibration blob")
        for what, blob in (("calibration", self.calibration), ("evaluation", self.evaluation)):
            if blob:
                check_digest(f"{what} blob", blob)
        if not 1 <= len(self.entry) <= MAX_ENTRY_CHARS or not self.entry.isprintable():
            raise InvalidInput(f"an entry has 1 to {MAX_ENTRY_CHARS} printable characters")
        drop = self.max_accuracy_drop
        if not (math.isfinite(drop) and 0 <= drop <= MAX_DROP_POINTS):
            raise InvalidInput(f"max_accuracy_drop is 0 to {MAX_DROP_POINTS} points, got {drop}")

    @property
    def blobs(self) -> tuple[bytes, ...]:
        """The digests of the samples that a conversion reads."""
        return tuple(blob for blob in (self.calibration, self.evaluation) if blob)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Where a version comes from. parent: "model@version", which exists, or empty."""

    parent: str = ""
    source: str = "push"
    note: str = ""

    def __post_init__(self) -> None:
        if self.parent and Reference.parse(self.parent).version is None:
            raise InvalidInput(f"a parent is MODEL@NUMBER, got {self.parent[:80]!r}")
        if len(self.source) > MAX_SOURCE_CHARS or len(self.note) > MAX_NOTE_CHARS:
            raise InvalidInput(
                f"source has at most {MAX_SOURCE_CHARS} characters and note {MAX_NOTE_CHARS}, "
                f"got {len(self.source)} and {len(self.note)}"
            )
        if "\0" in self.source + self.note:
            raise InvalidInput("source and note must not contain a NUL character")


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """A request for the next version. key: random; the same key gives the same version."""

    model: str
    blob: bytes
    key: bytes
    aliases: tuple[str, ...] = ()
    recipe: ConversionRecipe = ConversionRecipe()
    lineage: Lineage = Lineage()

    def __post_init__(self) -> None:
        check_name("model", self.model)
        check_digest("blob", self.blob)
        if len(self.key) != KEY_BYTES:
            raise InvalidInput(f"a key is {KEY_BYTES} random bytes, got {len(self.key)}")
        if len(self.aliases) > MAX_ALIASES:
            raise InvalidInput(
                f"a push sets at most {MAX_ALIASES} aliases, got {len(self.aliases)}"
            )
        for alias in self.aliases:
            check_alias(alias)

    @property
    def digest(self) -> bytes:
        """The SHA-256 of the request, which distinguishes a repetition from another request."""
        # The order of aliases has no meaning, so it must not make a repetition look different.
        fields = {**asdict(self), "aliases": sorted(set(self.aliases))}
        return hashlib.sha256(
            json.dumps(fields, sort_keys=True, default=bytes.hex).encode()
        ).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Requirements on a node, from the bundle's own constraints; 0 or empty if unset."""

    runtime: str = ""
    min_version: str = ""
    opset: int = 0
    instructions: tuple[str, ...] = ()
    memory_bytes: int = 0
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleRecord:
    """A version for one target. Its file exists if it is READY; `reason` is set if it FAILED.

    signed_path: path of the signed target, empty while it is unsigned.
    """

    model: str
    version: int
    target: str
    state: State
    reason: str = ""
    blob: bytes = b""
    size: int = 0
    root_digest: bytes = b""
    content_digest: bytes = b""
    signed_path: str = ""
    needs: Needs = Needs()

    @property
    def key(self) -> tuple[str, int, str]:
        """(model, version, target)."""
        return self.model, self.version, self.target

    def __str__(self) -> str:
        return f"{self.model}@{self.version}+{self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A model file and the recipe of its bundles. model_digest: the file's root digest."""

    model: str
    version: int
    model_digest: bytes
    blob: bytes
    size: int
    created_s: float
    created_by: str
    recipe: ConversionRecipe
    lineage: Lineage
    aliases: tuple[str, ...] = ()
    bundles: tuple[BundleRecord, ...] = ()

    def __str__(self) -> str:
        return f"{self.model}@{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A name with its versions counted from 1 to `latest`. aliases: (name, version), by name."""

    name: str
    latest: int
    aliases: tuple[tuple[str, int], ...] = ()


def check_digest(what: str, digest: bytes) -> None:
    """Raise InvalidInput unless `digest` has the length of a SHA-256."""
    if len(digest) != DIGEST_BYTES:
        raise InvalidInput(f"a {what} is named by its SHA-256, 32 bytes, got {len(digest)}")
