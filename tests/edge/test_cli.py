from dataclasses import fields

import click
import pytest
from click.testing import CliRunner

from triplane.edge.cli import edge, serve
from triplane.edge.serving import __main__ as process
from triplane.edge.serving.limits import ServingLimits
from triplane.edge.serving.options import Options
from triplane.proto.errors import InvalidInput, Unavailable
from triplane.unified_ir.runtime import available_providers


@pytest.fixture
def told(monkeypatch):
    """What the verb hands to the process."""
    seen: list[Options] = []
    monkeypatch.setattr(process, "main", seen.append)
    return seen


def run(*args):
    return CliRunner().invoke(edge, ["serve", *args], catch_exceptions=False)


def test_the_verbs_defaults_are_the_options_defaults(told):
    assert run("digits.bundle").exit_code == 0
    assert told == [Options(bundles=("digits.bundle",))]


def test_every_option_reaches_the_process(told):
    run("a", "b", "--host", "::1", "--port", "0", "--metrics-port", "0", "--threads", "3",
        "--model-threads", "2", "--device", "cuda", "--max-message-mb", "5", "--limit", "rows=9",
        "--drain-seconds", "1.5", "--tls-cert", "c", "--tls-key", "k", "--tls-client-ca", "a",
        "--log-level", "info", "--json")  # fmt: skip
    assert told == [
        Options(
            bundles=("a", "b"),
            host="::1",
            port=0,
            metrics_port=0,
            model_threads=2,
            device="cuda",
            drain_s=1.5,
            tls_cert="c",
            tls_key="k",
            tls_client_ca="a",
            json=True,
            log_level="info",
            limits=ServingLimits(threads=3, message_bytes=5 << 20, rows=9),
        )
    ]


def test_every_field_of_the_options_can_be_given_on_the_command_line():
    names = {parameter.name for parameter in serve.params}
    of_a_node = {"control_socket", "home"}  # set by its supervisor
    assert {field.name for field in fields(Options)} - names == {"json", "limits"} | of_a_node


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--limit", "speed=3"), "no limit 'speed'; there are message_bytes, "),
        (("--limit", "rows"), "limit rows is ''; give a whole number, as rows=4096"),
        (("--limit", "rows=many"), "limit rows is 'many'; give a whole number"),
        (("--limit", "rows=0"), "limit rows is 0; it must be 1 to"),
        (("--model-threads", "0"), "model_threads is 0; 1 to 1024"),
        (("--drain-seconds", "-1"), "drain_s is -1.0; 0 to "),
    ],
)
def test_a_refused_option_is_the_first_word(told, options, said):
    with pytest.raises(InvalidInput) as refused:
        run("a", *options)
    assert str(refused.value).startswith(said)
    assert told == []


def test_an_unknown_limit_is_refused_by_name(told):
    with pytest.raises(InvalidInput, match="speed"):
        run("digits.bundle", "--limit", "speed=1")


def test_help_shows_an_example_that_the_parser_accepts(told):
    text = run("--help").output
    assert "triplane edge serve digits.bundle --port 0 --metrics-port 0 --json" in text
    assert run("digits.bundle", "--port", "0", "--metrics-port", "0", "--json").exit_code == 0


def test_nothing_to_serve_is_a_usage_error(told):
    assert run().exit_code == click.UsageError.exit_code


@pytest.mark.skipif(
    "CUDAExecutionProvider" in available_providers(), reason="onnxruntime here has CUDA"
)
def test_a_node_does_not_enrol_for_a_device_that_onnxruntime_lacks(tmp_path):
    home = tmp_path / "node"
    argv = ["enrol", "token", "--cloud", "localhost:1", "--home", str(home), "--device", "cuda"]
    with pytest.raises(Unavailable, match="pip uninstall onnxruntime && pip install onnxruntime-"):
        edge.main(argv, standalone_mode=False)
    assert not home.exists()
