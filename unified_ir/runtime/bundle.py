"""A bundle: one graph ready to serve on one target, with samples that prove that it works.

Parts: `bundle.pb`, `model.onnx`, `weights.safetensors`, `goldens.safetensors` (`input.NAME`,
`output.NAME`), `report.json`, optionally `adapt.onnx`. The graph declares its weights as external
data in `weights.safetensors`, so an unzipped bundle loads in any onnxruntime; here the mapped
arrays are passed to it without unpacking anything. Loading verifies every byte first.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.files import container, tensors
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.files.manifest import Manifest
from triplane.unified_ir.files.tensors import StoredTensor
from triplane.unified_ir.runtime import description
from triplane.unified_ir.runtime.description import Description
from triplane.unified_ir.runtime.session import DEFAULT_OPTIONS, Session, SessionOptions, version
from triplane.unified_ir.runtime.signature import Array

DESCRIPTION: Final = "bundle.pb"
MODEL: Final = "model.onnx"
WEIGHTS: Final = "weights.safetensors"
GOLDENS: Final = "goldens.safetensors"
REPORT: Final = "report.json"
ADAPT: Final = "adapt.onnx"
REQUIRED: Final = (DESCRIPTION, MODEL, WEIGHTS, GOLDENS, REPORT)

MAX_REPORT_BYTES: Final = 4 << 20
SHOWN: Final = 8
"""Number of inputs, outputs and labels in the `repr` of a bundle."""
SHOWN_CHARS: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleSpec:
    """The contents of a bundle.

    model: ONNX whose weights are external data at `weight_offsets(weights)`. golden_inputs,
    golden_outputs: inputs and the outputs that they must give, by tensor name; at least one of
    each. report: any JSON; measured figures belong here, outside the content digest.
    """

    description: Description
    model: bytes
    weights: Mapping[str, Array | StoredTensor]
    golden_inputs: Mapping[str, Array]
    golden_outputs: Mapping[str, Array]
    report: Mapping[str, Any] = field(default_factory=dict)
    adapt: bytes | None = None


weight_offsets: Final = tensors.offsets
"""(offset, length) by name for ONNX external data with location `WEIGHTS`."""


def write_bundle(
    path: Path, spec: BundleSpec, *, check: Callable[[Path], object] | None = None
) -> str:
    """Write the bundle whole or not at all and return its root digest.

    Equal specs give equal bytes. InvalidInput: the spec breaks a rule of the format. check: see
    `files.container.write`.
    """
    if not spec.golden_inputs.keys() <= {info.name for info in spec.description.inputs}:
        raise InvalidInput(f"golden inputs {sorted(spec.golden_inputs)} are not all inputs")
    goldens = {f"input.{name}": x for name, x in spec.golden_inputs.items()}
    goldens |= {f"output.{name}": y for name, y in spec.golden_outputs.items()}
    parts = [
        container.part(DESCRIPTION, description.encode(spec.description)),
        container.part(MODEL, spec.model),
        container.tensor_part(WEIGHTS, spec.weights),
        container.tensor_part(GOLDENS, goldens),
        container.part(REPORT, encoded_report(spec.report)),
    ]
    if spec.adapt is not None:
        parts.append(container.part(ADAPT, spec.adapt))
    parent = spec.description.model_digest
    return container.write(path, "bundle", parts, parent=parent, check=check)


def encoded_report(report: Mapping[str, Any]) -> bytes:
    """Return the bytes of the part `report.json`; encoding a decoded report gives them again."""
    # NaN is not JSON: another parser would refuse the report.
    return json.dumps(report, sort_keys=True, indent=1, allow_nan=False).encode()


def write_with_report(source: Path, out: Path, report: bytes) -> None:
    """Write a copy of a bundle whose part `report.json` is `report`.

    The report has measured times, so two conversions of one model differ there and only there. With
    the report of the first conversion, the bundle of the second equals the first, byte for byte.
    """
    file = Container(source, kind="bundle")
    parts = []
    for row in file.manifest.parts:
        if row.name in {WEIGHTS, GOLDENS}:
            parts.append(container.tensor_part(row.name, file.tensors(row.name)))
        else:
            data = report if row.name == REPORT else file.part(row.name)
            parts.append(container.part(row.name, data))
    container.write(out, "bundle", parts, parent=file.manifest.parent)


def content_digest(manifest: Manifest) -> str:
    """Return the digest of all that a conversion determines: everything but `report.json`.

    SHA-256 over lines of text: "triplane content 1", "KIND PARENT", then "NAME SIZE SHA256" for
    each other part in order. Two conversions of one model agree here though their timings differ.
    """
    lines = ["triplane content 1", f"{manifest.kind} {manifest.parent}"]
    parts = (part for part in manifest.parts if part.name != REPORT)
    lines += [f"{part.name} {part.size} {part.sha256.hex()}" for part in parts]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class Bundle:
    """A verified bundle; `load` makes one.

    digest, content_digest: hexadecimal. name, version, target, inputs, outputs and labels (class
    names by output) come from `description`, which also has preprocessing, constraints, tolerance.
    """

    def __init__(self, file: Container) -> None:
        """Verify every byte of `file`; Corrupt names the damaged part."""
        file.verify()
        names = [part.name for part in file.manifest.parts]
        # The exact list, so that no part that nobody looks at can travel in a signed file.
        if names not in ([*REQUIRED], [*REQUIRED, ADAPT]):
            raise Corrupt(f"{file.path.name}: a bundle has parts {REQUIRED} in order, not {names}")
        self._file = file
        self.digest = file.digest
        self.content_digest = content_digest(file.manifest)
        self.description = description.decode(file.part(DESCRIPTION), self._what(DESCRIPTION))
        if self.description.model_digest != file.manifest.parent:
            raise Corrupt(f"{self._what(DESCRIPTION)}: model digest is not the manifest's parent")
        if self.description.adapt_steps and names[-1] != ADAPT:
            raise Corrupt(
                f"{self._what(DESCRIPTION)}: asks for {self.description.adapt_steps} steps of "
                f"adaptation, but there is no part {ADAPT!r}"
            )
        self.name, self.version = self.description.name, self.description.version
        self.target = self.description.target
        self.inputs, self.outputs = self.description.inputs, self.description.outputs
        self.labels = self.description.labels
        self.report = _json(file.part(REPORT), self._what(REPORT))
        self._goldens = file.tensors(GOLDENS)

    @classmethod
    def load(cls, path: Path, *, expected_digest: str | None = None) -> "Bundle":
        """Open and verify the bundle at `path`, of that root digest when one is given."""
        return cls(Container(Path(path), kind="bundle", expected_digest=expected_digest))

    def __repr__(self) -> str:
        """Return what it is and takes and gives, on one screen."""
        lines = [
            f"bundle {self.name!r} version {self.version!r} for {self.target}, digest {self.digest}"
        ]
        for side, infos in (("in ", self.inputs), ("out", self.outputs)):
            lines += [f"  {side}  {info}"[:SHOWN_CHARS] for info in infos[:SHOWN]]
            if len(infos) > SHOWN:
                lines.append(f"  {side}  and {len(infos) - SHOWN} more")
        for output, names in list(self.labels.items())[:SHOWN]:
            text = f"  {len(names)} classes of {output}: {', '.join(names[:SHOWN])}"
            lines.append(text[:SHOWN_CHARS] + (", ..." if len(names) > SHOWN else ""))
        return "\n".join(lines)

    @property
    def weights(self) -> dict[str, StoredTensor]:
        """The graph's weights: read-only views of the mapped file."""
        return self._file.tensors(WEIGHTS)

    @property
    def model(self) -> bytes:
        """The ONNX graph; its weights are external."""
        return bytes(self._file.part(MODEL))

    @property
    def adapt(self) -> bytes | None:
        """The ONNX graph that adapts the weights; None if the bundle has none."""
        has_one = self._file.manifest.parts[-1].name == ADAPT
        return bytes(self._file.part(ADAPT)) if has_one else None

    @property
    def golden_inputs(self) -> dict[str, Array]:
        """The inputs of the goldens."""
        return _prefixed(self._goldens, "input.")

    def session(self, options: SessionOptions = DEFAULT_OPTIONS) -> Session:
        """Load the graph.

        InvalidInput: it needs another runtime. Corrupt: it does not match its description.
        """
        needs = self.description.constraints
        if needs.runtime != "onnxruntime" or _numbers(needs.min_version) > _numbers(version()):
            raise InvalidInput(
                f"bundle {self.description.name} needs {needs.runtime} >= {needs.min_version}, "
                f"here is onnxruntime {version()}"
            )
        session = Session(self.model, weights=self.weights, options=options)
        described, actual = (
            [(y.name, y.dtype) for y in outputs] for outputs in (self.outputs, session.outputs)
        )
        # Shapes of outputs are not compared: they depend on the runtime's own shape inference.
        if session.inputs != self.inputs or described != actual:
            raise Corrupt(f"{self._what(MODEL)}: its inputs or outputs are not as described")
        return session

    def predict(self, *x: Array, **inputs: Array) -> dict[str, Array]:
        """Run the graph once on inputs by name, or on its only one, with a cached session."""
        if x and (len(x) > 1 or inputs or len(self.inputs) > 1):
            names = [info.name for info in self.inputs]
            raise InvalidInput(f"predict takes {names}; pass them by name, got {len(x)} unnamed")
        return self._session.run({self.inputs[0].name: x[0]} if x else inputs)

    def check_goldens(self, session: Session | None = None) -> float:
        """Run the golden inputs and return the largest |y - g|; Corrupt when out of tolerance."""
        outputs = _prefixed(self._goldens, "output.")
        if not outputs:
            raise Corrupt(f"{self._what(GOLDENS)}: there are no golden outputs")
        session = session or self._session
        try:
            computed = session.run(self.golden_inputs, tuple(outputs))
        # The goldens come from the file itself, so inputs that do not fit are its fault, not the
        # caller's.
        except InvalidInput as error:
            raise Corrupt(f"{self._what(GOLDENS)}: {error}") from error
        return max(self._error(name, computed[name], golden) for name, golden in outputs.items())

    @cached_property
    def _session(self) -> Session:
        return self.session()

    def _error(self, name: str, y: Array, golden: Array) -> float:
        where = f"{self._what(GOLDENS)}: output {name!r}"
        if (y.dtype, y.shape) != (golden.dtype, golden.shape):
            raise Corrupt(f"{where} is {y.dtype}{y.shape}, not {golden.dtype}{golden.shape}")
        if not y.size:
            return 0.0
        t = self.description.tolerance
        wide = golden.astype(np.float64)
        with np.errstate(invalid="ignore"):  # inf - inf
            errors = np.where(y == golden, 0.0, np.abs(y.astype(np.float64) - wide))
        allowed = t.absolute + t.relative * np.abs(wide)
        # The test is "all within", not "any beyond", because NaN compares as false.
        if not ((errors <= allowed) & np.isfinite(errors)).all():
            error = errors.max()
            raise Corrupt(f"{where} is off by {error}, allowed {t.absolute} + {t.relative}|g|")
        return float(errors.max())

    def _what(self, part: str) -> str:
        return f"{self._file.path.name}: part {part!r}"


def _prefixed(goldens: Mapping[str, StoredTensor], prefix: str) -> dict[str, Array]:
    return {
        name.removeprefix(prefix): tensor.data
        for name, tensor in goldens.items()
        if name.startswith(prefix)
    }


def _json(data: memoryview, what: str) -> Any:
    if len(data) > MAX_REPORT_BYTES:
        raise Corrupt(f"{what}: {len(data)} bytes, at most {MAX_REPORT_BYTES} are read")
    try:
        return json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{what}: not JSON: {error}") from error


def _numbers(version_text: str) -> tuple[int, ...]:
    # At most nine digits of each part: the text comes from a file, and the conversion of n digits
    # takes O(n^2).
    return tuple(int(part[:9]) for part in version_text.split(".") if part.isdecimal())
