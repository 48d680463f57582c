"""The verbs of federated runs against a real cloud with devices that learn."""

import asyncio
import json

import click
import pytest
from click.testing import CliRunner
from tests.cloud.cli.verbs import answer
from tests.cloud.federation.given import devices_of, living, make_home, registered

from triplane.cloud.cli.federate import command
from triplane.cloud.cli.runs import ROUND_HEADINGS, aftermath, changes, round_row, run_text
from triplane.cloud.federation.spec import hyper_of, with_defaults
from triplane.cloud.home import initialize
from triplane.cloud.server import running
from triplane.proto import federation_pb2 as pb
from triplane.proto.hyperparameters import values_of
from triplane.unified_ir.cli.simulate import simulate
from triplane.unified_ir.federated.algorithms import ALGORITHMS
from triplane.unified_ir.federated.algorithms import defaults as algorithm_defaults
from triplane.unified_ir.federated.core import defaults
from triplane.unified_ir.federated.study import Study

DEADLINE_S = 60.0
BEGIN = (
    "run", "tiny", "--population", "labs", "--rounds", "2", "--devices", "2", "--quorum", "1",
    "--steps", "2", "--deadline", "60s", "--patience", "20s",
)  # fmt: skip


async def said(home, *argv):
    """(exit code, what was printed) of a verb."""
    found = await asyncio.to_thread(
        CliRunner().invoke, command, [*argv, "--identity", str(home.operator)]
    )
    return found.exit_code, found.output


@pytest.mark.slow
def test_a_run_is_begun_followed_listed_and_shown(tmp_path):
    home = make_home(tmp_path)

    async def story():
        async with asyncio.timeout(DEADLINE_S), running(home) as cloud:
            await registered(cloud, tmp_path)
            async with living(await devices_of(cloud, tmp_path, ("ann", "bob"))):
                followed = await said(home, *BEGIN)
            listed = await said(home, "ls")
            shown = await said(home, "show")
            record = await said(home, "show", "--json")
            again = await said(home, "stop")
            return followed, listed, shown, record, again

    followed, listed, shown, record, again = asyncio.run(story())
    assert followed[0] == 0, followed
    assert "round 1  2 of 2" in followed[1]
    assert "result tiny@2" in followed[1]
    assert "triplane deploy tiny@2" in followed[1]
    assert "fedavg" in listed[1]
    assert "ann" in shown[1]
    run = json.loads(record[1])
    assert (run["phase"], run["result"], len(run["rounds"])) == ("done", "tiny@2", 3)
    assert run["spec"]["hyperparameters"]["inner_steps"] == 3
    assert again[0] != 0


@pytest.mark.slow
def test_a_stopped_run_says_how_it_goes_on_and_does(tmp_path):
    home = make_home(tmp_path)

    async def story():
        async with asyncio.timeout(DEADLINE_S), running(home) as cloud:
            await registered(cloud, tmp_path)
            begun = await said(home, *BEGIN, "--detach")
            run_id = (await cloud.federation.runs())[0].id
            stopped = await said(home, "stop", run_id, "--reason", "a holiday")
            followed = await said(home, "watch", run_id)
            resumed = await said(home, "resume", run_id[:6])
            async with living(await devices_of(cloud, tmp_path, ("ann", "bob"))):
                return begun, stopped, followed, resumed, await said(home, "watch")

    begun, stopped, followed, resumed, last = asyncio.run(story())
    assert begun[0] == 0
    assert "triplane federate watch" in begun[1]
    assert "a holiday" in stopped[1]
    assert followed[0] == 4
    assert "triplane federate resume" in followed[1]
    assert resumed[0] == 0
    assert last[0] == 0, last


def test_a_round_is_told_once():
    def run(*rounds):
        return pb.Run(id="0" * 16, phase=pb.Run.COLLECTING, rounds=rounds)

    first = pb.Round(number=1, asked=2, counted=2, opened_s=1.0, closed_s=2.0, loss=0.5)
    second = pb.Round(number=2, asked=2, counted=1, opened_s=2.0)
    assert len(changes(None, run(first))) == 2
    assert changes(run(first), run(first, second)) == []


def test_a_round_tells_why_devices_did_not_count_and_show_names_each():
    first = pb.Run(
        id="0" * 16, phase=pb.Run.COLLECTING,
        members=[pb.Member(device="ann", dropped=1, reason="the round's deadline passed")],
    )  # fmt: skip
    closed = pb.Round(number=1, asked=6, refused=5, opened_s=1.0, closed_s=2.0)
    names = ("bob", "cleo", "dan", "eve", "fay")
    members = [pb.Member(device=name, dropped=1, reason=f"no {name}\x1b[2J") for name in names]
    second = pb.Run(
        id="0" * 16, phase=pb.Run.COLLECTING, rounds=[closed], members=[*first.members, *members]
    )
    told = changes(first, second)
    assert told[1:4] == [f"    {name}: no {name}?[2J" for name in names[:3]]
    assert "2 more devices" in told[4]
    assert "ann" not in "".join(told)
    third = pb.Run(id="0" * 16, phase=pb.Run.COLLECTING, rounds=[closed], members=members)
    third.rounds.add(number=2, asked=6, refused=5, opened_s=2.0, closed_s=3.0)
    assert len(changes(second, third)) == 1  # the same reasons again
    assert all(f"no {name}?" in run_text(second) for name in names)


def test_show_tells_what_each_device_declined_how_often_and_what_rounds_gave_down():
    why = [pb.Dropped(reason="no power", count=1), pb.Dropped(reason="too hot", count=4)]
    member = pb.Member(device="ann", counted=2, dropped=5, declined=4, why=why)
    run = pb.Run(id="0" * 16, phase=pb.Run.COLLECTING, members=[member])
    run.rounds.add(number=1, asked=1, counted=1, opened_s=1.0, closed_s=2.0, bytes_down=3 << 20)
    shown = run_text(run)
    assert "5, 4 declined" in shown
    assert "4 x too hot; 1 x no power" in shown
    assert round_row(run.rounds[0])[ROUND_HEADINGS.index("DOWN")] in shown
    assert round_row(run.rounds[0])[ROUND_HEADINGS.index("DOWN")].startswith("3")


def test_a_result_that_is_not_signed_says_sign_first():
    done = pb.Run(phase=pb.Run.DONE, result="digits@2")
    assert "triplane sign digits@2" in aftermath(done)[0]
    done.spec.release = "auto"
    assert "sign" not in aftermath(done)[0]


@pytest.mark.parametrize(("loss", "text"), [(0.31221, "0.3122"), (1e300, "1.00e+300"), (0.0, "")])
def test_a_loss_that_a_device_made_up_or_masked_does_not_break_the_table(loss, text):
    found = pb.Round(number=1, asked=2, counted=2, opened_s=1.0, closed_s=2.0, loss=loss)
    assert round_row(found)[ROUND_HEADINGS.index("LOSS")] == text


@pytest.mark.parametrize("option", ["--rounds", "--seed", "--devices", "--steps", "--inner-steps"])
def test_a_number_wider_than_its_field_is_a_wrong_option(option):
    argv = ["run", "tiny", option, str(1 << 65), "--identity", "."]
    done = CliRunner().invoke(command, argv)
    assert done.exit_code == 2
    assert f"'{option}'" in done.output
    assert "is not in the range" in done.output


@pytest.mark.parametrize(
    "zero",
    [
        "--rounds", "--devices", "--quorum", "--deadline", "--patience", "--steps",
        "--batch-size", "--support", "--query", "--lr", "--meta-lr", "--inner-steps",
        "--proximal", "--server-lr", "--keep",
    ],
)  # fmt: skip
def test_a_zero_that_would_mean_the_default_is_refused_by_its_option(zero):
    found = CliRunner().invoke(command, ["run", "tiny", zero, "0"])
    assert found.exit_code == 2
    assert f"Invalid value for '{zero}'" in found.output


@pytest.mark.parametrize(
    ("verb", "decay"),
    [
        (command.commands["run"], "0<x<1"),  # 0 in this field of the wire stands for the default
        (simulate, "0<=x<1"),
    ],
    ids=["run", "simulate"],
)
def test_the_range_of_a_hyperparameter_is_that_of_its_row(verb, decay):
    text = " ".join(CliRunner().invoke(verb, ["--help"]).output.split())
    assert f"first moment on the cloud. [default: 0.9] [{decay}]" in text
    assert "Steps of an adaptation. [default: 3] [1<=x<=10]" in text
    assert "root of the second moment. [default: 0.001] [x>0]" in text
    for option, value in (("--beta2", "1"), ("--inner-steps", "11"), ("--floor", "0")):
        done = CliRunner().invoke(verb, ["tiny.tpm", option, value])
        assert done.exit_code == 2
        assert f"'{option}': {float(value):g}" in done.output.replace(".0 ", " ")


def test_a_run_and_a_study_have_one_set_of_defaults():
    for name, row in ALGORITHMS.items():
        spec = with_defaults(pb.Spec(model="tiny", algorithm=name))
        study = Study(algorithm=name, rounds=defaults.ROUNDS)
        assert hyper_of(spec) == algorithm_defaults(name)
        assert spec.rounds == study.rounds == option_of(simulate, "rounds").default
        for field in ("steps", "batch_size", "support", "query"):
            told = getattr(spec.sampling, field)
            assert told == getattr(study, field) == option_of(simulate, field).default, field
        numbers = values_of(spec.hyperparameters)
        for number in row.hyper:
            assert numbers.get(number.name, 0) == number.default
            for verb in (simulate, command.commands["run"]):
                assert f"{number.default:g}" in option_of(verb, number.name).help
    packed = with_defaults(pb.Spec(model="tiny", compression="top-k"))
    assert packed.keep == option_of(simulate, "keep").default


def option_of(verb, name):
    params = verb.get_params(click.Context(verb))
    return next(p for p in params if p.name == name)


def test_a_device_that_waits_is_told_of_at_once_and_shown_until_it_goes_on():
    first, second = (pb.Run(id="0" * 16, phase=pb.Run.COLLECTING) for _ in range(2))
    first.members.add(device="ann", counted=2)
    second.members.add(device="ann", counted=2, waits="the disk is full\x1b[2J")
    assert changes(first, second) == ["    ann: waits: the disk is full?[2J"]
    assert changes(second, second) == []
    assert "waits: the disk is full?[2J" in run_text(second)
    assert "waits" not in run_text(first)


@pytest.mark.long
def test_a_waiting_run_is_signed_and_the_policy_for_plans_set_shown_and_taken_back(tmp_path):
    home = initialize(tmp_path / "home", offline_keys=tmp_path / "keys").home
    asked = ("--identity", home.operator)
    keys = ("--keys", tmp_path / "keys")

    async def verb(*argv, **options):
        return await asyncio.to_thread(answer, *argv, *asked, **options)

    async def story():
        async with asyncio.timeout(DEADLINE_S), running(home) as cloud:
            await registered(cloud, tmp_path)
            await said(home, *BEGIN, "--detach")
            moved = cloud.federation.moved
            while "waits for a signature" not in (run := await verb("federate", "show"))["reason"]:
                await moved.wait()
                moved = cloud.federation.moved
            assert f"triplane federate sign {run['id']} --keys DIR" in run["reason"]
            signed = await verb("federate", "sign", run["id"], *keys, "--least-batch", "3")
            assert signed["published"]
            assert signed["path"] == f"plans/{signed['content_digest']}.plan"
            assert (signed["least_devices"], signed["least_batch"]) == (2, 3)
            assert signed["least_steps"] == 2
            assert signed["tensors"] == ["0.bias", "0.weight", "2.bias", "2.weight"]
            wrong = await verb(
                "federate", "sign", run["id"], *keys, "--model-digest", "0" * 64, code=5
            )
            assert "as you expect" in str(wrong)
            withdrawn = await verb("federate", "unsign", run["id"], *keys)
            (plan,) = withdrawn["plans"]
            assert plan["content_digest"] == signed["content_digest"]
            missing = await verb(
                "federate", "unsign", plan["content_digest"].upper(), *keys, code=2
            )
            assert "no such plan is signed by people (signed: none)" in str(missing)
            await verb("cloud", "policy", "set-plans", "tiny", "--algorithm", "fed*", *keys)
            shown = (await verb("cloud", "policy", "show"))["plans"]
            await verb("cloud", "policy", "remove-plans", "tiny", *keys)
            return shown, (await verb("cloud", "policy", "show"))["plans"]

    shown, removed = asyncio.run(story())
    assert shown == {
        "tiny": {
            "algorithms": ["fed*"],
            "tensors": ["0.bias", "0.weight", "2.bias", "2.weight", "rate.*", "scaffold.*"],
            "least_devices": 2,
            "least_batch": 2,
            "least_steps": 1,
        }
    }
    assert removed == {}
