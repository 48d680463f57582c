"""Who must sign what, told in time."""

from triplane.cloud.trust.expiring import WARN_S, due
from triplane.cloud.trust.roles import ROLES

FINE = dict.fromkeys(ROLES, WARN_S + 1)


def test_nothing_is_due_thirty_days_before_the_end():
    assert due(FINE, 0.0) == []


def test_an_offline_role_is_named_with_its_day_and_the_way_out():
    (told,) = due(FINE | {"root": WARN_S - 1}, 0.0)
    assert "the signatures of people for root expire on 1970-01-30" in told
    assert "triplane cloud keys renew --role root --keys DIR" in told


def test_an_ended_role_says_what_nodes_do():
    (told,) = due(FINE | {"release": 0.5}, 0.9)
    assert "expired on 1970-01-01: nodes refuse updates" in told


def test_an_online_role_is_the_clouds_to_sign_and_named_only_when_it_did_not():
    assert due(FINE | {"timestamp": 1.0}, 0.0) == []
    (told,) = due(FINE | {"timestamp": 0.5}, 0.9)
    assert "the cloud does not sign it again" in told


def test_an_expired_list_of_plans_names_the_machines_that_it_stops():
    (told,) = due(FINE | {"plans": -1.0}, 0.0)
    assert "expired on 1969-12-31: devices run none of their plans" in told


def test_a_roster_is_renewed_by_a_verb_of_its_own():
    assert due(FINE | {"roster": WARN_S}, 0.0) == []
    (told,) = due(FINE | {"roster": WARN_S - 1}, 0.0)
    assert told.startswith("the roster of devices expires on 1970-01-30")
    assert "triplane cloud roster renew --keys DIR" in told
    (told,) = due(FINE | {"roster": 0.5}, 0.9)
    assert told.startswith("the roster of devices expired on 1970-01-01")
