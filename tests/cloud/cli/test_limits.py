"""The options that limit devices: the same in runs and studies, and what is shown of them."""

import json

import click
import pytest
from click.testing import CliRunner
from tests.support.digits_model import saved_digits

from triplane.cloud.cli import federate
from triplane.cloud.cli.federate import command
from triplane.cloud.cli.runs import headline, round_row, run_text
from triplane.cloud.federation.spec import robustness_of, with_defaults
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.federated.algorithms.aggregators import AGGREGATORS, NUMBERS, Robustness

RUN, SIMULATE = command.commands["run"], command.commands["simulate"]
LIMITS = (
    "--norm-bound", "2.5", "--max-examples", "100", "--aggregator", "bucketing+trimmed-mean",
    "--trim", "0.4", "--bucket-size", "3", "--returns", "0",
)  # fmt: skip
CHOSEN = Robustness(
    norm_bound="2.5", max_examples=100, aggregator="bucketing+trimmed-mean",
    numbers={"trim": 0.4, "bucket_size": 3}, returns=0,
)  # fmt: skip


def spec_of(*argv):
    """The request that a command line of `federate run` makes."""
    params = RUN.make_context("run", ["tiny", *argv]).params
    for name in ("detach", "identity", "as_json"):
        del params[name]
    return federate._spec(**params)


def test_limits_that_were_set_are_in_the_request_and_others_are_the_cloud_s():
    assert not spec_of().HasField("robustness")
    asked = spec_of(*LIMITS, "--devices", "9")
    assert robustness_of(asked) == CHOSEN
    assert robustness_of(with_defaults(asked)) == CHOSEN
    assert spec_of("--returns", "0").robustness.HasField("returns")


def test_both_commands_have_the_same_options_of_limits():
    for verb in (RUN, SIMULATE):
        text = " ".join(CliRunner().invoke(verb, ["--help"]).output.split())
        for name in ("norm-bound", "max-examples", "aggregator", "returns", *NUMBERS):
            assert f"--{name.replace('_', '-')} " in text, (verb.name, name)
        assert all(name in text.replace("multi- krum", "multi-krum") for name in AGGREGATORS)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--norm-bound", "some"), "'adaptive', 'off' or a number above 0, got 'some'"),
        (("--norm-bound", "-1"), "a number above 0"),
        (("--max-examples", "0"), "0 is not in the range"),
        (("--aggregator", "mode"), "no aggregator 'mode'"),
        (("--trim", "0.5"), "is not in the range"),
        (("--byzantine", "1.5"), "not a valid integer"),
    ],
)
@pytest.mark.parametrize("verb", [RUN, SIMULATE])
def test_a_limit_that_is_not_valid_is_refused_by_its_option(verb, argv, words):
    with pytest.raises(click.UsageError) as refused:
        verb.make_context("verb", ["m.tpm", "--data", "digits"][: 1 + 2 * (verb is SIMULATE)]
                          + list(argv))  # fmt: skip
    assert words in " ".join(refused.value.format_message().split())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_digits(tmp_path_factory.mktemp("model"))


def simulated(model, *more):
    argv = [str(model), "--data", "digits", "--population", "9", "--algorithm", "fedavg"]
    return CliRunner().invoke(SIMULATE, [*argv, "--rounds", "1", "--steps", "1", *more])


@pytest.mark.long
def test_a_study_follows_its_limits_and_its_page_names_them(model, tmp_path):
    plain, limited = (
        simulated(model, "--json", *more)
        for more in ((), (*LIMITS, "--out", str(tmp_path / "o.html")))
    )
    assert limited.exit_code == 0, limited.output
    (one,), (other,) = (json.loads(x.stdout)["trials"] for x in (plain, limited))
    assert one["training"] != other["training"]
    assert [r["scaled"] for r in one["rounds"]] == [0]
    assert isinstance(other["rounds"][0]["scaled"], int)
    page = (tmp_path / "o.html").read_text()
    assert "bucketing+trimmed-mean" in page
    assert "norm bound" in page


@pytest.mark.slow
def test_the_first_line_says_that_there_is_no_norm_bound(model):
    said = simulated(model, "--norm-bound", "off")
    assert said.stderr.startswith("no norm bound: one device can replace the model")
    assert "no norm bound" not in simulated(model).stderr


@pytest.mark.slow
def test_a_study_that_is_too_small_for_its_aggregator_says_what_it_needs(model):
    said = simulated(model, "--aggregator", "krum", "--byzantine", "4")
    assert "needs at least 11 updates in each round; a round may have 9" in str(said.exception)


def test_an_aggregator_and_a_strategy_are_not_both_taken(model):
    said = simulated(model, "--strategy", "fedavg", "--aggregator", "median")
    assert said.exit_code == 2
    assert "leave them or --strategy out" in " ".join(said.output.split())


def test_people_see_scaled_updates_and_returns():
    follows = pb.Round(number=1, asked=3, counted=3, norm_bound=1.4321, closed_s=2.0, opened_s=1.0)
    assert round_row(follows)[-1] == "norm bound 1.43"
    scaled = pb.Round(number=1, asked=3, counted=3, scaled=2, closed_s=2.0, opened_s=1.0)
    assert round_row(scaled)[-1] == "2 updates above the norm bound"
    returned = pb.Round(number=2, counted=3, returned="the loss is large; returned", closed_s=3.0)
    assert round_row(returned)[-1] == "the loss is large; returned"
    off = pb.Spec(model="m@1", robustness=pb.Robustness(norm_bound="off"))
    run = pb.Run(id="0" * 16, spec=off, rounds=[scaled, returned])
    assert "no norm bound: one device can replace the model" in headline(run)
    assert "2 updates above the norm bound" in run_text(run)
    assert "no norm bound" not in headline(pb.Run(id="0" * 16, spec=pb.Spec(model="m@1")))
