"""The options of noise and of masking: the same in runs and studies, and none without effect."""

import json
import re

import click
import pytest
from click.testing import CliRunner
from tests.support.digits_model import saved_digits

from triplane.cloud.cli import federate
from triplane.cloud.cli.federate import command
from triplane.cloud.federation.private_runs import privacy_of
from triplane.cloud.federation.spec import with_defaults
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.cli.privacy import MASKING_FIELDS, NEEDS, NOISE_FIELDS
from triplane.unified_ir.federated.privacy.settings import DifferentialPrivacy

RUN, SIMULATE = command.commands["run"], command.commands["simulate"]
VALUES = {
    "epsilon": "4", "delta": "1e-6", "noise": "central", "noise_multiplier": "1.5", "clip": "0.3",
    "clip_quantile": "0.4", "separation": "5", "correlated": "", "most_uses": "7", "mask": "",
    "least_cohort": "4", "lost_share": "0.2", "colluding_share": "0.05", "mask_failure": "1e-9",
    "groups": "3",
}  # fmt: skip
"""A valid value of every option; empty for a flag."""


def arguments(*names):
    pairs = ((f"--{name.replace('_', '-')}", VALUES[name]) for name in names)
    return [text for pair in pairs for text in pair if text]


def params(verb, *argv):
    more = ["--data", "digits"] if verb is SIMULATE else []
    return verb.make_context("verb", ["m.tpm", *more, *argv]).params


def spec_of(*argv):
    """The request that a command line of `federate run` makes."""
    asked = params(RUN, *argv)
    for name in ("detach", "identity", "as_json"):
        del asked[name]
    return federate._spec(**asked)


def test_the_table_names_every_option():
    assert VALUES.keys() == {*NOISE_FIELDS, *MASKING_FIELDS, "mask"}
    assert NEEDS.keys() == VALUES.keys() - {"epsilon", "noise_multiplier", "mask"}


@pytest.mark.parametrize("verb", [RUN, SIMULATE])
@pytest.mark.parametrize("name", NEEDS)
def test_an_option_without_effect_is_refused(verb, name):
    with pytest.raises(click.UsageError) as refused:
        params(verb, *arguments(name))
    assert "has no effect without" in refused.value.message
    assert f"--{name.replace('_', '-')}" in refused.value.message
    base = ["mask"] if name in MASKING_FIELDS else ["epsilon", "separation"]
    assert params(verb, *arguments(*dict.fromkeys([*base, name])))


@pytest.mark.parametrize("verb", [RUN, SIMULATE])
def test_noise_of_devices_needs_masking(verb):
    with pytest.raises(click.UsageError, match="hides nothing without --mask"):
        params(verb, "--epsilon", "4", "--noise", "distributed")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--epsilon", "0"), "0 is not in the range"),
        (("--epsilon", "1", "--delta", "1"), "not in the range"),
        (("--epsilon", "1", "--clip", "0"), "not in the range"),
        (("--epsilon", "1", "--noise", "edge"), "is not one of"),
        (("--mask", "--least-cohort", "2"), "not in the range"),
    ],
)
@pytest.mark.parametrize("verb", [RUN, SIMULATE])
def test_a_value_that_is_not_valid_is_refused_by_its_option(verb, argv, words):
    with pytest.raises(click.UsageError) as refused:
        params(verb, *argv)
    assert words in " ".join(refused.value.format_message().split())


def test_options_that_were_set_are_in_the_request_and_others_are_the_cloud_s():
    assert not spec_of().HasField("noise")
    assert not spec_of().HasField("masking")
    names = ("epsilon", "delta", "clip", "separation", "correlated", "most_uses")
    asked = spec_of(*arguments(*names))
    made = privacy_of(with_defaults(asked))
    assert made == DifferentialPrivacy(
        epsilon=4.0, delta=1e-6, clip=0.3, separation=5, correlated=True, most_uses=7
    ).resolved(50)
    adaptive = privacy_of(spec_of(*arguments("epsilon", "clip_quantile")))
    assert adaptive is not None
    assert adaptive.quantile == 0.4
    masked = spec_of(*arguments("mask", *MASKING_FIELDS)).masking
    assert masked == pb.MaskedRounds(
        least=4, lost_share=0.2, colluding_share=0.05, failure=1e-9, groups=3
    )


def test_the_time_of_a_step_is_an_option_of_masked_runs():
    assert spec_of("--mask", "--phase-s", "2min").masking == pb.MaskedRounds(phase_s=120.0)
    with pytest.raises(click.UsageError, match="--phase-s has no effect without --mask"):
        spec_of("--phase-s", "60")
    with pytest.raises(click.UsageError, match="above 0"):
        spec_of("--mask", "--phase-s", "0")


def test_help_teaches_what_epsilon_is():
    for verb in (RUN, SIMULATE):
        text = " ".join(CliRunner().invoke(verb, ["--help"]).output.split())
        assert "bounds what the published models tell about one device" in text
        assert all(f"--{name.replace('_', '-')} " in text for name in VALUES)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_digits(tmp_path_factory.mktemp("model"))


def simulated(model, *more):
    argv = [str(model), "--data", "digits", "--population", "9", "--algorithm", "fedavg"]
    return CliRunner().invoke(SIMULATE, [*argv, "--rounds", "2", "--steps", "1", *more])


@pytest.mark.long
def test_a_study_says_what_it_spent_in_its_table_its_json_and_its_page(model, tmp_path):
    page = tmp_path / "o.html"
    said = simulated(model, *arguments("epsilon", "clip"), "--json", "--out", str(page))
    assert said.exit_code == 0, said.output
    (trial,) = json.loads(said.stdout)["trials"]
    assert trial["privacy"]["epsilon"] == pytest.approx(4.0, rel=1e-4)
    assert "epsilon 4 of 4 spent" in said.stderr
    assert "epsilon 4 of 4 spent" in page.read_text()
    table = simulated(model, *arguments("epsilon")).stdout.splitlines()
    assert any(line.startswith("algorithm") and line.endswith("epsilon") for line in table)


@pytest.mark.long
def test_a_masked_study_prints_what_masking_relies_on(model):
    said = simulated(model, "--mask", "--norm-bound", "2")
    assert said.exit_code == 0, said.output
    assert "masking for 9 devices" in said.stderr
    assert "it encrypts nothing" in said.stderr
    for more in ((), ("--norm-bound", "adaptive:2")):
        follows = simulated(model, "--mask", *more)
        assert follows.exit_code == 0, follows.output
    refused = simulated(model, "--mask", "--norm-bound", "off")
    assert "so --mask needs a bound" in str(refused.exception)
    refused = simulated(model, "--norm-bound", "adaptive:2")
    assert "which only masked rounds need" in str(refused.exception)


@pytest.mark.long
def test_a_study_shows_the_groups_of_its_masked_rounds(model, tmp_path):
    page = tmp_path / "o.html"
    masked = ("--mask", "--norm-bound", "2", "--groups", "3")
    said = simulated(model, *masked, "--aggregator", "median", "--out", str(page))
    assert said.exit_code == 0, said.output
    assert "masking for groups of 3 of 9 devices" in said.stderr
    assert "the mean of each of the 3 groups is one input of the aggregator" in said.stderr
    shown = page.read_text()
    assert re.search(r"groups</\w+>\s*<\w+>3<", shown)
    refused = simulated(model, *masked)
    assert "'group-sums' does not compose with the mean of updates" in str(refused.exception)


@pytest.mark.slow
def test_a_limit_that_depends_on_other_devices_does_not_go_with_noise(model):
    said = simulated(model, "--epsilon", "4", "--norm-bound", "2")
    assert "--norm-bound does not go with differential privacy" in str(said.exception)
