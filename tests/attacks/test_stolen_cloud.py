"""What a stolen cloud can do to a real node over the real wire, and what the node says to it.

One node, one thief, one attack after the other; after each of them the version that was committed
before answers as it did, to the bit. In the end the cloud is taken back, and obeyed.
"""

import io
import platform

import numpy as np
import pytest
from tests.attacks.cases import Case
from tests.attacks.stolen_cloud import (
    MODEL,
    TARGET,
    WAIT_S,
    Lab,
    StolenCloud,
    X,
    deployed,
    enrolled_node,
    honest_cloud,
)
from tests.attacks.thefts import (
    RELEASED,
    assigned,
    by_auto,
    custom_op,
    deflated,
    endless,
    endless_metadata,
    fast_forward,
    flipped,
    frozen,
    longer,
    member_outside,
    mixed,
    never_ending,
    one_of_two,
    outside,
    released_as,
    rolled_back,
    sent,
    silent,
    told,
    trickling,
    unfolding,
    unknown_key,
    wrong_answers,
)
from tests.attacks.trust_stage import load, serve
from tests.cloud.released import make_released
from tests.conftest import living

from triplane.cloud.trust.keys import KeyFolder
from triplane.cloud.trust.signing import replace_keys
from triplane.proto import fleet_pb2 as pb
from triplane.proto.targets import Rule
from triplane.unified_ir.runtime import Bundle

pytestmark = pytest.mark.slow

GOLDEN = "golden/digits.npz"
POLICY = {
    MODEL: Rule(share=1.0, golden=GOLDEN, metric="accuracy", floor=0.9),
    "letters": Rule(share=0.0, golden=GOLDEN, metric="accuracy", floor=0.9),
}
LONG_S = 240.0
ENDED = (pb.FAILED, pb.RETURNED)
FOREIGN = "sve" if platform.machine() in {"x86_64", "AMD64"} else "avx2"


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Node and thief outlive single tests; `lab` counts at the end of the module."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Node-a serves digits@1, committed honestly; then the thief takes the cloud's place."""
    before = living()
    folder = tmp_path_factory.mktemp("s")
    two = {"keys": {"release": 2}, "thresholds": {"release": 2}}
    made = Lab(make_released(folder, **two))
    bundles = {}
    with honest_cloud(made.home) as (cloud, do):
        for version in (1, 2):
            found = do(cloud.registry.version(f"{MODEL}@{version}")).bundles[0]
            bundles[version] = cloud.blobs.find(found.blob)
        made.first, made.second = (Bundle.load(bundles[v]) for v in (1, 2))
        made.ports = {"port": cloud.port, "enrol_port": cloud.enrol_port}
        made.node = enrolled_node(cloud, do, folder)
        try:
            deployed(cloud, do, made.node, f"{MODEL}@1")
        except BaseException:
            made.node.stop()
            raise
    made.stage = made.reopened()
    made.add(bundles[2].read_bytes())
    made.allow(POLICY, {GOLDEN: labelled(made.first)})
    made.answers = made.node.answers()
    try:
        yield made
    finally:
        made.node.stop()
    assert not {left for left in living() - before if left.startswith("process")}


@pytest.fixture(scope="module")
def thief(lab):
    with StolenCloud(lab.home, lab.ports["port"], lab.stage, lab.files) as stolen:
        yield stolen


def labelled(bundle):
    """Samples that this bundle gets all right."""
    file = io.BytesIO()
    np.savez(file, x=X, y=bundle.predict(x=X)["logits"].argmax(1))
    return file.getvalue()


TRUST, POLICIES = "proto/signed/trust.py", "proto/signed/policy.py"
TRIAL, ATTEMPT = "edge/agent/trial.py", "edge/agent/attempt.py"
TRANSFER, SESSION = "proto/transfer.py", "unified_ir/runtime/session.py"
BLOBS = "proto/blobs.py"
CRAWL = "the other side sent ... bytes in ... s; at least 16384 bytes/s are required"
ABSENT = f"release/{MODEL}@99+{TARGET}.bundle"
ODD = f"release/../../{MODEL}@2+{TARGET}.bundle"
# fmt: off
CASES = [
    Case("flipped byte", "one bit of a signed bundle is flipped in transit", BLOBS,
         f"{RELEASED}: blob ...: the bytes received have the digest ...; they were dropped",
         sent(flipped), "digest"),
    Case("unknown key", "a release signed by a key that no role names", TRUST,
         "release.json (version ...) has 0 valid signatures of 2 that the role release needs; "
         "it is signed by key ids ...", unknown_key, "signature"),
    Case("missing threshold", "a release signed by one of two people", TRUST,
         "release.json (version ...) has 1 valid signatures of 2 that the role release needs",
         one_of_two, "threshold"),
    Case("rollback", "metadata older than the node's", TRUST,
         "timestamp.json says version 1, older than what was verified before",
         rolled_back, "rollback"),
    Case("freeze", "metadata that was not signed again for a day", TRUST,
         "timestamp ... expired ...; here it is ... UTC", frozen, "freeze"),
    Case("mix-and-match", "an old snapshot under a new timestamp", TRUST,
         "snapshot.json is genuine (version ...), but not the file that verified metadata names "
         "(version ...)", mixed, "mix-and-match"),
    Case("fast-forward", "a version number so high that none can follow", TRUST,
         "timestamp: timestamp jumps from version ... to 2000000000; at most 1000000 are "
         "allowed, so that a stolen key cannot use the numbers up", fast_forward, "fast-forward"),
    Case("endless data", "a metadata file of 5 MiB", TRUST,
         "timestamp.json is larger than any message may be", endless_metadata, "endless-data"),
    Case("endless data", "a bundle that never ends", TRANSFER,
         f"{RELEASED}: ... bytes are signed; the other side sends ... more after ...",
         sent(endless), "length"),
    Case("endless data", "a bundle announced as a terabyte", TRANSFER,
         f"{RELEASED}: the other side says the blob has {1 << 40} bytes, but ... are signed",
         sent(longer), "length"),
    Case("slow retrieval", "single bytes", TRANSFER, CRAWL, sent(trickling), "slow-retrieval"),
    Case("slow retrieval", "100 bytes, then nothing", TRANSFER, CRAWL,
         sent(silent), "slow-retrieval"),
    Case("wrong hardware", "a bundle that people signed for another target", ATTEMPT,
         f"release/{MODEL}@3+ort-arm32.bundle is made for ort-arm32, this node takes ...",
         released_as(3, target="ort-arm32"), "hardware"),
    Case("wrong hardware", "a bundle that needs instructions this processor lacks", TRIAL,
         f"the bundle of {MODEL} version 4 for {TARGET} needs the instructions ..., which the "
         "node's processor lacks", released_as(4, instructions=(FOREIGN,)), "hardware"),
    Case("wrong hardware", "a bundle of an opset that this runtime does not know", TRIAL,
         "needs opset 99, the node's runtime knows opsets to ...",
         released_as(5, opset=99), "hardware"),
    Case("wrong hardware", "a bundle for a newer runtime", TRIAL,
         "needs onnxruntime 99.1, the node has ...",
         released_as(6, min_version="99.1"), "hardware"),
    Case("wrong hardware", "a bundle that needs a petabyte of memory", TRIAL,
         f"needs {1 << 50} bytes of memory, the node has ...",
         released_as(9, memory_bytes=1 << 50), "hardware"),
    Case("stolen `auto` key", "a version below the floor that people set", POLICIES,
         f"accuracy 0... on {GOLDEN} is below the policy's floor 0.9000", by_auto, "metric"),
    Case("stolen `auto` key", "a version whose answers differ from its goldens", TRIAL,
         "output 'logits' is off by ..., allowed ...", wrong_answers, "golden"),
    Case("stolen `auto` key", "a model that no policy lists", POLICIES,
         "the release policy has no rule for model 'faces' (listed: digits, letters)",
         told(f"auto/faces@1+{TARGET}.bundle", "faces", 1), "policy"),
    Case("stolen `auto` key", "a node outside of the share", POLICIES,
         "node 'node-a' is outside the 0.00% of nodes that the release policy lets take "
         "unreleased versions of 'letters'",
         told(f"auto/letters@1+{TARGET}.bundle", "letters", 1), "share"),
    Case("stolen `auto` key", "a version that is no newer than the committed one", POLICIES,
         "version 1 is not above the committed version 1; only signers may send a node back",
         told(f"auto/{MODEL}@1+{TARGET}.bundle", MODEL, 1), "floor"),
    Case("stolen `auto` key", "used in place of the release key", TRUST,
         f"{ABSENT} is not listed by the role release (version ...)",
         told(ABSENT, MODEL, 99), "unknown-target"),
    Case("path traversal", "a model's name in the cloud's document", "proto/documents.py",
         "document ... is ignored: a model's name matches ..., got '../../x'",
         told(RELEASED, "../../x", 2), "document"),
    Case("path traversal", "the path of a target", "proto/targets.py",
         "a bundle's target path is ROLE/MODEL@VERSION+TARGET.bundle with role release or auto, "
         f"got '{ODD}'", told(ODD, MODEL, 2), "wrong-target"),
    Case("path traversal", "the name of a bundle's member", "unified_ir/files/manifest.py",
         "manifest: part name '../../etc/cron.d/job' must match ...", member_outside, "load"),
    Case("path traversal", "weights in a file of the node, by a relative path", SESSION,
         "onnxruntime ... refused the model: ...xternal data...",
         outside("../../../../../../etc/passwd"), "load"),
    Case("path traversal", "weights in a file of the node, by an absolute path", SESSION,
         "onnxruntime ... refused the model: ...xternal data...",
         outside("/etc/passwd"), "load"),
    Case("zip bomb", "a bundle with a compressed member", "unified_ir/files/container.py",
         "manifest: its bytes or its header are damaged", deflated, "load"),
    Case("zip bomb", "a graph of a few bytes that needs a terabyte of memory", TRIAL,
         "part 'goldens.safetensors': the graph failed on these values: ...", unfolding, "golden"),
    Case("zip bomb", "a graph that never ends", "edge/agent/trying.py",
         "the trial ...", never_ending, "load"),
    Case("custom-op library", "a graph with an operator of a foreign domain", SESSION,
         "onnxruntime ... refused the model: ...evil.ops...", custom_op, "load"),
    Case("another model", "a bundle of one model under the name of another", ATTEMPT,
         f"{MODEL}@1 is assigned, but the target is release/letters@1+{TARGET}.bundle",
         released_as(1, model="letters"), "wrong-target"),
]
# fmt: on


# It is ended after a minute of processor time, which is more than a minute of a busy machine.
LONG = [case for case in CASES if case.do is never_ending]
CAMPAIGN = [pytest.param(c, marks=pytest.mark.deep) if c in LONG else c for c in CASES]


@pytest.mark.parametrize("case", CAMPAIGN, ids=lambda case: case.id)
def test_a_stolen_cloud_is_refused_by_name_and_what_served_before_serves(lab, thief, case):
    asked = case.do(lab)
    thief.manner = lab.manner
    thief.tell(asked)
    try:
        wait_s = LONG_S if case in LONG else WAIT_S
        incident = thief.hear(lambda report: incident_of(report, case), case.id, wait_s)
        if incident.kind != "document":
            case.check(thief.hear(lambda report: row_of(report, asked), case.id).reason)
        still_serves(lab)
    finally:
        lab.be_honest()
        thief.manner = lab.manner
        thief.reports.clear()


def incident_of(report, case):
    """The incident in a report that says what the row says."""
    alike = (i for i in report.incidents if i.kind == case.kind)
    return next((i for i in alike if case.says(i.text)), None)


def row_of(report, asked):
    """What a report says of an attempt once it has ended or waits; None before."""
    for row in report.models:
        if (row.model, row.attempt) == (asked.model, asked.attempt) and (
            row.state in ENDED or row.reason.startswith("waits: ")
        ):
            return row
    return None


def still_serves(lab):
    version, logits = lab.node.answers()
    assert version == "1"
    np.testing.assert_array_equal(logits, lab.answers[1])
    assert lab.node.committed(MODEL) == 1


def test_a_cloud_that_is_taken_back_is_obeyed_again(lab, thief):
    """Fast-forward recovery: the thief used up what numbers he could; new keys make them void."""
    snapshot, timestamp = load(lab.stage, "snapshot"), load(lab.stage, "timestamp")
    snapshot.signed.version += 900_000
    timestamp.signed.version += 900_000
    serve(lab.stage, snapshot, timestamp)
    asked = assigned(f"release/{MODEL}@77+{TARGET}.bundle", version=77)
    thief.tell(asked)
    said = thief.hear(lambda report: row_of(report, asked), "the thief's stamp").reason
    assert "is not listed by the role release" in said, "the stamp itself is believed"
    lab.be_honest()
    thief.stop()
    names = ("snapshot", "timestamp")
    keys = {role: [KeyFolder(lab.stage.online).make(f"{role}-9").public_key] for role in names}
    assert replace_keys(lab.stage.repository, keys, lab.stage.offline).submitted.published
    still_serves(lab)
    with honest_cloud(lab.home, **lab.ports) as (cloud, do):
        deployed(cloud, do, lab.node, f"{MODEL}@2")
        assert lab.node.answers()[0] == "2"
