"""Child processes that read batches of a pipeline, for Python functions that hold the interpreter.

A child gets the pipeline's JSON form and the names of its functions on standard input, then orders
of the form {"epoch": 0, "batch": 7}; it answers each with the arrays of the batch. Nothing is
pickled. A child ends when its standard input does.
"""

from __future__ import annotations

import importlib
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import IO, Any, Final

import numpy as np

from triplane.proto import errors
from triplane.proto.errors import InvalidInput, TriplaneError, Unavailable
from triplane.unified_ir.data.columns import BYTES, TEXT, Column, Columns, Ragged
from triplane.unified_ir.data.dataset import Dataset
from triplane.unified_ir.data.form import from_json
from triplane.unified_ir.data.functions import PythonFunction
from triplane.unified_ir.data.kinds import is_batches
from triplane.unified_ir.data.opened import Opened
from triplane.unified_ir.data.registry import text_of

_SIZE: Final = struct.Struct("<Q")
_END_S: Final = 5.0
MAX_HEADER_BYTES: Final = 1 << 20
MAX_PART_BYTES: Final = 8 << 30


class ChildPool:
    """Child processes with the same pipeline; each reads one batch at a time."""

    def __init__(self, dataset: Dataset, seed: int, count: int) -> None:
        order = {
            # Without roles: they may name columns that a function drops, and are the parent's.
            "pipeline": text_of(replace(dataset, inputs=(), targets=(), labels=())),
            "seed": seed,
            "functions": _importable(dataset),
            "path": [os.path.abspath(p) if p else os.getcwd() for p in sys.path],  # noqa: PTH100, PTH109
        }
        self._free: SimpleQueue[_WorkerProcess] = SimpleQueue()
        self._children = [_WorkerProcess(order) for _ in range(count)]
        for child in self._children:
            self._free.put(child)

    def batch(self, epoch: int, k: int) -> Columns:
        """Return batch `k` of an epoch, read by the next child that is free."""
        child = self._free.get()
        try:
            return child.batch(epoch, k)
        finally:
            self._free.put(child)

    def close(self) -> None:
        """End all children, and wait for them."""
        for child in self._children:
            child.end_input()
        deadline = time.monotonic() + _END_S
        for child in self._children:
            child.close(deadline)


class _WorkerProcess:
    def __init__(self, order: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C must not reach it: the parent ends its children by closing their input.
            start_new_session=True,
        )
        self._send(order)

    def batch(self, epoch: int, k: int) -> Columns:
        self._send({"epoch": epoch, "batch": k})
        assert self._process.stdout is not None
        try:
            header, columns = _received(self._process.stdout)
        except EOFError:
            code = self._process.wait()
            raise Unavailable(
                f"a worker process of the data ended with code {code} in batch {k} of epoch "
                f"{epoch}; its message is above, on standard error"
            ) from None
        if "error" in header:
            family = getattr(errors, str(header["error"]), InvalidInput)
            raise (family if issubclass(family, TriplaneError) else InvalidInput)(header["message"])
        return columns

    def _send(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        # A child that has ended is noticed when its answer is read.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def end_input(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def close(self, deadline: float) -> None:
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:  # a function of the user's that does not come back
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        # Last, since it waits for a thread that still reads the answer of a batch.
        self._process.stdout.close()


def functions_of(dataset: Dataset) -> Iterator[PythonFunction]:
    """Return the Python functions of a pipeline's steps, and of the pipelines within its source."""
    for part in getattr(dataset.origin.source, "parts", ()):
        yield from functions_of(part)
    for step in dataset.steps:
        function = getattr(step, "function", None)
        if isinstance(function, PythonFunction):
            yield function


def _importable(dataset: Dataset) -> list[str]:
    """Return the names of the pipeline's functions; InvalidInput for one that has no such name."""
    names = []
    for function in functions_of(dataset):
        name = function.name
        try:
            same = _imported(name) is function.call
        except (ImportError, AttributeError, ValueError):
            same = False
        if not same or name.startswith("__main__:"):
            raise InvalidInput(
                f"{name} cannot be imported by a worker process: define it at the top level of a "
                "module beside your script, or use threads (processes=False)"
            )
        names.append(name)
    return names


def _imported(name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    value: Any = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    function: Callable[..., Any] = value
    return function


def _sent(stream: IO[bytes], header: Mapping[str, Any], parts: list[bytes | memoryview]) -> None:
    text = json.dumps(header).encode()
    stream.write(_SIZE.pack(len(text)) + text)
    for part in parts:
        stream.write(_SIZE.pack(len(part)))
        stream.write(part)
    stream.flush()


def _received(stream: IO[bytes]) -> tuple[dict[str, Any], Columns]:
    header = json.loads(bytes(_part(stream, MAX_HEADER_BYTES)))
    columns: Columns = {}
    for name, kind, dtype, shape in header.get("columns", ()):
        if kind == "array":
            columns[name] = _array(stream, dtype, shape)
        elif kind == "ragged":
            values = _array(stream, dtype, shape)
            columns[name] = Ragged(values, np.frombuffer(_part(stream, MAX_PART_BYTES), np.int64))
        else:
            ends = np.frombuffer(_part(stream, MAX_PART_BYTES), np.int64)
            columns[name] = _objects(bytes(_part(stream, MAX_PART_BYTES)), ends, kind)
    return header, columns


def _encoded(columns: Columns) -> tuple[dict[str, Any], list[bytes | memoryview]]:
    kinds, parts = [], list[bytes | memoryview]()
    for name, column in columns.items():
        if isinstance(column, Ragged):
            kinds.append((name, "ragged", column.values.dtype.str, column.values.shape))
            parts += [_bytes(column.values), _bytes(column.offsets)]
        elif column.dtype == object:
            kind = TEXT if all(isinstance(v, str) for v in column) else BYTES
            encoded = [v.encode() if kind == TEXT else v for v in column]
            kinds.append((name, kind, "", ()))
            parts += [np.cumsum([len(v) for v in encoded], dtype=np.int64).tobytes()]
            parts += [b"".join(encoded)]
        else:
            kinds.append((name, "array", column.dtype.str, column.shape))
            parts.append(_bytes(column))
    return {"columns": kinds}, parts


def _bytes(array: np.ndarray[Any, Any]) -> bytes | memoryview:
    return np.ascontiguousarray(array).tobytes()


def _array(stream: IO[bytes], dtype: str, shape: list[int]) -> Any:
    return np.frombuffer(_part(stream, MAX_PART_BYTES), np.dtype(dtype)).reshape(shape)


def _objects(data: bytes, ends: Any, kind: str) -> Column:
    values = np.empty(len(ends), object)
    start = 0
    for k, end in enumerate(ends.tolist()):
        one = data[start:end]
        values[k] = one.decode() if kind == TEXT else one
        start = end
    return values


def _part(stream: IO[bytes], limit: int) -> bytearray:
    (size,) = _SIZE.unpack(_exactly(stream, _SIZE.size))
    if size > limit:
        raise Unavailable(f"a worker process of the data announced {size} bytes; at most {limit}")
    return _exactly(stream, size)


def _exactly(stream: IO[bytes], size: int) -> bytearray:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        n = stream.readinto(view[at:])  # type: ignore[attr-defined]
        if not n:
            raise EOFError
        at += n
    return data


def main() -> None:
    """Answer the orders on standard input until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a function of the user's prints must not land between the answers
    orders = sys.stdin.buffer
    first = json.loads(orders.readline())
    sys.path[:] = first["path"]
    opened: Opened | None = None
    for line in orders:
        order = json.loads(line)
        try:
            if opened is None:
                known = {name: _imported(name) for name in first["functions"]}
                opened = from_json(first["pipeline"], functions=known).opened(first["seed"])
            view = opened.view(order["epoch"])
            assert is_batches(view)
            header, parts = _encoded(view.batch(order["batch"]))
        except Exception as error:  # noqa: BLE001 - raised again in the parent
            header, parts = {"error": type(error).__name__, "message": _message(error)}, []
        try:
            _sent(answers, header, parts)
        except BrokenPipeError:
            return


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, TriplaneError) else f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
