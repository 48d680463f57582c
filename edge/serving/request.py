"""Decode an inference request: check it and turn its contents into arrays.

Counts, names, shapes and sizes are checked against the limits and the model's contract before any
array is created. Raw contents become read-only views of the message, without a copy. Values are not
checked: NaN and infinity reach the model as they are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from triplane.edge.serving.limits import ServingLimits
from triplane.edge.serving.servable import Array, Contract, TensorContract, Wanted
from triplane.proto import open_inference_pb2 as pb
from triplane.proto.errors import InvalidInput
from triplane.proto.status import Unimplemented
from triplane.unified_ir.files.samples import transpose_hint
from triplane.unified_ir.runtime.signature import UNNAMED

Parameters = Mapping[str, pb.InferParameter]
Contents = Sequence[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Inference:
    """A checked request: the feeds of the model, and the outputs to send, in order."""

    feeds: dict[str, Array]
    wanted: tuple[Wanted, ...]
    rows: int


def check_address(request: pb.ModelInferRequest, limits: ServingLimits) -> None:
    """Check the length of the strings that are used before the model is known."""
    for what in ("model_name", "model_version", "id"):
        if len(text := getattr(request, what)) > limits.name_chars:
            raise InvalidInput(f"{what} has {len(text)} characters; {limits.name_chars} at most")


def decode(
    request: pb.ModelInferRequest,
    contract: Contract,
    limits: ServingLimits,
    raw: Contents | None = None,
) -> Inference:
    """Check a complete request and return its arrays. Raises InvalidInput or Unimplemented.

    raw: its raw contents, if they are not in `request`.
    """
    if raw is None:
        raw = request.raw_input_contents
    _check_counts(request, len(raw), limits)
    wanted = _wanted(request, contract, limits)
    sizes: dict[str, int] = {}
    feeds: dict[str, Array] = {}
    for index, tensor in enumerate(request.inputs):
        _check_parameters(tensor.parameters, limits)
        spec = _spec(tensor, contract, feeds)
        shape = _shape(tensor, spec, sizes, limits)
        if not raw:
            feeds[spec.name] = _typed(tensor, spec, shape)
        elif tensor.HasField("contents"):
            raise InvalidInput(
                f"input {spec.name!r} has contents beside raw_input_contents; send its values in "
                "one of the two"
            )
        else:
            feeds[spec.name] = _raw(raw[index], spec, shape)
    if missing := contract.inputs.keys() - feeds.keys():
        raise InvalidInput(f"inputs {sorted(missing)} are missing; send {[*contract.inputs]}")
    return Inference(feeds, wanted, sizes[contract.rows] if contract.rows is not None else 1)


def _check_counts(request: pb.ModelInferRequest, raw: int, limits: ServingLimits) -> None:
    _check_parameters(request.parameters, limits)
    inputs, outputs = len(request.inputs), len(request.outputs)
    if inputs > limits.tensors:
        raise InvalidInput(f"the request has {inputs} inputs; {limits.tensors} at most")
    if outputs > limits.tensors:
        raise InvalidInput(f"the request has {outputs} requested outputs; {limits.tensors} at most")
    if raw and raw != inputs:
        raise InvalidInput(
            f"the request has {raw} raw_input_contents and {inputs} inputs; send one for each input"
        )


def _check_parameters(parameters: Parameters, limits: ServingLimits) -> None:
    if not parameters:
        return
    if len(parameters) > limits.parameters:
        raise InvalidInput(f"{len(parameters)} parameters in one map; {limits.parameters} at most")
    if (longest := max(map(len, parameters))) > limits.name_chars:
        raise InvalidInput(f"a parameter name of {longest} characters; {limits.name_chars} at most")
    if "shared_memory_region" in parameters:
        raise Unimplemented("shared memory is not served; send the bytes in raw_input_contents")


def _spec(
    tensor: pb.ModelInferRequest.InferInputTensor, contract: Contract, feeds: Mapping[str, Array]
) -> TensorContract:
    if (spec := contract.inputs.get(tensor.name)) is None:
        raise InvalidInput(f"no input {tensor.name[:64]!r}; the model has {[*contract.inputs]}")
    if tensor.name in feeds:
        raise InvalidInput(f"input {tensor.name!r} occurs twice; send each once")
    if tensor.datatype != spec.datatype.name:
        raise InvalidInput(
            f"input {spec.name!r} has datatype {tensor.datatype[:64]!r}, the model takes "
            f"{spec.datatype.name}; convert the values before you send them"
        )
    return spec


def _shape(
    tensor: pb.ModelInferRequest.InferInputTensor,
    spec: TensorContract,
    sizes: dict[str, int],
    limits: ServingLimits,
) -> tuple[int, ...]:
    """Return the shape of an input after checking it; add the sizes of symbols to `sizes`."""
    if len(tensor.shape) > limits.rank:
        raise InvalidInput(
            f"input {spec.name!r} has {len(tensor.shape)} dimensions; {limits.rank} at most"
        )
    shape = tuple(tensor.shape)
    if len(shape) != len(spec.shape):
        raise InvalidInput(
            f"input {spec.name!r} has {len(shape)} dimensions, {[*shape]}; the model takes "
            f"{len(spec.shape)}, {_text(spec)}: reshape the tensor"
        )
    for axis, (size, rule) in enumerate(zip(shape, spec.shape, strict=True)):
        if not 1 <= size <= limits.elements:
            raise InvalidInput(
                f"input {spec.name!r} has shape {[*shape]}; every size is 1 to {limits.elements}"
            )
        if size != rule and size != (expected := _expected(rule, size, sizes)):
            must = f"must be {rule}"
            if not isinstance(rule, int):
                must = f"{rule} is {expected} in this request already; give both the same size"
            raise InvalidInput(
                f"input {spec.name!r} has shape {[*shape]}; the model takes {_text(spec)}: "
                f"size {axis} is {size}, and {must}{transpose_hint(shape, spec.shape)}"
            )
    if shape and shape[0] > limits.rows and isinstance(spec.shape[0], str):
        raise InvalidInput(f"input {spec.name!r} has {shape[0]} rows; {limits.rows} at most: split")
    if math.prod(shape) > limits.elements:
        raise InvalidInput(
            f"input {spec.name!r} has {math.prod(shape)} values; {limits.elements} at most"
        )
    return shape


def _text(spec: TensorContract) -> str:
    return f"[{', '.join(map(str, spec.shape))}]"


def _expected(rule: int | str, size: int, sizes: dict[str, int]) -> int:
    if isinstance(rule, int):
        return rule
    return size if rule == UNNAMED else sizes.setdefault(rule, size)


def _raw(content: bytes | memoryview, spec: TensorContract, shape: tuple[int, ...]) -> Array:
    """Return `content` as an array, whose length must be that of `shape`."""
    dtype = spec.datatype.dtype
    if len(content) != (expected := math.prod(shape) * dtype.itemsize):
        raise InvalidInput(
            f"input {spec.name!r} has {len(content)} bytes; "
            f"{spec.datatype.name} of shape {[*shape]} has {expected}: send all values in C order, "
            "little-endian, without padding"
        )
    array = np.frombuffer(content, dtype).reshape(shape)
    if dtype.kind == "b" and array.view(np.uint8).max() > 1:
        raise InvalidInput(f"input {spec.name!r} is BOOL; every byte is 0 or 1")
    return array


def _typed(
    tensor: pb.ModelInferRequest.InferInputTensor, spec: TensorContract, shape: tuple[int, ...]
) -> Array:
    """Return the array in the one typed field that fits the datatype."""
    fields = tensor.contents.ListFields()
    if not fields:
        raise InvalidInput(f"input {spec.name!r} has no contents; fill raw_input_contents")
    if len(fields) > 1 or fields[0][0].name != spec.datatype.contents:
        raise InvalidInput(
            f"input {spec.name!r} is {spec.datatype.name}: its values go in "
            f"{spec.datatype.contents or 'raw_input_contents'}, not in "
            f"{[field.name for field, _ in fields]}"
        )
    values: Sequence[object] = fields[0][1]
    if len(values) != (expected := math.prod(shape)):
        raise InvalidInput(
            f"input {spec.name!r} has {len(values)} values; shape {[*shape]} has {expected}: send "
            "as many values as the shape says, or correct the shape"
        )
    try:
        # As a list, because fields of protobuf 7 would wrap numbers that do not fit.
        return np.array(list(values), spec.datatype.dtype).reshape(shape)
    except OverflowError as error:
        raise InvalidInput(
            f"input {spec.name!r} has a value that {spec.datatype.name} cannot hold; send values "
            "within its range"
        ) from error


def _wanted(
    request: pb.ModelInferRequest, contract: Contract, limits: ServingLimits
) -> tuple[Wanted, ...]:
    if not request.outputs:
        return contract.all_outputs
    wanted: dict[str, Wanted] = {}
    for output in request.outputs:
        _check_parameters(output.parameters, limits)
        if (spec := contract.outputs.get(output.name)) is None:
            raise InvalidInput(f"no output {output.name[:64]!r}; there are {[*contract.outputs]}")
        if output.name in wanted:
            raise InvalidInput(f"output {output.name!r} is requested twice; ask once")
        wanted[output.name] = Wanted(spec, _classes(output.parameters, limits))
    return tuple(wanted.values())


def _classes(parameters: Parameters, limits: ServingLimits) -> int:
    if "classification" not in parameters:
        return 0
    parameter = parameters["classification"]
    classes = parameter.int64_param
    if parameter.WhichOneof("parameter_choice") != "int64_param" or classes < 1:
        raise InvalidInput("the classification parameter is an int64 of 1 or more")
    if classes > limits.classes:
        raise InvalidInput(f"classification asks for {classes} classes; {limits.classes} at most")
    return classes
