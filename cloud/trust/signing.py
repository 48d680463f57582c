"""Signing where people keep their keys: check, sign, then send the signature to the cloud.

The cloud is not trusted, because an intruder may control it. What is published is verified from the
root that lies beside the keys. What waits for signatures is signed only if each part of it was
signed by the role's threshold before, or by this very key before, or was repeated here just now.
Nothing else gets this signature, whatever the cloud offers. Only its digest tells which model file
a version is: pass the one you know.
"""

import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from securesystemslib.signer._crypto_signer import CryptoSigner
from securesystemslib.signer._key import Key
from tuf.api._payload import Delegations, Root, TargetFile, Targets
from tuf.api.metadata import Metadata

from triplane.cloud.registry import encoding
from triplane.cloud.registry.conversions import Files
from triplane.cloud.trust.chain import Chain, newest_root, read
from triplane.cloud.trust.checks import read_plan_policy, read_policy, unnamed
from triplane.cloud.trust.initial import TRUSTED_ROOT, plan_policy_file, policy_file
from triplane.cloud.trust.keys import KeyFolder, add_signatures
from triplane.cloud.trust.repeating import checked_target
from triplane.cloud.trust.repository import Pending, Submitted, target_file
from triplane.cloud.trust.roles import MAX_METADATA_BYTES, ROLES, Lists, expiry, parse
from triplane.cloud.trust.seen_versions import SeenVersions
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound
from triplane.proto.plan_statement import PLAN_POLICY_PATH, PlanPolicy
from triplane.proto.registry_pb2 import Bundle, Version
from triplane.proto.signed_fields import PLANS, RELEASE
from triplane.proto.targets import POLICY_PATH, Policy, SignedTarget, TargetName, read_target

MAX_TRIES: Final = 20
"""Attempts at one signature while others sign at the same time; checks are not repeated."""
RETRY_S: Final = 1.0
TARGETS: Final = "targets"
MAX_REPEATED: Final = 32
"""Largest number of conversions repeated for one signature, when other bundles wait too."""

FULL: Final = {
    PLANS: "; withdraw plans that no run needs: triplane federate unsign RUN|DIGEST --keys DIR"
}
"""What to do if the list of a role is full."""

T = TypeVar("T")
Progress = Callable[[str], None]


class Metadatas(Protocol):
    """The metadata service as a signer uses it; `MetadataRepository` implements it."""

    def get(self, name: str, /) -> bytes:
        """Return one published file."""

    def pending(self, role: str, /) -> Pending:
        """Return the version that the next signer adds a signature to."""

    def submit(self, role: str, data: bytes, auto: Lists = Lists.CARRIED, /) -> Submitted:
        """Submit a version with this signer's signatures. auto: see `MetadataRepository`."""


class ReleaseSource(Metadatas, Protocol):
    """The calls of the cloud that signing a release needs."""

    def version(self, reference: str, /) -> Version:
        """Return a registered version."""

    def bundle(self, reference: str, target: str, /) -> Bundle:
        """Return its bundle for a target; waits until it is converted."""

    def blob(self, sha256: bytes, size: int | None, /) -> Path:
        """Return a local, verified file of that digest."""


class Overtaken(Conflict):
    """Somebody else signed the same role meanwhile; sign on top of that."""


@dataclass(frozen=True, slots=True)
class SigningResult:
    """The outcome of signing. targets: those whose conversion was repeated here."""

    submitted: Submitted
    targets: tuple[SignedTarget, ...] = ()


def sign_release(
    cloud: ReleaseSource,
    reference: str,
    target: str,
    keys_folder: Path,
    *,
    model_digest: bytes = b"",
    progress: Progress = lambda _: None,
    now_s: float | None = None,
) -> SigningResult:
    """Sign the bundle of a version for a target with the release keys in a folder.

    model_digest: root digest of the model file, if the signer knows it; any other is refused. What
    already waits for signatures is repeated, compared and signed as well. Conflict: the content
    differs; it names the parts. NotFound: the folder has no release key. Corrupt: the cloud's
    metadata does not follow from the root beside the keys.
    """
    version = cloud.version(reference)
    wanted = TargetName(RELEASE, version.model, version.version, target)
    check_model(version, model_digest)
    checked: dict[str, SignedTarget] = {}

    def attempt() -> SigningResult:
        signer = Signer(cloud, keys_folder, RELEASE)
        base, repeat = signer.published(), {str(wanted): wanted}
        blob = cloud.bundle(f"{version.model}@{version.version}", target).blob
        # Signed already: a repetition after a lost answer succeeds without a new version.
        if str(wanted) in base and base[str(wanted)].hashes == {"sha256": blob.hex()}:
            pending = cloud.pending(RELEASE)
            done = Submitted(True, pending.signatures, pending.threshold, signer.version)
            return SigningResult(done, (_as_target(str(wanted), base[str(wanted)]),))
        waiting = signer.waiting(base)
        # What this key has signed before was checked then and need not be repeated.
        if waiting is not None and not signer.has_signed(waiting):
            repeat |= {p: TargetName.parse(p) for p in waiting.signed.targets if p not in base}
        _check_count(repeat)
        missing = [name for path, name in repeat.items() if path not in checked]
        if missing:  # repeating takes minutes: look again at what others signed meanwhile
            checked.update({str(name): repeat_one(cloud, name, progress) for name in missing})
            signer = Signer(cloud, keys_folder, RELEASE)
            base, waiting = signer.published(), signer.waiting(signer.published())
        targets = [checked[path] for path in repeat]
        submitted = _sign_with(signer, base, waiting, targets, progress, now_s)
        return SigningResult(submitted, tuple(targets))

    return until_signed(attempt, progress)


def until_signed(attempt: Callable[[], T], progress: Progress) -> T:
    """Return what `attempt` returns, which is repeated while it raises `Overtaken`."""
    for tries_left in reversed(range(MAX_TRIES)):
        try:
            return attempt()
        except Overtaken:
            if not tries_left:
                raise
            progress("somebody else signed at the same time; signing on top of that")
            # Random, so that two signers who collided do not collide again.
            time.sleep(random.uniform(0, RETRY_S))
    raise AssertionError("the last try returns or raises")


def check_model(version: Version, expected_digest: bytes) -> None:
    """Raise Corrupt unless the cloud's version is the model file that the signer knows, if any."""
    if expected_digest and version.model_digest != expected_digest:
        raise Corrupt(
            f"{version.model}@{version.version} is model file {version.model_digest.hex()[:12]} in "
            f"the cloud, not {expected_digest.hex()[:12]} as you expect"
        )


def _check_count(repeat: Mapping[str, TargetName]) -> None:
    # A hostile cloud could keep this machine converting for ever.
    if len(repeat) > MAX_REPEATED:
        raise InvalidInput(f"{len(repeat)} bundles wait; at most {MAX_REPEATED} are signed at once")


def _sign_with(
    signer: "Signer",
    base: Mapping[str, TargetFile],
    waiting: Metadata[Targets] | None,
    checked: Sequence[SignedTarget],
    progress: Progress,
    now_s: float | None,
) -> Submitted:
    """Sign what was checked. Overtaken: more waits by now and must be repeated first."""
    entries = {target.path: target_file(target) for target in checked}
    others = dict(waiting.signed.targets) if waiting is not None else {}
    known = base.keys() | entries.keys()
    if waiting is not None and not others.keys() <= known and not signer.has_signed(waiting):
        raise Overtaken("others signed more meanwhile; run the command again")
    for path, entry in entries.items():
        # The bundle was replaced after others had signed: one of the two is wrong, so sign neither.
        if path in others and others[path] != entry:
            raise Corrupt(f"{path} waits in the cloud with other digests than its bundle has now")
    progress(f"signing {', '.join(entries)}")
    return signer.sign(waiting, {**base, **others, **entries}, now_s)


def sign_policy(
    cloud: Metadatas,
    policy: Policy,
    keys_folder: Path,
    *,
    goldens: Mapping[str, Path] | None = None,
    now_s: float | None = None,
) -> SigningResult:
    """Sign a policy, which says what the auto role may do, with the targets keys in a folder.

    goldens: files by target path (`golden/NAME`), for sets that the published metadata does not
    list yet; they must have been uploaded to the cloud, where nodes fetch them.
    """
    return _sign_policy(Signer(cloud, keys_folder, TARGETS), policy, goldens or {}, now_s)


def change_policy(
    cloud: Metadatas,
    change: Callable[[Policy], Policy],
    keys_folder: Path,
    *,
    goldens: Mapping[str, Path] | None = None,
) -> tuple[Policy, SigningResult]:
    """Sign what `change` makes of the newest policy that keys of targets signed; see `sign_policy`.

    The signature covers the rules of all models, so none of them is taken on the cloud's word.
    Conflict: somebody else signed meanwhile.
    """
    signer = Signer(cloud, keys_folder, TARGETS)
    policy = change(read_policy(signer.newest()))
    return policy, _sign_policy(signer, policy, goldens or {}, None)


def _sign_policy(
    signer: "Signer", policy: Policy, goldens: Mapping[str, Path], now_s: float | None
) -> SigningResult:
    # Through its text, so that exactly what nodes will parse is checked and signed.
    policy = Policy.parse(policy.text())
    files = {path: TargetFile.from_file(path, str(f)) for path, f in goldens.items()}
    named = {rule.golden for rule in policy.models.values()}
    kept = {*named, PLAN_POLICY_PATH}
    listed = {path: entry for path, entry in signer.published().items() if path in kept}
    missing = sorted(named - listed.keys() - files.keys())
    if missing:
        raise NotFound(
            f"the policy names golden sets that are not listed: {missing}; pass their files"
        )
    targets = listed | files | {POLICY_PATH: policy_file(policy)}
    return SigningResult(signer.sign(signer.waiting({}), targets, now_s))


def sign_plan_policy(
    cloud: Metadatas, policy: PlanPolicy, keys_folder: Path, *, now_s: float | None = None
) -> SigningResult:
    """Sign the policy for plans with the targets keys in a folder; the other policy stays."""
    return _sign_plan_policy(Signer(cloud, keys_folder, TARGETS), policy, now_s)


def change_plan_policy(
    cloud: Metadatas, change: Callable[[PlanPolicy], PlanPolicy], keys_folder: Path
) -> tuple[PlanPolicy, SigningResult]:
    """Sign what `change` makes of the newest policy for plans; see `change_policy`."""
    signer = Signer(cloud, keys_folder, TARGETS)
    policy = change(read_plan_policy(signer.newest()))
    return policy, _sign_plan_policy(signer, policy, None)


def _sign_plan_policy(signer: "Signer", policy: PlanPolicy, now_s: float | None) -> SigningResult:
    policy = PlanPolicy.parse(policy.text())
    targets = signer.published() | {PLAN_POLICY_PATH: plan_policy_file(policy)}
    return SigningResult(signer.sign(signer.waiting({}), targets, now_s))


def renew(
    cloud: Metadatas, role: str, keys_folder: Path, *, past: int = 0, now_s: float | None = None
) -> SigningResult:
    """Sign the list of `targets` or `release` again: it expires a year after its last signature.

    Signing something new has the same effect. past: sign also if the list is older than what the
    folder has seen, up to this version. Conflict: the role's keys were replaced, and the present
    ones did not sign what it lists.
    """
    signer = Signer(cloud, keys_folder, role, past=past)
    base = signer.published()
    if not base and signer.version > 1:
        raise Conflict(f"nothing that {role} lists is signed by its present keys; sign it again")
    return SigningResult(signer.sign(signer.waiting(base), base, now_s))


def replace_keys(
    cloud: Metadatas,
    replaced: Mapping[str, Sequence[Key]],
    keys_folder: Path,
    *,
    thresholds: Mapping[str, int] | None = None,
    past: int = 0,
    now_s: float | None = None,
) -> SigningResult:
    """Sign a root with other keys for some roles; what the old keys signed is no longer valid.

    replaced: public keys by top-level role; if empty, the root is only renewed. thresholds: those
    that change. past: see `renew`. New snapshot and timestamp keys must already be in the cloud's
    key folder. A new root key must be in `keys_folder` beside the old one: both sign. If the same
    root waits for signatures, it gets this one.
    """
    trusted = trusted_root(keys_folder)
    seen = SeenVersions(keys_folder, trusted)
    root = newest_root(cloud.get, trusted).signed
    seen.require({"root": root.version}, {"root": past})
    again = Metadata[Root].from_bytes(Metadata(root).to_bytes()).signed
    for role, keys in replaced.items():
        if role not in again.roles:
            raise InvalidInput(f"the root names keys of {sorted(again.roles)}, not of {role!r}")
        for keyid in list(again.roles[role].keyids):
            again.revoke_key(keyid, role)
        for key in keys:
            again.add_key(key, role)
    for role, threshold in (thresholds or {}).items():
        again.roles[role].threshold = threshold
    again.version, again.expires = root.version + 1, expiry("root", _or_now(now_s))
    keyids = dict.fromkeys([*root.roles["root"].keyids, *again.roles["root"].keyids])
    metadata = _waiting_root(cloud, again) or Metadata(again)
    add_signatures(metadata, KeyFolder(keys_folder).of(list(keyids), "root"))
    submitted = cloud.submit("root", metadata.to_bytes())
    if submitted.published:
        seen.note({"root": again.version})
    return SigningResult(submitted)


def _waiting_root(cloud: Metadatas, wanted: Root) -> Metadata[Root] | None:
    """Return the pending root of other key holders, if it is `wanted` and expires no later."""
    pending = cloud.pending("root")
    if pending.published:
        return None
    root = parse(Root, pending.metadata, "the pending root")
    # Expiry differs by the time between two signers; everything else must be equal.
    ends = {"expires": None}
    is_same = root.signed.to_dict() | ends == wanted.to_dict() | ends
    return root if is_same and root.signed.expires <= wanted.expires else None


def trusted_root(keys_folder: Path) -> bytes:
    """Return the root beside the keys, against which the cloud's metadata is verified."""
    trusted = keys_folder / TRUSTED_ROOT
    try:
        return trusted.read_bytes()
    except FileNotFoundError as error:
        raise NotFound(
            f"{trusted} is missing; copy it from where `triplane cloud init` wrote the keys"
        ) from error


def verified_chain(cloud: Metadatas, role: str, keys_folder: Path, *, past: int = 0) -> Chain:
    """Return the cloud's metadata, verified from the root beside the keys.

    Corrupt: it does not follow from that root; or the role, or one that decides about its keys, is
    older than the folder has seen. past: see `renew`.
    """
    trusted = trusted_root(keys_folder)
    seen = SeenVersions(keys_folder, trusted)
    try:
        chain = read(cloud.get, newest_root(cloud.get, trusted))
    except Corrupt as error:
        raise Corrupt(
            f"the cloud's metadata does not follow from {keys_folder / TRUSTED_ROOT}: these are "
            f"the keys of another cloud, or somebody else controls this one ({error})"
        ) from error
    # In this order, so that after a backup each role can be renewed once those above it are.
    seen.require({name: chain.version(name) for name in ("root", TARGETS, role)}, {role: past})
    return chain


def repeat_one(cloud: ReleaseSource, name: TargetName, progress: Progress) -> SignedTarget:
    """Fetch a version and its bundle and repeat the conversion; return what may be signed."""
    reference = f"{name.model}@{name.version}"
    version = cloud.version(reference)
    bundle = cloud.bundle(reference, name.target)
    progress(f"fetching the model file and the bundle of {name}")
    with tempfile.TemporaryDirectory(prefix="triplane-sign-") as work:
        return checked_target(
            name,
            _files(cloud, version),
            cloud.blob(bundle.blob, bundle.size),
            Path(work),
            progress,
        )


def _files(cloud: ReleaseSource, version: Version) -> Files:
    recipe = encoding.recipe(version.recipe)
    return Files(
        name=version.model,
        model=cloud.blob(version.blob, version.size),
        recipe=recipe,
        calibration=cloud.blob(recipe.calibration, None) if recipe.calibration else None,
        evaluation=cloud.blob(recipe.evaluation, None) if recipe.evaluation else None,
    )


class Signer:
    """The keys of one role. chain: the published metadata, verified from their owner's root.

    past: see `renew`.
    """

    def __init__(self, cloud: Metadatas, keys_folder: Path, role: str, *, past: int = 0) -> None:
        self._cloud, self._role, self._folder = cloud, role, keys_folder
        self.chain = verified_chain(cloud, role, keys_folder, past=past)
        # Without this, an intruder could present a targets role that names keys of his own.
        if role != "targets" and not self.chain.is_signed("targets"):
            raise Corrupt("the published targets are not signed by keys of the newest root")
        if not self.chain.is_named(role):
            raise NotFound(unnamed(role))
        delegator = self.chain.delegator(role)
        keyids = delegator.get_delegated_role(role).keyids
        self._keys: list[CryptoSigner] = KeyFolder(keys_folder).of(keyids, role)

    @property
    def version(self) -> int:
        """The version of the role that is published."""
        return self.chain.version(self._role)

    def published(self) -> dict[str, TargetFile]:
        """Return the targets that the role's threshold signed; none after a key rotation."""
        if not self.chain.is_signed(self._role):
            return {}
        return dict(self.chain.targets[self._role].signed.targets)

    def newest(self) -> Targets:
        """Return what waits, if a key of the role signed it, or else what is published.

        Corrupt: the role's keys did not sign what is published.
        """
        waiting = self.waiting({})
        if waiting is not None:
            return waiting.signed
        if not self.chain.is_signed(self._role):
            raise Corrupt(
                f"what {self._role} lists is not signed by its present keys; sign it again with "
                f"them: triplane cloud keys rotate {self._role} --keys DIR --public FILE.pub, with "
                "the public file of each present key"
            )
        return self.chain.targets[self._role].signed

    def waiting(self, base: Mapping[str, TargetFile]) -> Metadata[Targets] | None:
        """Return the version that waits for signatures, if signing it keeps all of `base`."""
        pending = self._cloud.pending(self._role)
        if pending.published:
            return None
        waiting = parse(Targets, pending.metadata, f"the pending {self._role}")
        result = self.chain.verification(self._role, waiting)
        # A pending version that drops a published target would withdraw it with this signature.
        keeps = all(waiting.signed.targets.get(path) == entry for path, entry in base.items())
        is_next = waiting.signed.version == self.version + 1
        is_plain = self._role == "targets" or waiting.signed.delegations is None
        return waiting if result.signed and keeps and is_next and is_plain else None

    def has_signed(self, metadata: Metadata[Targets]) -> bool:
        """Return whether a key of this folder signed it before, when its content was checked."""
        result = self.chain.verification(self._role, metadata)
        return any(signer.public_key.keyid in result.signed for signer in self._keys)

    def sign(
        self,
        waiting: Metadata[Targets] | None,
        targets: Mapping[str, TargetFile],
        now_s: float | None = None,
        *,
        delegations: Delegations | None = None,
        auto: Lists = Lists.CARRIED,
    ) -> Submitted:
        """Sign what waits, if it lists exactly these targets, or else a new version.

        Overtaken: somebody else signed the role meanwhile.
        delegations: new ones of the role targets; the published ones by default. auto: see
        `MetadataRepository.submit`.
        """
        now_s = _or_now(now_s)
        if self._role == "targets" and delegations is None:
            delegations = self.chain.top.delegations
        metadata = Metadata(
            Targets(
                version=self.version + 1,
                expires=expiry(self._role, now_s),
                targets=dict(targets),
                delegations=delegations,
            )
        )
        if waiting is not None and self._is_just(waiting, metadata.signed, now_s):
            metadata = waiting
        data = add_signatures(metadata, self._keys).to_bytes()
        if len(data) > MAX_METADATA_BYTES:
            raise InvalidInput(
                f"the list of {self._role} would have {len(data)} bytes with this, and has at most "
                f"{MAX_METADATA_BYTES}{FULL.get(self._role, '')}"
            )
        try:
            submitted = self._cloud.submit(self._role, data, auto)
        except Conflict as error:
            raise Overtaken(str(error)) from error
        if submitted.published:
            seen = SeenVersions(self._folder, trusted_root(self._folder))
            seen.note({self._role: metadata.signed.version})
        return submitted

    def _is_just(self, waiting: Metadata[Targets], wanted: Targets, now_s: float) -> bool:
        signed = waiting.signed
        latest = expiry(self._role, now_s + ROLES[self._role].lifetime_s / 100)
        return (
            signed.targets == wanted.targets
            and signed.delegations == wanted.delegations
            # Fields that this program does not know could mean something to another.
            and not signed.unrecognized_fields
            and signed.expires <= latest
        )


def _or_now(now_s: float | None) -> float:
    return time.time() if now_s is None else now_s


def _as_target(path: str, entry: Any) -> SignedTarget:
    return read_target(path, entry.length, entry.hashes, entry.custom)
