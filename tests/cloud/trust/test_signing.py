"""Signing where the keys are, against a cloud that may lie. Conversions are real, in children."""

import hashlib
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from tests.attacks.trust_stage import Stage, bundle_entry, load, newest, signed_by, stage
from tests.quantize import nets
from tuf.api._payload import Targets
from tuf.api.metadata import Metadata

from triplane.cloud.trust.keys import KeyFolder
from triplane.cloud.trust.repeating import GOLDENS, differences
from triplane.cloud.trust.repository import Pending
from triplane.cloud.trust.roles import moment
from triplane.cloud.trust.signing import renew, replace_keys, sign_policy, sign_release
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound
from triplane.proto.registry_pb2 import Bundle, Recipe, Version
from triplane.proto.signed.refusal import AttemptRefused
from triplane.proto.targets import Policy, Rule
from triplane.unified_ir.convert import convert
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.runtime import Bundle as Loaded
from triplane.unified_ir.runtime import BundleSpec, write_bundle

pytestmark = pytest.mark.slow

PATH = "release/digits@1+ort-x64.bundle"
RULE = Rule(share=0.5, golden="golden/digits", metric="accuracy", floor=0.9)


@dataclass
class Cloud:
    """The repository of a stage, with versions and bundles beside it."""

    stage: Stage
    files: dict[bytes, Path] = field(default_factory=dict)
    versions: dict[str, Version] = field(default_factory=dict)
    bundles: dict[tuple[str, str], Bundle] = field(default_factory=dict)
    queued: Pending | None = None

    def get(self, name):
        return self.stage.fetch(name)

    def pending(self, role):
        return self.queued or self.stage.repository.pending(role)

    def submit(self, role, data, *auto):
        return self.stage.repository.submit(role, data)

    def version(self, reference):
        return self.versions[reference]

    def bundle(self, reference, target):
        return self.bundles[reference, target]

    def blob(self, sha256, size):
        found = self.files[sha256]
        assert size in {None, found.stat().st_size}
        return found

    def keep(self, path: Path) -> bytes:
        digest = hashlib.sha256(path.read_bytes()).digest()
        self.files[digest] = path
        return digest

    def push(self, model: Path, bundle: Path, number=1):
        reference = f"digits@{number}"
        self.versions[reference] = Version(
            model="digits",
            version=number,
            model_digest=bytes.fromhex(Container(model, kind="model").digest),
            blob=self.keep(model),
            size=model.stat().st_size,
            recipe=Recipe(entry="predict"),
        )
        self.bundles[reference, "ort-x64"] = Bundle(
            state=Bundle.READY, blob=self.keep(bundle), size=bundle.stat().st_size
        )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(model file, its bundle as version 1 and 2)."""
    folder = tmp_path_factory.mktemp("made")
    module, _, _ = nets.digits()
    model = folder / "digits.tpm"
    module.save(model)
    bundles = [folder / f"{version}.bundle" for version in (1, 2)]
    for version, out in enumerate(bundles, start=1):
        convert(model, "ort-x64", name="digits", version=str(version), out=out)
    return model, *bundles


@pytest.fixture
def cloud(tmp_path, made):
    found = Cloud(stage(tmp_path / "stage"))
    found.push(made[0], made[1])
    return found


@pytest.fixture
def two(tmp_path, made):
    """Two signers, each with a folder of their own key and the root."""
    found = Cloud(stage(tmp_path / "stage", keys={"release": 2}, thresholds={"release": 2}))
    found.push(made[0], made[1])
    found.push(made[0], made[2], 2)
    for name in ("release-1", "release-2"):
        folder = tmp_path / name
        folder.mkdir()
        for file in ("root.json", f"{name}.pem"):
            shutil.copy(found.stage.offline / file, folder)
    return found


def test_a_repeated_conversion_is_signed_and_nodes_accept_it(cloud, made):
    told: list[str] = []
    signed = sign_release(
        cloud, "digits@1", "ort-x64", cloud.stage.offline, progress=told.append,
        model_digest=cloud.versions["digits@1"].model_digest,
    )  # fmt: skip
    assert (signed.submitted.published, signed.submitted.version) == (True, 2)
    assert any("repeating the conversion" in text for text in told)
    node = cloud.stage.node()
    assert node.refresh().is_fresh
    target = node.target(PATH)
    data = made[1].read_bytes()
    assert (target.length, target.sha256) == (len(data), hashlib.sha256(data).digest())
    assert target.custom["content_digest"] == Loaded.load(made[1]).content_digest
    assert target.custom["model_digest"] == Container(made[0], kind="model").digest
    again = sign_release(cloud, "digits@1", "ort-x64", cloud.stage.offline)
    assert (again.submitted.published, again.submitted.version) == (True, 2)
    assert newest(cloud.stage, "release") == 2


class Together(Cloud):
    """Holds the first submissions until everybody has one: all of them are for the same version."""

    def __init__(self, stage, signers):
        super().__init__(stage)
        self.conversions = []
        self._barrier = threading.Barrier(signers)
        self._held = set()

    def submit(self, role, data, *auto):
        if threading.get_ident() not in self._held:
            self._held.add(threading.get_ident())
            self._barrier.wait(120)
        return super().submit(role, data)

    def blob(self, sha256, size):
        self.conversions.append(sha256)
        return super().blob(sha256, size)


def test_people_who_sign_other_versions_at_the_same_time_all_succeed(made, tmp_path):
    cloud = Together(stage(tmp_path / "stage"), 3)
    third = tmp_path / "3.bundle"
    convert(made[0], "ort-x64", name="digits", version="3", out=third)
    for number, bundle in enumerate((*made[1:], third), start=1):
        cloud.push(made[0], bundle, number)
    with ThreadPoolExecutor(3) as pool:
        signing = [
            pool.submit(sign_release, cloud, f"digits@{n}", "ort-x64", cloud.stage.offline)
            for n in (1, 2, 3)
        ]
        signed = [future.result() for future in signing]
    assert all(one.submitted.published for one in signed)
    assert sorted(one.submitted.version for one in signed) == [2, 3, 4]
    listed = load(cloud.stage, "release").signed.targets
    assert {*listed} == {PATH.replace("@1", f"@{n}") for n in (1, 2, 3)}
    assert len(cloud.conversions) == 6, "each model file and each bundle was fetched once"


def copied(source: Path, part="weights.safetensors", prefix=""):
    """Tensors of a bundle, to be changed."""
    tensors = Container(source, kind="bundle").tensors(part)
    return {
        name.removeprefix(prefix): np.array(tensor.data)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def changed(source: Path, out: Path, **fields) -> Path:
    """The bundle with other parts, well-formed."""
    bundle = Loaded.load(source)
    parts = {
        "description": bundle.description,
        "model": bundle.model,
        "weights": dict(bundle.weights),
        "golden_inputs": copied(source, GOLDENS, "input."),
        "golden_outputs": copied(source, GOLDENS, "output."),
        "report": bundle.report,
    }
    write_bundle(out, BundleSpec(**parts | fields))
    return out


def test_a_bundle_with_other_weights_is_not_signed_and_the_part_is_named(cloud, made, tmp_path):
    weights = copied(made[1])
    first = next(iter(weights))
    weights[first].flat[0] += 1
    forged = changed(made[1], tmp_path / "forged.bundle", weights=weights)
    cloud.push(made[0], forged)
    with pytest.raises(Conflict, match=r"model and the recipe give here \(weights\.safetensors: "):
        sign_release(cloud, "digits@1", "ort-x64", cloud.stage.offline)
    assert newest(cloud.stage, "release") == 1


def test_other_golden_bits_name_the_kind_of_processor(cloud, made, tmp_path):
    outputs = copied(made[1], GOLDENS, "output.")
    for y in outputs.values():
        y.flat[0] += 1e-6
    cloud.push(made[0], changed(made[1], tmp_path / "f.bundle", golden_outputs=outputs))
    with pytest.raises(
        Conflict, match=r"only the golden outputs differ .* on a machine of the kind"
    ):
        sign_release(cloud, "digits@1", "ort-x64", cloud.stage.offline)


def test_other_measured_figures_are_no_difference(made, tmp_path):
    other = changed(made[1], tmp_path / "f.bundle", report={"latency": 1})
    manifests = [Container(path, kind="bundle").manifest for path in (made[1], other)]
    assert manifests[0] != manifests[1]
    assert differences(*manifests) == {}


def test_a_bundle_of_another_name_or_model_is_refused(cloud, made, tmp_path):
    cloud.push(made[0], made[2])
    with pytest.raises(Corrupt, match=r"the bundle says digits@2\+ort-x64, expected release/dig"):
        sign_release(cloud, "digits@1", "ort-x64", cloud.stage.offline)
    module, _, _ = nets.digits()
    module.meta["note"] = "another file"
    other = tmp_path / "other.tpm"
    type(module)(module.functions, module.entries, module.state, {"note": "another"}).save(other)
    cloud.push(other, made[1])
    with pytest.raises(Corrupt, match="says it was made of the model file"):
        sign_release(cloud, "digits@1", "ort-x64", cloud.stage.offline)


def test_another_model_file_than_the_signer_knows_is_refused(cloud):
    with pytest.raises(Corrupt, match="not 010101010101 as you expect"):
        sign_release(cloud, "digits@1", "ort-x64", cloud.stage.offline, model_digest=b"\1" * 32)


def test_two_people_sign_and_the_second_repeats_what_the_first_signed(two, tmp_path):
    first = sign_release(two, "digits@1", "ort-x64", tmp_path / "release-1")
    assert (first.submitted.published, first.submitted.signatures) == (False, 1)
    second = sign_release(two, "digits@2", "ort-x64", tmp_path / "release-2")
    assert {target.name.version for target in second.targets} == {1, 2}
    assert not second.submitted.published, "the first has not signed version 2"
    third = sign_release(two, "digits@2", "ort-x64", tmp_path / "release-1")
    assert third.submitted.published
    node = two.stage.node()
    assert node.refresh().is_fresh
    assert node.target(PATH).name.version == 1
    assert node.target(PATH.replace("@1", "@2")).name.version == 2


def test_what_a_stolen_cloud_put_in_the_queue_is_not_signed_along(two, made, tmp_path):
    """One stolen release key starts a version with a bundle that no conversion gives."""
    weights = copied(made[2])
    next(iter(weights.values())).flat[0] += 1
    evil = changed(made[2], tmp_path / "evil.bundle", weights=weights)
    two.push(made[0], evil, 2)
    path = PATH.replace("@1", "@2")
    queued = two.stage.next_targets("release", [bundle_entry(path, evil.read_bytes())])
    two.submit("release", signed_by(two.stage.offline, queued, "release-1").to_bytes())
    with pytest.raises(Conflict, match=r"digits@2\+ort-x64\.bundle is not signed"):
        sign_release(two, "digits@1", "ort-x64", tmp_path / "release-2")
    assert newest(two.stage, "release") == 1


def test_a_queue_with_other_digests_than_its_bundle_is_not_signed(two, tmp_path):
    queued = two.stage.next_targets("release", [bundle_entry(PATH, b"other bytes")])
    two.submit("release", signed_by(two.stage.offline, queued, "release-1").to_bytes())
    with pytest.raises(Corrupt, match="waits in the cloud with other digests"):
        sign_release(two, "digits@1", "ort-x64", tmp_path / "release-2")


def test_a_queue_that_no_signer_began_is_ignored(cloud):
    """The cloud offers as pending what only itself wrote."""
    evil = "release/digits@9+ort-x64.bundle"
    forged = signed_by(cloud.stage.online, cloud.stage.next_targets("release"), "auto")
    forged.signed.targets = {evil: bundle_entry(evil)}
    cloud.queued = Pending(forged.to_bytes(), published=False, signatures=1, threshold=1)
    signed = sign_release(cloud, "digits@1", "ort-x64", cloud.stage.offline)
    assert signed.submitted.published
    assert set(load(cloud.stage, "release").signed.targets) == {PATH}


def test_what_a_replaced_key_had_signed_is_not_carried_on(cloud):
    """The old release key was stolen and used; then people gave the role another."""
    evil = "release/digits@9+ort-x64.bundle"
    cloud.stage.release(bundle_entry(evil))
    made = cloud.stage.next_targets("targets")
    (old,) = made.signed.get_delegated_role("release").keyids
    made.signed.revoke_key(old, "release")
    key = KeyFolder(cloud.stage.offline).make("release-2").public_key
    made.signed.add_key(key, "release")
    cloud.submit("targets", signed_by(cloud.stage.offline, made, "targets").to_bytes())
    with pytest.raises(Conflict, match="nothing that release lists is signed by its present keys"):
        renew(cloud, "release", cloud.stage.offline)
    assert sign_release(cloud, "digits@1", "ort-x64", cloud.stage.offline).submitted.published
    assert set(load(cloud.stage, "release").signed.targets) == {PATH}


def test_a_cloud_with_another_root_gets_no_signature(cloud, tmp_path):
    """A whole other repository, of the same shape, behind the same address."""
    stranger = stage(tmp_path / "stranger")
    cloud.stage.repository = stranger.repository
    with pytest.raises(Corrupt, match=r"of another cloud.*timestamp\.json is not signed"):
        sign_release(cloud, "digits@1", "ort-x64", cloud.stage.offline)


def test_a_folder_without_the_key_or_the_root_says_so(cloud, tmp_path):
    with pytest.raises(NotFound, match=r"root\.json is missing; copy it from where"):
        sign_release(cloud, "digits@1", "ort-x64", tmp_path)
    shutil.copy(cloud.stage.offline / "root.json", tmp_path)
    with pytest.raises(NotFound, match="has no key of the role release"):
        sign_release(cloud, "digits@1", "ort-x64", tmp_path)


def test_a_policy_is_signed_with_its_golden_set(cloud, tmp_path):
    golden = tmp_path / "golden.npz"
    golden.write_bytes(b"samples")
    policy = Policy({"digits": RULE})
    with pytest.raises(NotFound, match=r"golden sets that are not listed"):
        sign_policy(cloud, policy, cloud.stage.offline)
    done = sign_policy(cloud, policy, cloud.stage.offline, goldens={RULE.golden: golden})
    assert (done.submitted.published, done.submitted.version) == (True, 2)
    assert cloud.stage.repository.policy() == policy
    wider = Policy({"digits": Rule(1, RULE.golden, "accuracy", 0.5)})
    assert sign_policy(cloud, wider, cloud.stage.offline).submitted.published, "the set is listed"
    node = cloud.stage.node()
    assert node.refresh().is_fresh
    assert node.policy() == wider
    with pytest.raises(InvalidInput, match="share is 0 to 1"):
        sign_policy(
            cloud, Policy({"digits": Rule(2, "golden/x", "accuracy", 0)}), cloud.stage.offline
        )


def other_keys(made, folder):
    """The release role is given to a key of the thief's."""
    (old,) = made.signed.get_delegated_role("release").keyids
    made.signed.revoke_key(old, "release")
    made.signed.add_key(KeyFolder(folder).make("thief").public_key, "release")


def longer(made, folder):
    made.signed.expires = moment(made.signed.expires.timestamp() + 20 * 365 * 86_400)


@pytest.mark.parametrize("change", [other_keys, longer])
def test_a_queued_policy_with_other_keys_or_times_is_not_signed(tmp_path, change):
    """One of two targets keys is stolen; the other signer means to sign the same policy."""
    cloud = Cloud(stage(tmp_path / "stage", keys={"targets": 2}, thresholds={"targets": 2}))
    queued = cloud.stage.next_targets("targets")
    change(queued, tmp_path / "thief")
    signed_by(cloud.stage.offline, queued, "targets-1")
    cloud.queued = Pending(queued.to_bytes(), published=False, signatures=1, threshold=2)
    (cloud.stage.offline / "targets-1.pem").unlink()
    sign_policy(cloud, Policy({}), cloud.stage.offline)
    cloud.queued = None
    waiting = Metadata[Targets].from_bytes(cloud.pending("targets").metadata)
    assert waiting.signed_bytes != queued.signed_bytes
    assert waiting.signed.delegations == load(cloud.stage, "targets").signed.delegations
    assert len(waiting.signatures) == 1


@pytest.mark.parametrize("role", ["targets", "release"])
def test_an_offline_role_is_renewed_with_what_it_lists(cloud, role):
    cloud.stage.release(bundle_entry(PATH))
    clock = cloud.stage.clock
    clock.now_s += 366 * 86_400
    cloud.stage.repository.keep_fresh()
    node = cloud.stage.node()
    for other in {"targets", "release"} - {role}:
        renew(cloud, other, cloud.stage.offline, now_s=clock())
    found = node.refresh()
    if role == "targets":
        assert [refused.kind for refused in found.refusals] == ["freeze"]
    else:
        with pytest.raises(AttemptRefused, match="release 2 expired"):
            node.target(PATH)
    assert renew(cloud, role, cloud.stage.offline, now_s=clock()).submitted.published
    assert node.refresh().is_fresh
    assert node.target(PATH).name.version == 1


def test_keys_of_roles_that_the_root_does_not_name_are_refused(cloud):
    with pytest.raises(InvalidInput, match="the root names keys of"):
        replace_keys(cloud, {"release": []}, cloud.stage.offline)
    root = Metadata.from_bytes(cloud.get("root.json"))
    assert root.signed.version == 1
