"""Enrolment with somebody in between, who owns the enrolment port and is an insider besides.

He passes on what he likes and names his own server as the cloud's main port. He has a certificate
of the cloud's authority, as every node has, for the very name under which he is reached. What he
wants is that a new node takes his root for its first.
"""

import datetime as dt
import re
import shutil
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from tests.attacks.trust_stage import stage
from tests.cloud.cli.proxied import link
from tests.cloud.cli.verbs import answer
from tests.support.cloud_process import running

from triplane.device.enrolling import enrol as device_enrols
from triplane.device.home import DeviceHome, DeviceSettings
from triplane.edge import enrolling
from triplane.edge.home import NodeHome
from triplane.proto import enrolment_pb2, metadata_pb2
from triplane.proto.enrolment_pb2_grpc import (
    EnrolmentServicer,
    EnrolmentStub,
    add_EnrolmentServicer_to_server,
)
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, Unavailable
from triplane.proto.identity import certificate_pem, key_pem, new_key
from triplane.proto.identity import enrol as person_enrols
from triplane.proto.metadata_pb2_grpc import MetadataServicer, add_MetadataServicer_to_server
from triplane.proto.signed.trust import BOOTSTRAP
from triplane.proto.status import status_of

pytestmark = pytest.mark.slow
OPTIONS = [("grpc.so_reuseport", 0)]


class Cloud:
    """A real cloud process, and an operator's hand on it."""

    def __init__(self, folder, ready):
        self.home, self.keys = folder / "home", folder / "keys"
        self.port = ready["port"]
        self.enrolment = f"127.0.0.1:{ready['enrol_port']}"
        self.ready = ready

    def token(self, name):
        made = answer("cloud", "token", "--name", name, "--identity", self.home / "operator")
        return made["token"]

    @property
    def root(self):
        return (self.home / "metadata" / "1.root.json").read_bytes()


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cloud")
    answer("cloud", "init", "--home", folder / "home", "--offline-keys", folder / "keys")
    with running(folder / "home") as (ready, _):
        yield Cloud(folder, ready)


class Between(EnrolmentServicer):
    """Passes everything on, and names another main port."""

    def __init__(self, cloud, address):
        self._channel = grpc.insecure_channel(cloud.enrolment)
        self._honest, self._address = EnrolmentStub(self._channel), address

    def GetAuthority(self, request, context):
        return self._honest.GetAuthority(request, timeout=10)

    def Enrol(self, request, context):
        try:
            made = self._honest.Enrol(request, timeout=10)
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())
        return enrolment_pb2.Certificate(certificate=made.certificate, address=self._address)

    def close(self):
        self._channel.close()


class Planting(MetadataServicer):
    """Answers every question with the thief's own metadata."""

    def __init__(self, repository):
        self._repository, self.asked = repository, []

    def Get(self, request, context):
        self.asked.append(request.name)
        with status_of(context):
            return metadata_pb2.GetResponse(metadata=self._repository.get(request.name))

    def Submit(self, request, context):
        raise NotImplementedError

    def GetPending(self, request, context):
        raise NotImplementedError


@contextmanager
def served(add, servicer, credentials=None):
    """A port of the thief's."""
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool, options=OPTIONS)
        add(servicer, server)
        address = "localhost:0" if credentials else "127.0.0.1:0"
        port = (
            server.add_secure_port(address, credentials)
            if credentials
            else server.add_insecure_port(address)
        )
        server.start()
        try:
            yield port
        finally:
            server.stop(0).wait()


def by_himself(cloud, folder):
    """A certificate for localhost of an authority that he made up."""
    key = new_key()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost")])
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name)
        .public_key(key.public_key()).serial_number(1)
        .not_valid_before(now - dt.timedelta(1)).not_valid_after(now + dt.timedelta(1))
        .add_extension(names, critical=False).sign(key, hashes.SHA256())
    )  # fmt: skip
    return key_pem(key), certificate_pem(made)


def as_an_insider(cloud, folder):
    """The certificate of an enrolled node whose name is that of the thief's machine."""
    person = person_enrols(cloud.token("localhost"), cloud.enrolment, folder / "insider")
    return person.key_pem, person.certificate_pem


def with_the_clouds_own_key(cloud, folder):
    """What no thief has who did not break into the cloud."""
    tls = cloud.home / "tls"
    return (tls / "server.key").read_bytes(), (tls / "server.pem").read_bytes()


@contextmanager
def thief(cloud, folder, armed):
    """His enrolment port and his metadata."""
    credentials = grpc.ssl_server_credentials([armed(cloud, folder)])
    planting = Planting(stage(folder / "thief").repository)
    with served(add_MetadataServicer_to_server, planting, credentials) as port:
        between = Between(cloud, f"localhost:{port}")
        with served(add_EnrolmentServicer_to_server, between) as enrol_port:
            yield f"127.0.0.1:{enrol_port}", planting
        between.close()


@pytest.mark.parametrize("armed", [by_himself, as_an_insider])
def test_a_hostile_enrolment_port_cannot_plant_a_root(cloud, tmp_path, armed):
    node = NodeHome(tmp_path / "node")
    token = cloud.token(f"victim-{armed.__name__}".replace("_", "-"))
    with (
        thief(cloud, tmp_path, armed) as (address, planting),
        pytest.raises(Unavailable, match="does not answer as the cloud"),
    ):
        enrolling.enrol(node, token, address)
    assert planting.asked == []
    assert not (node.trust / BOOTSTRAP).exists()


def test_the_attack_is_complete_but_for_the_clouds_own_key(cloud, tmp_path):
    """With a stolen cloud it works, so the tests above fail for the right reason."""
    node = NodeHome(tmp_path / "node")
    with thief(cloud, tmp_path, with_the_clouds_own_key) as (address, planting):
        enrolling.enrol(node, cloud.token("robbed"), address)
    assert planting.asked == ["root.json"]
    assert (node.trust / BOOTSTRAP).read_bytes() == planting._repository.get("root.json")


def test_a_root_brought_by_hand_holds_against_a_stolen_cloud(cloud, tmp_path):
    node, root = NodeHome(tmp_path / "node"), cloud.keys / "root.json"
    with (
        thief(cloud, tmp_path, with_the_clouds_own_key) as (address, _),
        pytest.raises(Corrupt, match=r"does not follow from .*root\.json"),
    ):
        enrolling.enrol(node, cloud.token("warned"), address, root)
    assert not (node.trust / BOOTSTRAP).exists()


def test_a_root_brought_by_hand_is_the_first(cloud, tmp_path):
    node, root = NodeHome(tmp_path / "node"), cloud.keys / "root.json"
    enrolling.enrol(node, cloud.token("careful"), cloud.enrolment, root)
    assert (node.trust / BOOTSTRAP).read_bytes() == root.read_bytes() == cloud.root
    (tmp_path / "no-root").write_bytes(b"{}")
    with pytest.raises(Corrupt, match="no-root is not a root file"):
        enrolling.enrol(
            NodeHome(tmp_path / "other"), cloud.token("hasty"), cloud.enrolment,
            tmp_path / "no-root",
        )  # fmt: skip


def test_an_enrolment_cut_off_before_the_root_goes_on_with_the_same_token(cloud, tmp_path):
    """The enrolment port is reached, the main port is not yet: a firewall, most often."""
    node, token = NodeHome(tmp_path / "node"), cloud.token("behind-a-wall")
    with link(cloud.port) as walled:
        between = Between(cloud, walled.address)
        walled.close()
        with (
            served(add_EnrolmentServicer_to_server, between) as enrol_port,
            pytest.raises(Unavailable, match="run the same command again"),
        ):
            enrolling.enrol(node, token, f"127.0.0.1:{enrol_port}")
        between.close()
    (node.identity.path / "cloud").write_text(f"127.0.0.1:{cloud.port}\n")  # the wall is open now
    done = enrolling.enrol(node, token, cloud.enrolment)
    assert done.name == "behind-a-wall"
    assert (node.trust / BOOTSTRAP).read_bytes() == cloud.root
    with pytest.raises(Conflict, match="is enrolled already, as behind-a-wall of"):
        enrolling.enrol(node, token, cloud.enrolment)


def changed(token):
    """The token with two different characters of its pin exchanged, near the end."""
    secret, _, pin = token.partition(".")
    i = max(i for i in range(41) if pin[i] != pin[i + 1])
    return f"{secret}.{pin[:i]}{pin[i + 1]}{pin[i]}{pin[i + 2 :]}"


@pytest.mark.parametrize("enrols", [enrolling.enrol, person_enrols])
def test_where_no_enrolment_port_answers_the_message_says_so_itself(cloud, tmp_path, enrols):
    token = cloud.token("lost")
    home = NodeHome(tmp_path / "n") if enrols is enrolling.enrol else tmp_path / "n"
    for port in (cloud.port, 1):
        arguments = (token, f"127.0.0.1:{port}")
        with pytest.raises(Unavailable, match="no enrolment port answers at 127") as told:
            enrols(home, *arguments) if isinstance(home, NodeHome) else enrols(*arguments, home)
        assert "failed to connect" not in str(told.value)


@pytest.mark.parametrize("address", ["fleet.example", "::1", "https://fleet.example:8444", ":1"])
def test_an_address_without_a_port_is_refused_before_anything_is_made(cloud, tmp_path, address):
    with pytest.raises(InvalidInput, match=r"is HOST:PORT, such as fleet\.example\.org:8444, got"):
        person_enrols(cloud.token("portless"), address, tmp_path / "n")
    assert not (tmp_path / "n").exists()


def test_a_host_that_nobody_knows_is_told_without_the_words_of_a_library(cloud, tmp_path):
    with pytest.raises(Unavailable, match="its host name cannot be resolved") as told:
        person_enrols(cloud.token("nowhere"), "nobody.invalid:8444", tmp_path / "n")
    assert "errors resolving" not in str(told.value)


def test_an_empty_token_is_named_as_such(cloud, tmp_path):
    with pytest.raises(InvalidInput, match="the token is empty"):
        person_enrols(" ", cloud.enrolment, tmp_path / "n")


def test_two_pins_that_begin_alike_are_shown_as_far_as_they_differ(cloud, tmp_path):
    token = cloud.token("typo")
    with pytest.raises(Corrupt, match="invalid token: it pins the authority") as told:
        enrolling.enrol(NodeHome(tmp_path / "n"), changed(token), cloud.enrolment)
    shown = re.findall(r"[0-9a-f]{16,}", str(told.value))
    assert len(set(shown)) == 2, told.value


def test_a_token_for_something_else_is_refused_and_stays_unused(cloud, tmp_path):
    token = cloud.token("camera")
    for kind in ("device", "person"):
        with pytest.raises(InvalidInput, match=f"for a node, not for a {kind}.*edge enrol"):
            person_enrols(token, cloud.enrolment, tmp_path / kind, kind=kind)
    with pytest.raises(InvalidInput, match=r"for a node, not for a device.*edge enrol"):
        device_enrols(DeviceHome(tmp_path / "d"), DeviceSettings(), token, cloud.enrolment)
    assert enrolling.enrol(NodeHome(tmp_path / "n"), token, cloud.enrolment).name == "camera"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_the_main_port_speaks_tls_1_3_only(cloud, version):
    folder = cloud.home / "operator"
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(("127.0.0.1", cloud.port), timeout=30) as plain:
        if version is ssl.TLSVersion.TLSv1_3:
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as link_:
                assert link_.version() == "TLSv1.3"
        else:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                context.wrap_socket(plain, server_hostname="127.0.0.1")


def test_a_token_is_told_with_the_port_that_takes_it(cloud):
    identity = ("--identity", cloud.home / "operator")
    made = answer("cloud", "token", "--name", "told", *identity)
    assert made["enrol_address"].endswith(f":{cloud.ready['enrol_port']}")


def test_a_home_of_another_cloud_is_not_taken_over(cloud, tmp_path):
    node = NodeHome(tmp_path / "node")
    enrolling.enrol(node, cloud.token("faithful"), cloud.enrolment)
    before = node.identity.certificate_pem
    answer("cloud", "init", "--home", tmp_path / "home", "--offline-keys", tmp_path / "keys")
    with running(tmp_path / "home") as (ready, _):
        other = Cloud(tmp_path, ready)
        with pytest.raises(Conflict, match="is a node of another cloud"):
            enrolling.enrol(node, other.token("faithful"), other.enrolment)
        assert node.identity.certificate_pem == before
        shutil.rmtree(node.path)
        assert enrolling.enrol(node, other.token("new"), other.enrolment).name == "new"
