import http.client
import json
import re
from importlib.resources import files
from urllib.parse import urlsplit

import pytest
from tests.support.page_policy import check_policy

from triplane.cloud.dashboard.web import MOST_BODY_BYTES

TOKEN = "operator-token-of-this-test"
CHANGE = "/api/rollouts/r-7c41/resume"


def call(address, method, path, body=None, **headers):
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=10)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def asked(address, path, **headers):
    status, _, body = call(address, "GET", path, **headers)
    assert status == 200, body
    return json.loads(body)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("nodes", "camera-00"),
        ("rollouts", "r-7c41"),
        ("versions", "digits@4"),
        ("incidents", "camera-07 1700000000.0 golden golden sample 3: |y - g| = 4.1 > 0.002"),
    ],
)
def test_every_section_is_readable_as_json(address, section, key):
    assert key in asked(address, f"/api/{section}")
    assert key in asked(address, "/api/state")[section]


def test_the_page_may_run_its_own_script_and_nothing_else(address):
    _, headers, body = call(address, "GET", "/")
    policy = headers["content-security-policy"]
    text = files("triplane.cloud.dashboard").joinpath("page.html").read_text("utf-8")
    assert body.decode() == text
    check_policy(text, policy)
    assert "frame-ancestors 'none'" in policy
    assert not re.search(
        r"(?:src|href)=\"(?!data:)|@import|url\(|innerHTML|\beval\(|\son\w+=\"", text
    )


def test_every_answer_forbids_framing_sniffing_and_caching(address):
    for path in ("/", "/api/state", "/nowhere"):
        _, headers, _ = call(address, "GET", path)
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


def test_another_host_name_is_refused(address):
    status, _, body = call(address, "GET", "/api/state", Host="attacker.example")
    assert status == 400
    assert b"camera" not in body


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": TOKEN},
        {"Cookie": f"token={TOKEN}"},
        {"Authorization": "Bearer ü"},
    ],
)
def test_a_change_without_the_token_is_refused_and_changes_nothing(fleet, address, headers):
    headers = {key: value.encode("latin-1") for key, value in headers.items()}
    status, _, body = call(address, "POST", CHANGE, "{}", **headers)
    assert status == 403
    assert "dashboard.token" in json.loads(body)["error"]["message"]
    assert fleet.asked == []


def test_a_token_in_the_url_is_no_token(fleet, address):
    status, _, _ = call(address, "POST", f"{CHANGE}?token={TOKEN}&authorization=Bearer+{TOKEN}")
    assert status == 403
    assert fleet.asked == []


def with_token(address, path, body):
    return call(address, "POST", path, body, Authorization=f"Bearer {TOKEN}")


def test_the_token_allows_a_change_with_its_reason(fleet, address):
    status, _, body = with_token(address, CHANGE, json.dumps({"reason": "lens cleaned"}))
    assert status == 200
    assert json.loads(body)["state"] == "running"
    assert fleet.asked == [("r-7c41", "lens cleaned")]


def test_an_abort_says_whether_nodes_go_back(fleet, address):
    with_token(address, "/api/rollouts/r-7c41/abort", json.dumps({"revert": True}))
    assert fleet.asked == [("r-7c41", "", True)]


def test_rights_are_told_without_changing_anything(address):
    assert asked(address, "/api/rights") == {"change": False}
    assert asked(address, "/api/rights", Authorization=f"Bearer {TOKEN}") == {"change": True}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (CHANGE, "[", 400, "not JSON"),
        (CHANGE, "[" * 4000, 400, "not JSON"),
        (CHANGE, "[]", 400, "JSON object"),
        (CHANGE, '{"reason": 3}', 400, "reason must be text"),
        (CHANGE, json.dumps({"reason": "x" * 201}), 400, "at most 200"),
        (CHANGE, '{"reason": "\\ud800"}', 400, "not valid UTF-8"),
        (CHANGE, '{"reason": "x", "\\udfff": 1}', 400, "not valid UTF-8"),
        (CHANGE, '{"revert": "yes"}', 400, "revert must be true or false"),
        (CHANGE, " " * (MOST_BODY_BYTES + 1), 400, "longer than"),
        ("/api/rollouts/r-0000/pause", "{}", 404, "no rollout"),
        ("/api/rollouts/r-7c41/pause", "{}", 409, "r-7c41 is"),
        ("/api/rollouts/r-7c41/explode", "{}", 404, "no change 'explode'"),
    ],
)
def test_a_wrong_change_is_refused_with_its_family(address, path, body, status, words):
    got, _, answer = with_token(address, path, body)
    assert got == status
    assert words in json.loads(answer)["error"]["message"]


def test_reading_paths_take_no_writes(address):
    for path in ("/", "/api/state", "/api/nodes", "/api/rights"):
        status, _, _ = call(address, "POST", path, "{}", Authorization=f"Bearer {TOKEN}")
        assert status == 405


def test_events_begin_with_everything(address):
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=10)
    connection.request("GET", "/api/events")
    answer = connection.getresponse()
    assert answer.headers["content-type"].startswith("text/event-stream")
    line = answer.readline()
    connection.close()
    answer.close()
    told = json.loads(line.removeprefix(b"data: "))
    assert len(told["change"]["nodes"]["set"]) == 40
