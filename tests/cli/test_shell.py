import io
import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points, metadata
from pathlib import Path
from types import ModuleType

import click
import numpy as np
import pytest

from triplane.proto import errors
from triplane.unified_ir.cli import shell

TRIPLANE = [sys.executable, "-c", "from triplane.unified_ir.cli import main; main()"]
HEAVY = {"numpy", "onnx", "onnxruntime", "google.protobuf", "grpc", "rich", "safetensors"}


def command_line(*argv, **env):
    return subprocess.run(
        [*TRIPLANE, *argv],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
        timeout=60,
    )


@pytest.fixture
def verb(monkeypatch):
    """Installs one verb under a name, as an installed package would."""

    def install(name, callback, *params):
        command = click.Command(name, callback=callback, params=list(params))
        module = ModuleType("shell_test_verbs")
        setattr(module, name, command)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        entry = EntryPoint(name, f"shell_test_verbs:{name}", shell.VERB_GROUP)
        monkeypatch.setattr(shell, "_entry_points", lambda: {name: entry})

    return install


def raising(error):
    def callback(**_):
        raise error

    return callback


@pytest.mark.slow
def test_help_lists_every_installed_verb_and_a_first_session():
    result = command_line("--help")
    assert result.returncode == 0
    for entry in entry_points(group=shell.VERB_GROUP):
        assert f"\n  {entry.name} " in result.stdout
    assert "triplane edge serve" in result.stdout


@pytest.mark.slow
def test_no_argument_shows_the_help():
    assert command_line().stdout == command_line("--help").stdout


def test_version_is_the_installed_one():
    assert command_line("--version").stdout.startswith("triplane 0.")


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv", [["--help"], ["train", "--help"], ["convert", "--help"], ["edge", "--help"]], ids=str
)
def test_help_imports_click_and_nothing_heavy(argv):
    program = f"""
import sys
from triplane.unified_ir.cli.shell import run
run({argv!r})
print("HEAVY", *sorted(set(sys.modules) & {HEAVY!r}))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.splitlines()[-1].split() == ["HEAVY"]


def test_unknown_verb_suggests_the_nearest():
    result = command_line("trian")
    assert result.returncode == 2
    assert "did you mean 'train'?" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_verb_that_does_not_import_is_listed_with_its_reason(monkeypatch, capsys):
    entries = {
        "broken": EntryPoint("broken", "triplane_no_such_module:command", shell.VERB_GROUP),
        "notaverb": EntryPoint("notaverb", "json:dumps", shell.VERB_GROUP),
    }
    monkeypatch.setattr(shell, "_entry_points", lambda: entries)
    assert shell.run(["--help"]) == 0
    out = capsys.readouterr().out
    assert "unavailable: ModuleNotFoundError: No module named" in " ".join(out.split())
    assert "json:dumps" in out
    assert shell.run(["broken", "--any", "thing"]) == shell.UNEXPECTED
    assert "triplane_no_such_module" in capsys.readouterr().err


CASES = [
    (errors.InvalidInput("a"), 2),
    (errors.NotFound("a"), 2),
    (errors.Conflict("a"), 3),
    (errors.Unavailable("a"), 4),
    (errors.Corrupt("a"), 5),
    (errors.MissingExtra("a"), 6),
    (FileNotFoundError(2, "No such file", "a"), 4),
    (MemoryError(), 4),
    (KeyError("a"), 70),
]


@pytest.mark.parametrize(("error", "code"), CASES)
def test_each_family_has_its_exit_code(verb, capsys, error, code):
    verb("fail", raising(error))
    assert shell.run(["fail"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("triplane: ")


def test_a_subclass_is_reported_under_its_family(verb, capsys):
    class ShapeError(errors.InvalidInput):
        pass

    verb("fail", raising(ShapeError("(2, 3) @ (4, 5)")), click.Option(["--json"], is_flag=True))
    assert shell.run(["fail", "--json"]) == 2
    record = json.loads(capsys.readouterr().out)
    expected = {"family": "InvalidInput", "message": "(2, 3) @ (4, 5)", "exit_code": 2}
    assert record == {"error": expected}


def test_a_lack_of_memory_is_told_as_such_and_with_a_way_out(verb, capsys):
    verb("fail", lambda: np.empty((2**28, 2**28)))
    assert shell.run(["fail"]) == 4
    said = capsys.readouterr().err
    assert "out of memory: Unable to allocate" in said
    assert "smaller sizes" in said


def test_every_family_of_errors_has_an_exit_code():
    families = set(errors.TriplaneError.__subclasses__())
    assert {f for f in families if f.__module__ == errors.__name__} <= set(shell.EXIT_CODES)


def test_help_lists_every_exit_code():
    told = shell.EPILOG.partition("Exit codes:")[2]
    for code in {*shell.EXIT_CODES.values(), shell.UNEXPECTED, shell.INTERRUPTED}:
        assert f" {code} " in told, code


def test_only_an_answer_of_no_exits_with_1():
    assert 1 not in {*shell.EXIT_CODES.values(), shell.UNEXPECTED}


def test_ctrl_c_exits_like_an_interrupted_program(verb, capsys):
    verb("hang", raising(KeyboardInterrupt()))
    assert shell.run(["hang"]) == shell.INTERRUPTED
    assert capsys.readouterr().err.strip() == "triplane: interrupted"


def test_ctrl_c_under_json_prints_one_document_that_says_so(verb, capsys):
    interrupt = KeyboardInterrupt()
    interrupt.add_note("saved run/3.tpc")
    verb("hang", raising(interrupt), click.Option(["--json"], is_flag=True))
    assert shell.run(["hang", "--json"]) == shell.INTERRUPTED
    told = capsys.readouterr()
    assert json.loads(told.out) == {
        "error": {
            "family": "Interrupted",
            "message": "interrupted; saved run/3.tpc",
            "exit_code": shell.INTERRUPTED,
        }
    }
    assert not told.err.strip()  # click ends the line of the ^C


def test_a_file_in_no_folder_is_refused_before_the_work(verb, capsys, tmp_path):
    worked = []
    option = click.Option(["--out"], type=shell.OUTPUT_FILE)
    verb("work", lambda **given: worked.append(given["out"]), option)
    assert shell.run(["work", "--out", str(tmp_path / "absent" / "a.tpm")]) == 2
    error = capsys.readouterr().err
    assert f"the folder '{tmp_path / 'absent'}' does not exist; create it" in error
    assert worked == []
    assert shell.run(["work", "--out", str(tmp_path / "a.tpm")]) == 0
    assert worked == [tmp_path / "a.tpm"]


def test_a_folder_without_write_permission_is_refused(verb, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda _, mode: not mode & os.W_OK)
    verb("work", lambda **_: None, click.Option(["--out"], type=shell.OUTPUT_FILE))
    assert shell.run(["work", "--out", str(tmp_path / "a.tpm")]) == 2
    assert "is not writable" in capsys.readouterr().err


def test_traceback_comes_only_when_asked_for(verb, capsys, monkeypatch):
    monkeypatch.delenv(shell.TRACEBACK_VARIABLE, raising=False)
    verb("fail", raising(KeyError("deep inside")))
    assert shell.run(["fail"]) == shell.UNEXPECTED
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv(shell.TRACEBACK_VARIABLE, "1")
    assert shell.run(["fail"]) == shell.UNEXPECTED
    assert "Traceback" in capsys.readouterr().err


def test_debug_asks_for_tracebacks_of_child_processes_too(verb, monkeypatch):
    monkeypatch.setenv(shell.TRACEBACK_VARIABLE, "0")
    seen = []
    verb("peek", lambda: seen.append(os.environ[shell.TRACEBACK_VARIABLE]))
    assert shell.run(["--debug", "peek"]) == 0
    assert seen == ["1"]


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error():
    program = f"{TRIPLANE[0]} -c '{TRIPLANE[2]}' --help | head -n 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.stderr == ""
    assert result.returncode in {0, shell.BROKEN_PIPE}


@pytest.mark.slow
def test_an_error_is_on_standard_error_where_standard_output_is_full():
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [*TRIPLANE, "inspect", "missing.tpm", "--json"], stdout=full, stderr=subprocess.PIPE,
            text=True, check=False, timeout=60,
        )  # fmt: skip
    assert result.stderr == "triplane: no file at missing.tpm\n"
    assert result.returncode == shell.EXIT_CODES[errors.NotFound]


def test_a_missing_package_of_an_extra_names_the_extra(verb, capsys):
    verb("serve", raising(ModuleNotFoundError("No module named 'grpc'", name="grpc")))
    assert shell.run(["serve"]) == 6
    assert "pip install 'triplane[edge]'" in capsys.readouterr().err


def test_require_names_the_extra_but_not_for_a_fault_deeper_inside(tmp_path, monkeypatch):
    (tmp_path / "hollow.py").write_text("import triplane_absent_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(errors.MissingExtra, match=r"triplane\[edge\]"):
        shell.require("triplane_absent_module.part", extra="edge")
    with pytest.raises(ModuleNotFoundError, match="triplane_absent_dependency"):
        shell.require("hollow", extra="edge")
    assert shell.require("json", extra="edge") is json


def registered_tiers():
    return [entry.load() for entry in entry_points(group=shell.TIER_GROUP)]


def test_every_extra_that_a_tier_names_is_declared():
    declared = set(metadata("triplane").get_all("Provides-Extra") or ())
    extras = {extra for tier in registered_tiers() for extra in tier.extras.values()}
    assert {"cloud", "device", "edge"} <= extras <= declared
    assert {"images", "arrow"} <= declared  # named by sources of datasets


def test_tiers_rank_verbs_that_exist_and_each_rank_once():
    ranks = [rank for tier in registered_tiers() for rank in tier.verbs.items()]
    assert {name for name, _ in ranks} <= {e.name for e in entry_points(group=shell.VERB_GROUP)}
    assert len(dict(ranks)) == len({rank for _, rank in ranks}) == len(ranks)


def test_verbs_without_a_rank_are_listed_after_the_others(monkeypatch):
    ranked = {name for tier in registered_tiers() for name in tier.verbs}
    more = {name: EntryPoint(name, "json:dumps", shell.VERB_GROUP) for name in ("zip", "also")}
    every = {**more, **shell._entry_points()}
    monkeypatch.setattr(shell, "_entry_points", lambda: every)
    listed = shell.triplane.list_commands(click.Context(shell.triplane))
    assert listed[len(ranked) :] == sorted(every.keys() - ranked)


def test_a_tier_that_does_not_import_takes_no_other_down(monkeypatch, capsys):
    own = entry_points

    def with_a_broken_one(*, group):
        broken = EntryPoint("broken", "triplane_no_such_module:TIER", group)
        return [*([broken] if group == shell.TIER_GROUP else []), *own(group=group)]

    monkeypatch.setattr("importlib.metadata.entry_points", with_a_broken_one)
    assert shell.run(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.index("\n  train ") < out.index("\n  cloud ") < out.index("\n  edge ")


def test_result_is_text_or_one_json_document(capsys):
    shell.open_output(as_json=False).result({"accuracy": 0.98}, "accuracy 0.98")
    assert capsys.readouterr().out == "accuracy 0.98\n"
    output = shell.open_output(as_json=True)
    output.note("working")
    output.result({"accuracy": np.float32(0.5)}, "accuracy 0.5")
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"accuracy": 0.5}
    assert captured.err == "working\n"


def test_an_argument_that_is_not_utf8_is_named_as_such(capsys):
    assert shell.run(["cloud", "token", "--name", "odd\udcff"]) == 2
    assert r"an argument is not valid UTF-8: b'odd\xff'" in capsys.readouterr().err


def test_a_secret_comes_from_a_file_or_a_pipe_as_well(tmp_path, monkeypatch):
    file = tmp_path / "token"
    file.write_text("  abc.def\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("piped\n"))
    assert [shell.SECRET.convert(v, None, None) for v in ("x", f"@{file}", "-")] == [
        "x", "abc.def", "piped",
    ]  # fmt: skip
    with pytest.raises(click.BadParameter, match="cannot be read"):
        shell.SECRET.convert(f"@{tmp_path / 'absent'}", None, None)


def test_a_person_types_a_secret_without_showing_it(monkeypatch):
    def ended(_):
        raise EOFError

    terminal = io.StringIO("seen\n")
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr("getpass.getpass", lambda _: "hidden ")
    assert shell.SECRET.convert("-", None, None) == "hidden"
    monkeypatch.setattr("getpass.getpass", ended)
    with pytest.raises(click.BadParameter, match="- cannot be read: no input"):
        shell.SECRET.convert("-", None, None)


def test_what_the_verb_token_printed_is_a_file_of_its_secret(tmp_path, monkeypatch):
    printed = "abc.def\n\nOne use, for the device ann; expires in 60 min. On that machine, run:\n"
    (tmp_path / "token").write_text(printed)
    monkeypatch.setattr("sys.stdin", io.StringIO(printed))
    assert shell.SECRET.convert(f"@{tmp_path / 'token'}", None, None) == "abc.def"
    assert shell.SECRET.convert("-", None, None) == "abc.def"
    (tmp_path / "token").write_text("")
    assert shell.SECRET.convert(f"@{tmp_path / 'token'}", None, None) == ""
