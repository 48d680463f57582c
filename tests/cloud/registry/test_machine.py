"""The registry against a dictionary, under any order of calls and restarts, on both databases."""

import asyncio
import itertools
import secrets

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from tests.cloud.databases import SQLITE_FIRST
from tests.cloud.registry.models import QUICK, asked, child

from triplane.cloud.registry import Conversions, Lineage, Registry
from triplane.cloud.store import Database
from triplane.proto.blobs import BlobFolder
from triplane.proto.errors import Conflict, NotFound

NAMES = st.sampled_from(["a", "b"])
ALIASES = st.sampled_from(["stable", "beta"])
NUMBERS = st.integers(1, 4)
RUNS = itertools.count()


def machine(url, folder):
    class Machine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.runner = asyncio.Runner()
            self.run = self.runner.run
            self.prefix = f"run{next(RUNS)}."
            self.blobs = BlobFolder(folder / "blobs")
            self.versions: dict[str, list[bytes]] = {}
            self.aliases: dict[tuple[str, str], int] = {}
            self.pushes: list[tuple] = []
            self.database = Database.open(url)
            self.open()

        def open(self):
            conversions = Conversions(folder / "work", command=child(QUICK))
            self.registry = Registry(self.database, self.blobs, conversions)
            self.run(self.registry.start())

        def teardown(self):
            self.run(self.registry.stop())
            self.database.close()
            self.runner.close()

        def wanted(self, call, *expected):
            """The call's result, or the family among `expected` that it raised."""
            try:
                return self.run(call)
            except expected as error:
                return type(error)

        @rule()
        def restart(self):
            self.run(self.registry.stop())
            self.database.close()
            self.database = Database.open(url)
            self.open()

        @rule(name=NAMES, data=st.binary(max_size=2), aliases=st.sets(ALIASES),
              parent=st.none() | st.tuples(NAMES, NUMBERS))  # fmt: skip
        def push(self, name, data, aliases, parent):
            model = self.prefix + name
            lineage = Lineage(parent=f"{self.prefix}{parent[0]}@{parent[1]}" if parent else "")
            push = asked(self.blobs.put(data), model, aliases=tuple(aliases), lineage=lineage)
            made = self.wanted(self.registry.push(push, by="op"), NotFound)
            if parent and parent[1] > len(self.versions.get(self.prefix + parent[0], [])):
                assert made is NotFound
                return
            versions = self.versions.setdefault(model, [])
            versions.append(push.blob)
            self.aliases.update({(model, alias): len(versions) for alias in aliases})
            self.pushes.append((push, len(versions)))
            assert (made.version, made.blob, made.lineage) == (len(versions), push.blob, lineage)

        @rule(at=st.integers(0, 20), change=st.booleans())
        def push_again(self, at, change):
            if not self.pushes:
                return
            push, number = self.pushes[at % len(self.pushes)]
            if change:
                other = asked(self.blobs.put(secrets.token_bytes(8)), push.model, key=push.key)
                assert self.wanted(self.registry.push(other, by="op"), Conflict) is Conflict
            else:
                assert self.run(self.registry.push(push, by="op")).version == number

        @rule(name=NAMES, alias=ALIASES, number=st.integers(0, 4))
        def point(self, name, alias, number):
            model = self.prefix + name
            found = self.wanted(self.registry.set_alias(model, alias, number, by="op"), NotFound)
            if model not in self.versions or number > len(self.versions[model]):
                assert found is NotFound
            elif number:
                self.aliases[model, alias] = number
            else:
                self.aliases.pop((model, alias), None)

        @rule(name=NAMES, tag=ALIASES | NUMBERS | st.just("latest") | st.just(""))
        def resolve(self, name, tag):
            model = self.prefix + name
            found = self.wanted(self.registry.version(f"{model}@{tag}" if tag else model), NotFound)
            versions = self.versions.get(model, [])
            number = len(versions) if tag in {"", "latest"} else tag
            number = self.aliases.get((model, number)) if isinstance(number, str) else number
            if number is None or not 1 <= number <= len(versions):
                assert found is NotFound
            else:
                assert (found.version, found.blob) == (number, versions[number - 1])

        @invariant()
        def lists_agree(self):
            models = [m for m in self.run(self.registry.models()) if m.name.startswith(self.prefix)]
            assert {m.name: m.latest for m in models} == {
                model: len(versions) for model, versions in self.versions.items()
            }
            pointing = {(m.name, alias): v for m in models for alias, v in m.aliases}
            assert pointing == self.aliases
            for model, versions in self.versions.items():
                found = self.run(self.registry.versions(model))
                assert [v.blob for v in reversed(found)] == versions

    return Machine


@SQLITE_FIRST
@pytest.mark.slow
def test_the_registry_does_what_a_dictionary_does(database_url, tmp_path):
    bounds = settings(max_examples=12, stateful_step_count=20)
    run_state_machine_as_test(machine(database_url, tmp_path), settings=bounds)
