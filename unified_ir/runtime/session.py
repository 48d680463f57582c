"""The one door to onnxruntime: load a graph, run it, and loop over it with state kept in place.

Every input is checked against the graph's signature first, so onnxruntime's own errors surface
only for what a signature cannot say, and then as our families. Graphs given as bytes read no file:
external data that `weights` does not supply is refused. Custom-op libraries cannot be registered.
`session.set_denormal_as_zero` stays off: it puts the creating thread, and every thread started from
it, into flush-to-zero for good, so numpy's results would depend on which thread made a session.
A graph for a GPU runs on the GPU: where onnxruntime would turn to the CPU, the session is refused.

onnxruntime's low-level objects (`_sess`, `SessionIOBinding`) are used on the hot path: for a tiny
graph its Python wrappers cost as much as the run itself.
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

# Read on import: onnxruntime would open a database in the home folder and start an uploader.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

from triplane.proto.errors import Corrupt, InvalidInput, NotFound, TriplaneError, Unavailable
from triplane.proto.suggestions import check_choice
from triplane.unified_ir.files.tensors import StoredTensor, as_tensor
from triplane.unified_ir.runtime.devices import DEVICES, Device
from triplane.unified_ir.runtime.signature import (
    DTYPES,
    FORMS,
    INSIDE_ONLY,
    NEXT,
    UNNAMED,
    Array,
    Signature,
    TensorInfo,
    next_name,
)

_C: Final = ort.capi._pybind_state  # noqa: SLF001 - the wrappers cost as much as a tiny run
_CPU: Final = _C.OrtDevice(_C.OrtDevice.cpu(), _C.OrtDevice.default_memory(), 0)
_CUDA: Final = _C.OrtDevice(_C.OrtDevice.cuda(), _C.OrtDevice.default_memory(), 0)
_FAILURES: Final[tuple[type[Exception], ...]] = (
    *(kind for kind in vars(_C).values() if isinstance(kind, type) and issubclass(kind, Exception)),
    RuntimeError,
    ValueError,
)

ort.disable_telemetry_events()

LOG_FATAL: Final = 4
"""onnxruntime's severity "fatal": its errors are raised here, and a caller's bad values must not
write a line of standard error each."""

ort.set_default_logger_severity(LOG_FATAL)  # the allocator's, which no session's options reach

NO_FOLDER: Final = "/dev/null/none"
"""A path that cannot exist: graphs given as bytes resolve external data here, hence nowhere."""

_LEVELS: Final[Mapping[str, Any]] = {
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def version() -> str:
    """Return onnxruntime's version, such as "1.31.1"."""
    return str(ort.__version__)


def available_providers() -> tuple[str, ...]:
    """Return the execution providers this build of onnxruntime contains, fastest first."""
    return tuple(ort.get_available_providers())


# Products of float32 are computed in float32, not in TF32. An exhaustive search would choose
# kernels of convolutions by their times, and so the last bits by chance.
_PROVIDERS: Final[Mapping[str, Mapping[str, dict[str, str]]]] = {
    "cpu": {"CPUExecutionProvider": {}},
    "cuda": {
        "CUDAExecutionProvider": {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"},
        "CPUExecutionProvider": {},
    },
}
"""Device -> execution providers in order of preference, with their options."""


def check_device(device: Device) -> None:
    """Refuse a device that onnxruntime cannot use here.

    InvalidInput: there is no such device. Unavailable: the build lacks its provider, or the machine
    a library, a driver or a GPU.
    """
    check_choice("device", device, DEVICES)
    there = available_providers()
    if absent := [name for name in _PROVIDERS[device] if name not in there]:
        raise Unavailable(
            f"device {device!r} needs {absent[0]}, and onnxruntime {version()} here has only "
            f"{', '.join(there)}; put the build for GPUs in its place: "
            "pip uninstall onnxruntime && pip install onnxruntime-gpu"
        )
    if device != "cpu":
        _start(device)


@cache
def _start(device: Device) -> None:
    """Start the providers of a device that is not the CPU, with a graph of one node.

    Unavailable: they do not start, for which a session would run on the CPU or fail.
    """
    # It loads CUDA's libraries from where pip installs them, and prints what is absent.
    with redirect_stdout(StringIO()):
        ort.preload_dlls()
    try:
        session = _open(_PRODUCT, {}, SessionOptions(device=device))
    except _FAILURES as error:
        raise _not_started(device, str(error)) from error
    _refuse_fallback(session, device)


def _refuse_fallback(session: ort.InferenceSession, device: str) -> None:
    """Raise Unavailable if onnxruntime has left out a provider of the device without a word."""
    if not _PROVIDERS[device].keys() <= set(session.get_providers()):
        raise _not_started(device, f"{_load_error()}; it would run on the CPU")


def _not_started(device: str, reason: str) -> Unavailable:
    return Unavailable(
        f"onnxruntime {version()} could not start on device {device!r}: {reason}. It needs CUDA "
        "and cuDNN, which come with pip install 'onnxruntime-gpu[cuda,cudnn]', and a GPU with "
        "NVIDIA's driver, see nvidia-smi"
    )


def _load_error() -> str:
    """Return why the provider for CUDA does not load: onnxruntime only logs it."""
    try:
        ctypes.CDLL(str(Path(_C.__file__).parent / "libonnxruntime_providers_cuda.so"))
    except OSError as error:
        return str(error)
    return "its libraries load, but there is no GPU that it can use"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Settings of onnxruntime for a graph; the defaults suit many processes on few cores.

    arena: keep freed memory for the next run, which is faster and takes up to several times more.
    threads: for one operator, >= 1. spin: threads wait by spinning, faster only on idle cores.
    disabled_optimizers: onnxruntime's rewriter names, such as "CommonSubexpressionElimination".
    optimized_model_path: receives the graph after fusion. profile_prefix: see `Session.profile`.
    device: "cuda" for the first NVIDIA GPU; nodes without a kernel for it run on the CPU.
    values: what inputs and outputs may be; "any" also takes text, sequences and optionals.
    one_block: lay the memory of a run out as one block from the second run of its shapes on. That
    saves 1 to 3 % of the time and keeps the first run's memory beside the block, so steps of
    training go without it.
    """

    threads: int = 1
    spin: bool = False
    arena: bool = True
    optimization: Literal["none", "basic", "extended", "all"] = "all"
    disabled_optimizers: tuple[str, ...] = ()
    optimized_model_path: Path | None = None
    profile_prefix: Path | None = None
    device: Device = "cpu"
    values: Literal["numbers", "any"] = "numbers"
    one_block: bool = True


DEFAULT_OPTIONS: Final = SessionOptions()

# x64 processors without int8 dot products (VNNI) add two U8 x S8 products in 16 bits. The sum
# saturates at 32767 where 2 * 255 * 127 = 64770 can occur. There, a graph is loaded under the first
# of these settings that works (decision 0055).
_EXACT_KERNELS: Final = "session.x64quantprecision"
"""Rewrite constant S8 weights beyond 7 bits to U8, whose kernels are exact."""
_FLOAT_PRODUCTS: Final = "session.disable_quant_qdq"
"""Compute products between quantized tensors in float."""

_PRODUCT: Final = (
    b'\x08\x08:\\\n\x18\n\x01x\n\x01w\x12\x01y"\rMatMulInteger\x12\x01gZ\x13\n\x01x\x12\x0e\n\x0c\x08\x02'
    b"\x12\x08\n\x02\x08\x01\n\x02\x08\x02Z\x13\n\x01w\x12\x0e\n\x0c\x08\x03\x12\x08\n\x02\x08\x02\n\x02\x08\x01b"
    b"\x13\n\x01y\x12\x0e\n\x0c\x08\x06\x12\x08\n\x02\x08\x01\n\x02\x08\x01B\x04\n\x00\x10\r"
)
"""An ONNX model: y = MatMulInteger(x: uint8[1, 2], w: int8[2, 1])."""


@cache
def saturates() -> bool:
    """Return whether this processor's sums of U8 x S8 products saturate, by computing one."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    x, w = np.full((1, 2), 255, np.uint8), np.full((2, 1), 127, np.int8)
    (y,) = ort.InferenceSession(_PRODUCT, options).run(None, {"x": x, "w": w})
    return int(y[0, 0]) != 2 * 255 * 127


class RunFailed(InvalidInput):
    """A node refused values that no signature could exclude before."""


class OutOfMemory(RunFailed):
    """A node asked for more memory than this process may use."""


class CancellationToken:
    """Ends the runs that received it, from any thread and for good: see `Session.run`."""

    def __init__(self) -> None:
        self._options = _C.RunOptions()

    def set(self) -> None:
        """Let every run that has this token end before its next node."""
        self._options.terminate = True

    @property
    def is_set(self) -> bool:
        """Return whether it was set."""
        return bool(self._options.terminate)


class Session:
    """A loaded graph. `run` may be called from several threads at once."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]

    def __init__(
        self,
        model: bytes | Path,
        *,
        weights: Mapping[str, Array | StoredTensor] | None = None,
        options: SessionOptions = DEFAULT_OPTIONS,
    ) -> None:
        """Load `model`, filling initializers declared as external data from `weights` by name.

        A path resolves external data beside its file and lets onnxruntime map it; `weights` are
        copied once into onnxruntime's memory and may be released by the caller afterwards.
        InvalidInput: the graph does not run here. Corrupt: it is not a graph. Unavailable: the
        device is not.
        """
        self.device: Device = options.device
        initializers = {name: _ortvalue(name, value) for name, value in (weights or {}).items()}
        self._ort = _load(model, initializers, options)
        self._c = self._ort._sess  # noqa: SLF001 - see the module's docstring
        with _names_in_utf8():
            self.inputs = tuple(_info(arg, options) for arg in self._ort.get_inputs())
            self.outputs = tuple(_info(arg, options) for arg in self._ort.get_outputs())
        self._signature = Signature(self.inputs)
        self._output_names = [tensor.name for tensor in self.outputs]

    @property
    def metadata(self) -> dict[str, str]:
        """The model's own properties by key, as its author wrote them."""
        with _names_in_utf8():
            return dict(self._ort.get_modelmeta().custom_metadata_map)

    def run(
        self,
        feeds: Mapping[str, Array],
        outputs: tuple[str, ...] | None = None,
        *,
        stop: CancellationToken | None = None,
    ) -> dict[str, Array]:
        """Return the named outputs (all by default) for `feeds`, which must fit `inputs`.

        Unavailable: `stop` was set before the last node began. A node that runs is never cut short.
        """
        feeds = self._signature.check(feeds)
        names = self._output_names if outputs is None else self._known(outputs)
        try:
            values = self._c.run(names, feeds, stop._options if stop else None)  # noqa: SLF001
        except _FAILURES as error:
            raise _run_failure(error, stop) from error
        return dict(zip(names, values, strict=True))

    def loop(self, state: Mapping[str, Array]) -> "Loop":
        """Return a loop that starts at a copy of `state`; see `Loop`."""
        return Loop(self, state)

    def profile(self) -> Path:
        """Stop profiling (see `SessionOptions.profile_prefix`) and return its JSON file."""
        return Path(self._ort.end_profiling())

    def _known(self, outputs: tuple[str, ...]) -> list[str]:
        unknown = sorted(set(outputs) - set(self._output_names))
        if unknown or not outputs:
            raise InvalidInput(f"outputs must be some of {self._output_names}, not {unknown}")
        return list(outputs)


def check_rows(batch: Mapping[str, Any]) -> None:
    """InvalidInput where no array of a training step's batch has a row.

    onnxruntime's kernels for gradients of convolutions refuse such a batch, or never end.
    """
    shapes = {name: x.shape for name, x in batch.items() if isinstance(x, np.ndarray)}
    rows = [shape[0] for shape in shapes.values() if shape]
    if rows and not any(rows):
        seen = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InvalidInput(
            f"a training step needs at least one sample, got {seen}; leave an empty batch out"
        )


class HostBuffer:
    """A state tensor in an array that onnxruntime reads and writes in place."""

    def __init__(self, x: Array) -> None:
        self._array = np.array(x, order="C")
        self.value = _C.OrtValue.ortvalue_from_numpy(self._array, _CPU)

    def read(self) -> Array:
        """Return the tensor itself."""
        return self._array

    def write(self, x: Array) -> None:
        """Copy `x`, of the same type, into the tensor."""
        np.copyto(self._array, x)


class DeviceBuffer:
    """A state tensor in the memory of a device, which onnxruntime allocates."""

    def __init__(self, x: Array, *, device: Any) -> None:
        self.value = _C.OrtValue.ortvalue_from_shape_and_type(x.shape, x.dtype, device)
        self.write(x)

    def read(self) -> Array:
        """Return the tensor; from another memory than the host's, a copy of it."""
        array: Array = self.value.numpy()
        return array

    def write(self, x: Array) -> None:
        """Copy `x`, of the same type, into the tensor."""
        self.value.update_inplace(np.asarray(x, order="C"))


Buffer = HostBuffer | DeviceBuffer

BUFFERS: Final[dict[str, Callable[[Array], Buffer]]] = {
    "cpu": HostBuffer,
    "cuda": partial(DeviceBuffer, device=_CUDA),
}
"""Device -> the buffers of a loop's state."""


class _StateView(Mapping[str, Array]):
    """Tensors by name, each read when it is asked for: reading copies from a device."""

    def __init__(self, buffers: Mapping[str, Buffer]) -> None:
        self._buffers = buffers

    def __getitem__(self, name: str) -> Array:
        return self._buffers[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)


class Loop:
    """Steps of one graph whose state stays in two sets of buffers, used in turn.

    A graph input named in `state` is state; the output `next_name(input)`, if the graph has one,
    is its new value (without one the tensor never changes). A step reads one set and writes the
    other: one buffer bound as both input and output is silently wrong, because kernels overwrite
    it while later nodes still read it. A step that raises leaves the state as it was.
    The buffers are in the memory of the session's device; batches and results are the host's.
    State shapes are static; batch shapes may change from step to step. Not for several threads.
    stop: ends the steps while it is assigned; see `Session.run`.
    """

    def __init__(self, session: Session, state: Mapping[str, Array]) -> None:
        self._session = session
        self.stop: CancellationToken | None = None
        by_name = {tensor.name: tensor for tensor in session.inputs}
        _check_state(session, by_name, state.keys())
        self._state = {name: Signature([by_name[name]]) for name in state}
        self._batch = Signature(t for t in session.inputs if t.name not in state)
        results = {tensor.name: tensor for tensor in session.outputs}
        self._updated = tuple(name for name in state if next_name(name) in results)
        for name in self._updated:
            old, new = by_name[name], results[next_name(name)]
            if (old.dtype, old.shape) != (new.dtype, new.shape):
                raise InvalidInput(f"a state tensor keeps its type: {old} becomes {new}")
        self._results = tuple(name for name in results if not name.endswith(NEXT))
        checked, buffer = self._checked(state), BUFFERS[session.device]
        self._is_on_host = buffer is HostBuffer
        self._front = {name: buffer(x) for name, x in checked.items()}
        self._back = self._front | {name: buffer(checked[name]) for name in self._updated}
        self._read_front = self._bind(self._front, self._back)
        self._read_back = self._bind(self._back, self._front)

    def step(self, **batch: Array) -> dict[str, Array]:
        """Run once on `batch`, advance the state and return the outputs that are not state."""
        checked = self._batch.check(batch)
        if self._updated:
            check_rows(checked)
        # The list keeps converted copies alive until the run has read them.
        arrays = [(name, np.asarray(x, order="C")) for name, x in checked.items()]
        binding = self._read_front
        try:
            for name, x in arrays:
                binding.bind_input(name, x)
            if not self._is_on_host:
                self._bind_state_again(binding)
            for name in self._results:
                binding.bind_output(name, _CPU)
            options = self.stop._options if self.stop else None  # noqa: SLF001 - one class in three
            self._session._c.run_with_iobinding(binding, options)  # noqa: SLF001 - likewise
            values = binding.get_outputs()
            first = len(self._updated)
            results = {name: values[first + i].numpy() for i, name in enumerate(self._results)}
        except _FAILURES as error:
            raise _run_failure(error, self.stop) from error
        self._front, self._back = self._back, self._front
        self._read_front, self._read_back = self._read_back, binding
        return results

    def state(self) -> dict[str, Array]:
        """Return a copy of the state."""
        return {name: buffer.read().copy() for name, buffer in self._front.items()}

    def view(self) -> Mapping[str, Array]:
        """Return the state itself: read it before the next step and never write to it."""
        return _StateView(self._front)

    def load(self, state: Mapping[str, Array]) -> None:
        """Replace the named state tensors, all or (InvalidInput) none; the others stay."""
        if unknown := sorted(state.keys() - self._state.keys()):
            raise InvalidInput(f"state is {sorted(self._state)}, not {unknown}")
        for name, x in self._checked(state).items():
            self._front[name].write(x)

    def _checked(self, state: Mapping[str, Array]) -> dict[str, Array]:
        return {name: self._state[name].check({name: x})[name] for name, x in state.items()}

    def _bind_state_again(self, binding: Any) -> None:
        """Bind the state's buffers as inputs, and wait for all copies.

        Binding copies an input to where its nodes run. A tensor on the device that a node on the
        CPU reads, such as a step counter, would else keep the value of the first binding.
        """
        for name, buffer in self._front.items():
            binding.bind_ortvalue_input(name, buffer.value)
        binding.synchronize_inputs()

    def _bind(self, read: Mapping[str, Buffer], write: Mapping[str, Buffer]) -> Any:
        binding = _C.SessionIOBinding(self._session._c)  # noqa: SLF001 - one class in two
        for name, buffer in read.items():
            binding.bind_ortvalue_input(name, buffer.value)
        for name in self._updated:
            binding.bind_ortvalue_output(next_name(name), write[name].value)
        for name in self._results:
            binding.bind_output(name, _CPU)
        return binding


def _check_state(session: Session, inputs: Mapping[str, TensorInfo], names: Any) -> None:
    if unknown := sorted(names - inputs.keys()):
        raise InvalidInput(f"state tensors must be inputs {sorted(inputs)}; {unknown} are not")
    for output in session.outputs:
        state = output.name.removesuffix(NEXT)
        if state != output.name and state not in names:
            raise InvalidInput(f"output {output.name} updates state {state}, which was not given")
    for name in names:
        if not inputs[name].is_static or inputs[name].dtype in INSIDE_ONLY:
            raise InvalidInput(f"state must have a static shape and a numpy dtype: {inputs[name]}")


def _ort_options(
    model: bytes | Path, weights: Mapping[str, Any], options: SessionOptions
) -> ort.SessionOptions:
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = options.threads
    settings.inter_op_num_threads = 1
    settings.log_severity_level = LOG_FATAL
    settings.enable_cpu_mem_arena = options.arena
    settings.enable_mem_pattern = options.one_block
    settings.add_session_config_entry("session.load_model_format", "ONNX")
    settings.graph_optimization_level = _LEVELS[options.optimization]
    settings.add_session_config_entry("session.intra_op.allow_spinning", str(int(options.spin)))
    if isinstance(model, bytes):
        key = "session.model_external_initializers_file_folder_path"
        settings.add_session_config_entry(key, NO_FOLDER)
    if options.optimized_model_path is not None:
        settings.optimized_model_filepath = str(options.optimized_model_path)
    settings.use_deterministic_compute = options.device != "cpu"
    if options.profile_prefix is not None:
        settings.enable_profiling = True
        settings.profile_file_prefix = str(options.profile_prefix)
    if weights:
        settings.add_external_initializers(list(weights), list(weights.values()))
    return settings


@contextmanager
def _names_in_utf8() -> Iterator[None]:
    """Raise Corrupt for names and properties that are no text; onnxruntime loads any bytes."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise Corrupt(f"a name or property in the model is no text in UTF-8: {error}") from error


def _load(
    model: bytes | Path, weights: Mapping[str, Any], options: SessionOptions
) -> ort.InferenceSession:
    check_device(options.device)
    if isinstance(model, Path) and not model.is_file():
        raise NotFound(f"no model file at {model}")
    try:
        session = _load_exact(model, weights, options)
    except _FAILURES as error:
        family = Corrupt if isinstance(error, _C.InvalidProtobuf) else InvalidInput
        raise family(f"onnxruntime {version()} refused the model: {error}") from error
    _refuse_fallback(session, options.device)
    return session


def _load_exact(
    model: bytes | Path, weights: Mapping[str, Any], options: SessionOptions
) -> ort.InferenceSession:
    """Load a graph such that no sum of int8 products saturates, where weights are constant."""
    if not saturates():
        return _open(model, weights, options)
    # No release loads a graph of which it would rewrite one weight or zero point for two products,
    # and each says so in other words. Errors of the graph itself come again the second time.
    try:
        return _open(model, weights, options, _EXACT_KERNELS)
    except _FAILURES:
        return _open(model, weights, options, _FLOAT_PRODUCTS)


def _open(
    model: bytes | Path, weights: Mapping[str, Any], options: SessionOptions, *switches: str
) -> ort.InferenceSession:
    settings = _ort_options(model, weights, options)
    for switch in switches:
        settings.add_session_config_entry(switch, "1")
    return ort.InferenceSession(
        model if isinstance(model, bytes) else str(model),
        settings,
        providers=list(_PROVIDERS[options.device].items()),
        disabled_optimizers=list(options.disabled_optimizers) or None,
        enable_fallback=0,  # it prints to standard output and tries the same provider again
    )


_ONNX_TYPES: Final = {"bfloat16": 16, "float8_e4m3fn": 17, "float8_e5m2": 19}
"""TensorProto's numbers for the stored dtypes that numpy lacks."""


def _ortvalue(name: str, value: Array | StoredTensor) -> ort.OrtValue:
    try:
        tensor = as_tensor(value, f"weight {name}")
        x = np.asarray(tensor.data, order="C")
        if tensor.dtype in _ONNX_TYPES:
            return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(x, _ONNX_TYPES[tensor.dtype])
        return ort.OrtValue.ortvalue_from_numpy(x)
    except _FAILURES as error:
        raise InvalidInput(f"weight {name} cannot enter onnxruntime: {error}") from error


def _info(arg: Any, options: SessionOptions) -> TensorInfo:
    form, inner = "tensor", arg.type
    for prefix, name in FORMS.items():
        if inner.startswith(prefix):
            form, inner = name, inner.removeprefix(prefix).rstrip(")") + ")"
    other = form != "tensor" or inner == "tensor(string)"
    if inner not in DTYPES or (other and options.values == "numbers"):
        raise InvalidInput(f"{arg.name} must be a tensor of numbers, got {arg.type}")
    shape = tuple(UNNAMED if dim is None else dim for dim in arg.shape or ())
    return TensorInfo(arg.name, DTYPES[inner], shape, form)


ALLOCATION: Final = ("bad_alloc", "Failed to allocate memory")
"""Words of onnxruntime's messages for a refused allocation."""


def _run_failure(error: Exception, stop: CancellationToken | None) -> TriplaneError:
    if stop is not None and stop.is_set:
        return Unavailable("the run was stopped before it ended")
    kind = OutOfMemory if any(words in str(error) for words in ALLOCATION) else RunFailed
    return kind(f"the graph failed on these values: {error}")
