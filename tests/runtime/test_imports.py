import json
import subprocess
import sys

HEAVY = ("onnx", "onnxruntime", "grpc", "click", "rich", "jax", "safetensors", "ml_dtypes")


def loaded_after(statement: str) -> set[str]:
    script = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_importing_the_runtime_imports_nothing_heavy():
    assert not loaded_after("import triplane.unified_ir.runtime") & {*HEAVY}


def test_plans_and_bundles_import_onnxruntime_and_nothing_else_heavy():
    loaded = loaded_after("from triplane.unified_ir.runtime import Bundle, Plan, Session")
    assert loaded & {*HEAVY} == {"onnxruntime"}


def test_files_import_numpy_and_protobuf_only():
    assert not loaded_after("from triplane.unified_ir.files import container") & {*HEAVY}


def test_public_names_load():
    from triplane.unified_ir import runtime

    assert all(getattr(runtime, name) is not None for name in runtime.__all__)
