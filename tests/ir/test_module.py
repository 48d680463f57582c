"""Model files: what is saved comes back, equal modules give equal bytes, damage is named."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.attacks import forge
from tests.ir import graphs

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.files import container
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.ir import Module, Role, StateTensor, TensorSpec
from triplane.unified_ir.ir.codec import PART, encode
from triplane.unified_ir.ir.graph import Function, ModuleContents, Value
from triplane.unified_ir.ir.module import WEIGHTS_PART, read
from triplane.unified_ir.ir.text import module_text
from triplane.unified_ir.ops.check import load
from triplane.unified_ir.ops.evaluate import run_function
from triplane.unified_ir.ops.table import TABLE

ROOT = Path(__file__).parents[2]


def test_a_module_comes_back_whole(tmp_path):
    module = graphs.module()
    digest = module.save(tmp_path / "m.tpm")
    found = load(tmp_path / "m.tpm", digest)
    assert module_text(found) == module_text(module)
    assert dict(found.meta) == dict(module.meta)
    for name, tensor in module.state.items():
        assert found.state[name].role is tensor.role
        if tensor.role is not Role.PERSONAL:
            assert found.state[name].array.tobytes() == tensor.array.tobytes()
    args = graphs.arguments(module.entry("train_step"))
    for a, b in zip(
        run_function(TABLE, module.entry("train_step"), args),
        run_function(TABLE, found.entry("train_step"), args),
        strict=True,
    ):
        assert a.tobytes() == b.tobytes()


def test_saving_what_was_loaded_gives_the_same_bytes(tmp_path):
    first = graphs.module().save(tmp_path / "a.tpm")
    assert load(tmp_path / "a.tpm").save(tmp_path / "b.tpm") == first
    assert (tmp_path / "a.tpm").read_bytes() == (tmp_path / "b.tpm").read_bytes()


SAVE = """
import sys
from tests.ir import graphs
from triplane.unified_ir.ir.text import function_text, module_text
print(graphs.module().save(sys.argv[1]))
print(module_text(graphs.module()))
for name in graphs.WITH_REGIONS:
    print("".join(map(function_text, graphs.with_gradients(name))))
"""


@pytest.mark.slow
def test_every_process_gives_the_same_text_and_bytes(tmp_path):
    seen = set()
    for seed in ("0", "42"):
        path = tmp_path / f"{seed}.tpm"
        printed = subprocess.run(
            [sys.executable, "-c", SAVE, str(path)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            check=True,
            cwd=ROOT,
        )
        seen.add((printed.stdout, path.read_bytes()))
    assert len(seen) == 1
    ((text, data),) = seen
    here = graphs.module().save(tmp_path / "here.tpm")
    assert text.startswith(here.encode())
    assert data == (tmp_path / "here.tpm").read_bytes()


def test_arrays_are_read_only_views_of_the_file(tmp_path):
    graphs.module().save(tmp_path / "m.tpm")
    array = load(tmp_path / "m.tpm").state["w"].array
    assert not array.flags.writeable
    assert not array.flags.owndata


def test_personal_state_never_enters_a_file(tmp_path):
    module = graphs.module()
    secret = np.array([1.2345e-17, 8.7654e21, -3.1e9], np.float32)
    held = {**module.state, "user.head": StateTensor(Role.PERSONAL, secret)}
    digest = Module(module.functions, module.entries, held).save(tmp_path / "a.tpm")
    data = (tmp_path / "a.tpm").read_bytes()
    assert not any(secret[i : i + 1].tobytes() in data for i in range(3))
    held["user.head"] = StateTensor(Role.PERSONAL, secret + 1)
    assert Module(module.functions, module.entries, held).save(tmp_path / "b.tpm") == digest
    found = load(tmp_path / "a.tpm").state["user.head"]
    assert found.role is Role.PERSONAL
    assert found.type == module.state["user.head"].type
    assert not found.array.any()


def test_a_file_that_carries_personal_state_is_refused(tmp_path):
    data, tensors = encoded()
    roles = {n: str(t.role) for n, t in graphs.module().state.items()}
    smuggled = {**tensors, "user.head": np.full(3, 7.5, np.float32)}
    write(tmp_path / "m.tpm", data, smuggled, roles)
    with pytest.raises(Corrupt, match=r"'user.head', which nothing uses"):
        load(tmp_path / "m.tpm")


def test_the_manifest_lists_every_tensor_with_its_role(tmp_path):
    graphs.module().save(tmp_path / "m.tpm", parent="ab" * 32)
    manifest = Container(tmp_path / "m.tpm", kind="model").manifest
    roles = {t.name: t.role for t in manifest.tensors}
    constants = [n for n in roles if n.startswith("constant.")]
    assert [roles[n] for n in constants] == [""]
    assert {n: r for n, r in roles.items() if n not in constants} == {
        n: str(role) for n, (role, _) in graphs.STATE.items() if role is not Role.PERSONAL
    }
    assert manifest.parent == "ab" * 32


def test_roles_that_differ_from_the_manifest_are_refused(tmp_path):
    data, tensors = encoded()
    write(tmp_path / "m.tpm", data, tensors, {"w": "buffer"})
    with pytest.raises(Corrupt, match=r"m.tpm: roles in the manifest"):
        load(tmp_path / "m.tpm")


def test_state_of_another_type_than_its_use_is_refused(tmp_path):
    x = Value(TensorSpec((2,)), "w")
    function = Function("f", (x,), (x,), ("y",), ())
    with pytest.raises(InvalidInput, match="uses state 'w' as"):
        Module({"f": function}, {}, {"w": StateTensor(Role.BUFFER, np.zeros(3, np.float32))})
    contents = ModuleContents({"f": function}, {}, {"w": StateTensor(Role.BUFFER, np.zeros(3))})
    data, tensors = encode(contents)
    write(tmp_path / "m.tpm", data, tensors, {"w": "buffer"})
    with pytest.raises(Corrupt, match=r"module.pb: function 'f' uses state 'w' as"):
        read(tmp_path / "m.tpm")


def test_another_set_of_parts_is_refused(tmp_path):
    data, _ = encoded()
    container.write(tmp_path / "m.tpm", "model", [container.part(PART, data)])
    with pytest.raises(Corrupt, match="a model has"):
        load(tmp_path / "m.tpm")


def test_another_kind_of_file_is_refused(tmp_path):
    container.write(tmp_path / "m.tpm", "plan", [container.part("a", b"")])
    with pytest.raises(InvalidInput, match="is a plan file"):
        load(tmp_path / "m.tpm")


def test_another_root_digest_is_refused(tmp_path):
    graphs.module().save(tmp_path / "m.tpm")
    with pytest.raises(Corrupt, match="root digest is"):
        load(tmp_path / "m.tpm", "00" * 32)


def test_state_named_like_a_constant_is_refused(tmp_path):
    module = graphs.module()
    _, tensors = encode(ModuleContents(module.functions))
    (name,) = tensors
    state = {name: StateTensor(Role.BUFFER, np.zeros(1, np.float32))}
    with pytest.raises(InvalidInput, match="name of a constant"):
        Module(module.functions, {}, state).save(tmp_path / "m.tpm")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_every_flipped_byte_is_refused_and_named(tmp_path):
    path = tmp_path / "m.tpm"
    graphs.module(big=300).save(path)
    named = ("manifest", "module.pb", "weights.safetensors", "container directory")
    for at in forge.flips(path):
        with pytest.raises(Corrupt) as caught:
            load(path)
        assert str(caught.value).startswith("m.tpm: "), at
        assert any(name in str(caught.value) for name in named), at
    load(path)


@pytest.mark.slow
def test_random_bytes_of_a_large_file_are_refused(tmp_path):
    path = tmp_path / "m.tpm"
    graphs.module(big=1_000_000).save(path)
    rng = np.random.default_rng(1)
    for _ in forge.flips(path, rng.integers(0, path.stat().st_size, 25).tolist()):
        with pytest.raises(Corrupt, match=r"m\.tpm: "):
            load(path)


def test_a_flipped_weight_names_its_tensor(tmp_path):
    path = tmp_path / "m.tpm"
    graphs.module().save(path)
    at = path.read_bytes().index(graphs.STATE["w"][1].tobytes())
    for _ in forge.flips(path, [at]):
        with pytest.raises(Corrupt, match="damaged in tensor 'w'"):
            load(path)


def encoded():
    module = graphs.module()
    return encode(ModuleContents(module.functions, module.entries, module.state, module.meta))


def write(path, data, tensors, roles):
    held = {n: r for n, r in roles.items() if n in tensors}
    weights = container.tensor_part(WEIGHTS_PART, tensors, held)
    container.write(path, "model", [container.part(PART, data), weights])
