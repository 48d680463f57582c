"""`triplane inspect`: the contents of a file, down to the Python line from which a node comes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli.importing import SUFFIX
from triplane.unified_ir.cli.profiling import entry_profile, profile_lines, sizes_of
from triplane.unified_ir.cli.shell import (
    OUTPUT_FILE,
    check_distinct_files,
    json_option,
    open_output,
    option,
)

if TYPE_CHECKING:
    from triplane.unified_ir.files.container import Container
    from triplane.unified_ir.ir import Function, Module

LEAST_WIDTH: Final = 40
"""Least width of a last column that is wrapped beside the others."""
SHOWN_OPERATORS: Final = 5
"""Number of operators of a block that the text output shows."""

PICTURES: Final = (".html", ".svg")

EPILOG = """\b
Examples:
  triplane inspect digits.tpm                                    entries, state, digests
  triplane inspect digits.tpm --text --entry predict             the graph, with your lines
  triplane inspect digits.tpm --graph step.html --entry train_step
  triplane inspect digits.tpm --repeats --entry train_step       blocks that repeat
  triplane inspect digits.tpm --profile --entry train_step --sizes N=64
  triplane inspect digits.bundle --verify
  triplane inspect resnet.onnx --text                            an ONNX model, as it is imported

\b
--graph OUT.html writes one page that needs no network: boxes for the cells of the model fold and
unfold, forward, backward and update stand side by side, equal blocks are one box. Drag, wheel or
keys move and zoom; search finds a node by name, operator, type or state. OUT.svg is the view that
the page opens with. An entry with gradients is drawn as it runs: simplification may have merged
nodes or changed their order, so that a Relu in front of a MaxPool stands behind it.

\b
A model file's graphs are checked as they are read: every byte against its digest, every node's
types against type inference. The bytes of bundles and plans are checked with --verify.
"""


# fmt: off
OPTIONS: Final = (
    option("--text", "Print the graphs as text instead of the summary; those of bundles and plans "
           "are ONNX.", is_flag=True),
    option("--graph OUT.html", "Draw one entry of a model file, as a page (.html) or a picture "
           "(.svg), instead of printing the summary.", OUTPUT_FILE),
    option("--repeats", "List the blocks of nodes that one entry repeats; every node and edge with "
           "--json.", is_flag=True),
    option("--profile", "Time one entry (train_step, else the first) and show where its time goes: "
           "by node, operator and source line. Inputs are random.", name="profiling", is_flag=True),
    option("--sizes N=32,T=10",
           "Sizes of the inputs of --profile.  [default: 32 for each symbol]", callback=sizes_of),
    option("--entry NAME",
           "Only this entry.  [default for --graph and --repeats: predict, else the first]"),
    option("--verify", "Hash every byte of the file.", is_flag=True),
)
# fmt: on


@click.command("inspect", epilog=EPILOG, params=[*OPTIONS])
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@json_option
def command(
    *,
    file: Path,
    text: bool,
    graph: Path | None,
    repeats: bool,
    profiling: bool,
    sizes: dict[str, int],
    entry: str | None,
    verify: bool,
    as_json: bool,
) -> None:
    """Show the contents of FILE: a model file, a bundle, a plan or an ONNX model.

    The summary lists entries with their inputs and results, state by role, parts with sizes, and
    the root digest, which identifies the file everywhere else.
    """
    output = open_output(as_json)
    check_distinct_files([file], {"--graph": graph})
    if graph is not None and graph.suffix not in PICTURES:
        raise InvalidInput(f"--graph writes a picture, NAME.html or NAME.svg, got {graph.name!r}")
    if sizes and not profiling:
        raise InvalidInput("--sizes is an option of --profile; give both, or neither")
    opened = None if file.suffix == SUFFIX else _opened(file)
    module = _module(file, opened)
    record, lines = _summary(file, opened, module, entry, verify=verify)
    if text:
        record["text"] = _text(module, opened, entry)
        lines = [record["text"]]
    if repeats:
        from triplane.unified_ir.passes.occurrences import repeated

        record["repeats"] = repeated(_chosen(_needed(module, "--repeats"), entry))
        lines = list(_repeats_lines(record["repeats"]))
    if profiling:
        record["profile"] = entry_profile(_needed(module, "--profile"), entry, sizes)
        lines = list(profile_lines(record["profile"]))
    if graph is not None:
        drawn = _draw(_needed(module, "--graph"), entry, graph)
        record["graph"] = str(graph)
        lines = [*(lines if text or repeats or profiling else ()), f"{graph}: {drawn}"]
    output.result(record, "\n".join(lines))


def _needed(module: Module | None, option: str) -> Module:
    if module is None:
        raise InvalidInput(f"{option} needs the graphs of a model file; give the .tpm file")
    return module


def _summary(
    file: Path, opened: Container | None, module: Module | None, entry: str | None, *, verify: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the summary as a record and as lines; `verify` hashes every byte of the file."""
    if opened is None:
        size = file.stat().st_size
        record: dict[str, Any] = {"file": str(file), "kind": "onnx", "bytes": size}
        text = f"{file}: an ONNX model, {size_text(size)}, as `triplane import` would write it"
        lines = [text]
    else:
        if verify:
            opened.verify()
        # Loading a module has hashed every part already.
        record = _file_record(file, opened, verified=verify or module is not None)
        lines = list(_file_lines(record))
    if module is not None:
        record |= _module_record(module, entry)
        lines += _module_lines(module, record)
    elif opened is not None:
        record |= _signature_record(opened)
        lines += _signature_lines(record)
    return record, lines


def size_text(n: int) -> str:
    """Format bytes for people: 1,234 B, 12.3 KiB, 4.5 MiB."""
    if n < 10_000:
        return f"{n:,} B"
    return f"{n / 2**10:,.1f} KiB" if n < 10 << 20 else f"{n / 2**20:,.1f} MiB"


def _opened(path: Path) -> Container:
    """Return the container, for any kind of file."""
    from triplane.unified_ir.files.container import Container
    from triplane.unified_ir.files.manifest import KINDS

    # `Container` insists on a kind, and the kind is known only from the file, so each is tried; the
    # last one reports its error.
    for kind in KINDS[:-1]:
        try:
            return Container(path, kind=kind)
        except InvalidInput as error:
            # A newer format is not another kind; say so.
            if "format version" in str(error):
                raise
    return Container(path, kind=KINDS[-1])


def _module(path: Path, opened: Container | None) -> Module | None:
    """Return the module of a model file or an ONNX model; None for other kinds of files."""
    from triplane.unified_ir.onnx import import_onnx
    from triplane.unified_ir.ops.check import load

    if opened is None:
        return import_onnx(path)
    return load(path, opened.digest) if opened.manifest.kind == "model" else None


def _text(module: Module | None, opened: Container | None, entry: str | None) -> str:
    from triplane.unified_ir.ir.text import function_text, module_text

    if module is None:
        assert opened is not None
        return _onnx_text(opened, entry)
    return module_text(module) if entry is None else function_text(module.entry(entry))


def _file_record(path: Path, file: Container, *, verified: bool) -> dict[str, Any]:
    manifest = file.manifest
    return {
        "file": str(path),
        "kind": manifest.kind,
        "bytes": path.stat().st_size,
        "digest": file.digest,
        "parent": manifest.parent,
        "verified": verified,
        "parts": [
            {"name": p.name, "bytes": p.size, "sha256": p.sha256.hex()} for p in manifest.parts
        ],
        "tensors": [
            {"part": t.part, "name": t.name, "dtype": t.dtype, "shape": t.shape, "role": t.role}
            for t in manifest.tensors
        ],
        "properties": dict(manifest.properties),
    }


def _file_lines(record: Mapping[str, Any]) -> Iterator[str]:
    checked = "every byte matches its digest" if record["verified"] else "bytes not hashed"
    yield f"{record['file']}: a {record['kind']}, {size_text(record['bytes'])}, {checked}"
    yield f"root digest  {record['digest']}"
    if record["parent"]:
        yield f"made from    {record['parent']}"
    yield ""
    yield from _table(
        "parts", [(p["name"], size_text(p["bytes"]), p["sha256"][:16]) for p in record["parts"]]
    )
    for key, value in record["properties"].items():
        yield f"{key} = {value!r}"


def _type_text(dtype: str, shape: Iterable[int | str]) -> str:
    """Format a type as the text form of the IR does: float32[N,4]."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def _signature_record(file: Container) -> dict[str, Any]:
    """Return the inputs and outputs of a bundle; empty for other kinds of files."""
    if file.manifest.kind != "bundle":
        return {}
    from triplane.unified_ir.runtime import description

    bundle = description.decode(file.part("bundle.pb"), f"{file.path.name}: bundle.pb")
    return {
        "name": bundle.name,
        "version": bundle.version,
        "target": bundle.target,
        "inputs": [f"{i.name}: {_type_text(i.dtype, i.shape)}" for i in bundle.inputs],
        "outputs": [f"{i.name}: {_type_text(i.dtype, i.shape)}" for i in bundle.outputs],
    }


def _signature_lines(record: Mapping[str, Any]) -> Iterator[str]:
    if "target" in record:
        signature = f"({', '.join(record['inputs'])}) -> ({', '.join(record['outputs'])})"
        yield ""
        yield f"{record['name']} version {record['version']} for {record['target']}: {signature}"
    rows = [
        (t["name"], _type_text(t["dtype"], t["shape"]), t["role"], t["part"])
        for t in record["tensors"]
    ]
    yield ""
    yield from _table("tensors", rows)


def _module_record(module: Module, entry: str | None) -> dict[str, Any]:
    wanted = module.entries if entry is None else (entry,)
    return {
        "entries": {name: _entry_record(module, name) for name in wanted},
        "state": {
            name: {
                "role": str(t.role),
                "type": str(t.type),
                "elements": t.array.size,
                # Rounded up: types such as int4 pack several elements into a byte.
                "bytes": -(-t.array.size * t.type.dtype.bits // 8),
            }
            for name, t in module.state.items()
        },
        "parameters": sum(t.array.size for t in module.state.values() if t.role == "parameter"),
        "meta": dict(module.meta),
    }


def _entry_record(module: Module, entry: str) -> dict[str, Any]:
    function = module.entry(entry)
    results = dict(zip(function.result_names, function.results, strict=True))
    return {
        "function": module.entries[entry],
        "inputs": {p.name: str(p.type) for p in module.inputs(entry)},
        "results": {n: str(v.type) for n, v in results.items() if n not in module.state},
        "reads": [p.name for p in function.params if p.name in module.state],
        "assigns": list(module.assigned(entry)),
        "nodes": sum(1 for _ in function.walk()),
    }


def _module_lines(module: Module, record: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield from _table("entries", [_entry_row(e, r) for e, r in record["entries"].items()])
    yield ""
    yield from _table("state", list(_state_rows(record)))
    yield _count(record["parameters"], "parameter")
    if module.meta:
        yield ""
        yield from _table("meta", [(k, repr(v)) for k, v in module.meta.items()])


def _entry_row(entry: str, record: Mapping[str, Any]) -> tuple[str, ...]:
    inputs = ", ".join(f"{n}: {t}" for n, t in record["inputs"].items())
    results = ", ".join(f"{n}: {t}" for n, t in record["results"].items())
    state = f"reads {len(record['reads'])}, assigns {len(record['assigns'])}"
    return (entry, _count(record["nodes"], "node"), state, f"({inputs}) -> ({results})")


def _state_rows(record: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    state = record["state"].values()
    for role in dict.fromkeys(t["role"] for t in state):
        tensors = [t for t in state if t["role"] == role]
        elements, n = sum(t["elements"] for t in tensors), sum(t["bytes"] for t in tensors)
        absent = " (not in the file)" if role == "personal" else ""
        counts = (_count(len(tensors), "tensor"), _count(elements, "element"))
        yield (role, *counts, size_text(n) + absent)


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _table(title: str, rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Return rows under a title, with columns as wide as their widest cell.

    What does not fit into the terminal, 80 columns without one, continues on further lines.
    """
    yield title
    limit = get_terminal_size().columns
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # A last column that begins far to the right has its lines below the others.
    start = sum(width + 2 for width in widths[:-1]) + 2
    indent = " " * (start if start + LEAST_WIDTH <= limit else 6)
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        line = ("  " + "  ".join(cells)).rstrip()
        if len(line) <= limit:
            yield line
        else:
            lines = _wrapped(row[-1], limit, indent)
            first = line[:start].rstrip()
            if len(indent) == start:
                first = line[:start] + lines.pop(0).lstrip()
            yield from (first, *lines)


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    # A space that is no place to break: a name stays beside its type.
    lines = textwrap.wrap(
        text.replace(": ", ":\0"), width, initial_indent=indent, subsequent_indent=indent,
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip
    return [line.replace("\0", " ") for line in lines]


def _onnx_text(file: Container, entry: str | None) -> str:
    """Return the ONNX graphs of a bundle or plan, in ONNX's text form."""
    import onnx

    names = [p.name for p in file.manifest.parts if p.name.endswith(".onnx")]
    wanted = [n for n in names if entry is None or n == f"{entry}.onnx"]
    if not wanted:
        raise InvalidInput(f"no graph {entry or ''} in this file; it has {', '.join(names)}")
    models = {n: onnx.load_model_from_string(bytes(file.part(n))) for n in wanted}
    return "\n".join(f"# {n}\n{onnx.printer.to_text(m)}" for n, m in models.items())


def _draw(module: Module, entry: str | None, out: Path) -> str:
    from triplane.proto.disk import write_atomic
    from triplane.unified_ir.cli.drawing.outline import outline
    from triplane.unified_ir.cli.drawing.page import page
    from triplane.unified_ir.cli.drawing.svg import svg

    function = _chosen(module, entry)
    root = outline(function, module.state)
    write_atomic(out, (svg if out.suffix == ".svg" else page)(root).encode())
    left_out = sum(1 for _ in function.walk()) - root.nodes
    hidden = "1 constant or size"
    if left_out > 1:
        hidden = f"{left_out:,} constants and sizes computed from them"
    shown = f"{function.name}, {_count(root.nodes, 'node')}"
    return f"{shown}, without {hidden}" if left_out else shown


def _repeats_lines(blocks: Mapping[str, Any]) -> Iterator[str]:
    if not blocks:
        yield "no block of nodes occurs twice"
        return
    rows = [("", "nodes", "times", "operators", "from")]
    for name, occurrences in blocks.items():
        nodes = occurrences[0]["nodes"]
        operators = " ".join(operator for _, operator, _ in nodes[:SHOWN_OPERATORS])
        more = " ..." if len(nodes) > SHOWN_OPERATORS else ""
        counts = (str(len(nodes)), str(len(occurrences)))
        rows.append((name, *counts, operators + more, nodes[0][2] or ""))
    yield from _table("blocks", rows)


def _chosen(module: Module, entry: str | None) -> Function:
    if entry is not None:
        return module.entry(entry)
    if not module.entries:
        raise InvalidInput("the module has no entries")
    return module.entry("predict" if "predict" in module.entries else next(iter(module.entries)))
