import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton

from triplane.edge.serving import probe
from triplane.edge.serving.repository import IndexEntry, Repository
from triplane.proto.errors import Conflict, InvalidInput, NotFound

X = np.ones((1, 4), np.float32)


def test_adding_a_version_twice_is_a_conflict(kit):
    repository = Repository()
    repository.add(kit.linear())
    with pytest.raises(Conflict, match="already loaded; convert it with another --model-version"):
        repository.add(kit.linear())


def test_a_switch_leaves_only_the_new_version(kit):
    repository = Repository()
    repository.add(kit.linear(version="1"))
    repository.add(kit.linear(version="2"))
    repository.switch(kit.linear(version="1"))  # back to an older one
    assert [version.version for version in repository.versions("linear")] == ["1"]
    assert repository.find("linear").version == "1"


def test_a_switch_of_one_model_leaves_the_others(kit):
    repository = Repository()
    repository.add(kit.linear(name="other"))
    repository.switch(kit.linear())
    assert repository.index() == [
        IndexEntry("linear", "1", "READY"),
        IndexEntry("other", "1", "READY"),
    ]


def test_a_switch_waits_for_the_calls_inside_the_old_version(kit):
    repository = Repository()
    old = kit.Gated(kit.linear(version="1"))
    repository.add(old)

    def call():
        with repository.using("linear") as version:
            return version.runner.run({"x": X}, 1, kit.call()).results["y"]

    with ThreadPoolExecutor(4) as pool:
        inside = pool.submit(call)
        old.wait_for_runs(1)
        switched = pool.submit(repository.switch, kit.linear(version="2"))
        while repository.find("linear").version == "1":
            time.sleep(0)  # yields until the one assignment
        with repository.using("linear") as version:
            assert version.version == "2"  # new calls already meet the new version
        assert IndexEntry("linear", "1", "UNLOADING") in repository.index()
        assert not switched.done()
        old.gate.set()
        switched.result(30)
        np.testing.assert_allclose(inside.result(30), X @ kit.WEIGHTS, rtol=1e-5)
    assert repository.index() == [IndexEntry("linear", "2", "READY")]


def test_a_load_that_fails_keeps_the_old_version_and_says_so_in_the_index(kit):
    def refuse(servable, contract, statistics):
        if servable.version == "2":
            raise InvalidInput("this model does not warm up")
        return probe.plan(servable, contract, statistics)

    repository = Repository(refuse)
    repository.add(kit.linear(version="1"))
    with pytest.raises(InvalidInput, match="does not warm up"):
        repository.switch(kit.linear(version="2"))
    assert repository.find("linear").version == "1"
    assert repository.index() == [
        IndexEntry("linear", "1", "READY"),
        IndexEntry("linear", "2", "UNAVAILABLE", "this model does not warm up"),
    ]
    assert repository.index(ready_only=True) == [IndexEntry("linear", "1", "READY")]
    repository.switch(kit.linear(version="3"))
    assert repository.index() == [IndexEntry("linear", "3", "READY")]


def test_failing_loads_do_not_grow_the_index(kit):
    def refuse(servable, contract, statistics):
        raise InvalidInput("no")

    repository = Repository(refuse)
    for version in range(5):
        with pytest.raises(InvalidInput):
            repository.add(kit.linear(version=str(version)))
    assert len(repository.index()) == 1


@pytest.mark.parametrize(
    ("name", "version"), [("", "1"), ("m", ""), ("m", "9" * 5000), ("a\nb", "1")]
)
def test_a_model_without_a_usable_name_is_refused(kit, name, version):
    repository = Repository()
    with pytest.raises(InvalidInput, match="1 to 256 printable characters"):
        repository.add(kit.linear(name=name, version=version))
    assert repository.index() == []


def test_an_unloaded_version_is_not_found_and_the_message_names_what_is_there(kit):
    repository = Repository()
    repository.add(kit.linear(version="1"))
    repository.add(kit.linear(version="2"))
    repository.unload("linear", "2")
    with pytest.raises(NotFound, match=r"no version '2'; it has \['1'\]"):
        repository.find("linear", "2")
    repository.close()
    with pytest.raises(NotFound, match=r"no model 'linear'; this server has \[\]"):
        repository.find("linear")
    with pytest.raises(NotFound):
        repository.unload("linear")


def test_a_dropped_version_lets_its_session_go(kit):
    import weakref

    repository = Repository()
    servable = kit.linear()
    gone = weakref.ref(servable.session)
    repository.add(servable)
    repository.switch(kit.linear(version="2"))
    del servable
    assert gone() is None


@pytest.mark.slow
@pytest.mark.parametrize("plan", [None, probe.plan], ids=["direct", "probed"])
def test_no_call_fails_and_none_is_answered_wrongly_over_20_switches(serve, connect, kit, plan):
    server = serve(kit.linear(version="1"), plan=plan)
    stop, failures, answers = threading.Event(), [], [0] * 4

    def ask(number):
        client = connect(server)
        x = np.full((1, 4), number + 1, np.float32)
        while not stop.is_set():
            try:
                result = client.infer("linear", [kit.tensor("x", x)])
            except triton.InferenceServerException as error:
                failures.append(error)
                return
            version = int(result.get_response().model_version)
            np.testing.assert_allclose(result.as_numpy("y"), x @ (kit.WEIGHTS * version), rtol=1e-4)
            answers[number] += 1

    with ThreadPoolExecutor(4) as pool:
        askers = [pool.submit(ask, number) for number in range(4)]
        for version in range(2, 22):
            seen = sum(answers)
            servable = kit.linear(version=str(version), weights=kit.WEIGHTS * version)
            server.repository.switch(servable)
            while sum(answers) < seen + 4 and not failures:
                time.sleep(0)  # yields until each asker had an answer from this version
        stop.set()
        for asker in askers:
            asker.result(30)
    assert not failures
    assert server.repository.find("linear").version == "21"


@pytest.mark.slow
def test_memory_does_not_grow_with_switches(kit):
    weights = np.zeros((2048, 2048), np.float32)  # 16 MiB
    process, repository = psutil.Process(), Repository()
    repository.add(kit.linear(weights=weights))
    before = process.memory_info().rss
    for version in range(2, 8):
        repository.switch(kit.linear(weights=weights, version=str(version)))
    assert process.memory_info().rss - before < 2 * weights.nbytes


def test_an_unloaded_version_lets_its_session_go(kit):
    import weakref

    repository = Repository()
    servable = kit.linear()
    gone = weakref.ref(servable.session)
    repository.add(servable)
    version = repository.find("linear")
    repository.unload("linear")
    del servable
    assert gone() is None
    assert not version.enter()
