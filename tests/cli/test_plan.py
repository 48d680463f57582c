"""`triplane plan`: what it prints, writes and refuses."""

import json
import sys
from xml.etree import ElementTree as ET

import pytest

from triplane.unified_ir.cli import shell

NET = """
from triplane.unified_ir import nn


class Net(nn.Sequential):
    def __init__(self):
        print("a print of the user's own")
        super().__init__(nn.Dense(1024, 4096), nn.ReLU(), nn.Dense(4096, 16))
"""


@pytest.fixture
def net(tmp_path):
    path = tmp_path / "planned_net.py"
    path.write_text(NET)
    yield f"{path}:Net"
    sys.modules.pop("planned_net", None)


def run(capsys, *argv):
    code = shell.run(["plan", *map(str, argv)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_table_fits_80_columns(capsys, net, tmp_path):
    picture = tmp_path / "plan.svg"
    common = (net, "--input", "1024", "--batch-size", "512", "--devices", "6")
    code, out, err = run(capsys, *common, "--train", "--out", picture)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "train_step on 6 devices, mesh" in out
    assert "assumed rates of data-centre GPUs, 8 a host (--topology FILE gives others)" in out
    for text in ("predicted time", "memory", "next best", "(loss and update)"):
        assert text in out
    root = ET.fromstring(picture.read_text())
    assert root.tag.endswith("svg")
    assert run(capsys, *common)[1].startswith("a print of the user's own\npredict on 6 devices")


def test_json_has_every_node_and_nothing_else(capsys, net):
    code, out, _ = run(
        capsys, net, "--input", "1024", "--batch-size", "512", "--devices", "4", "--json",
        "--explain", "Gemm",
    )  # fmt: skip
    record = json.loads(out)
    assert code == 0
    assert record["devices"] == 4
    assert record["sizes"] == {"N": 512}
    assert record["search"]["gap"] == 0
    memory = record["memory"]
    assert memory["total_bytes"] == memory["argument_bytes"] + memory["temporary_bytes"]
    gemm = [n for n in record["nodes"] if n["operator"] == "Gemm"]
    assert [len(n["split"]) for n in gemm] == [3, 3]
    assert set(record["parameters"]) == {"x", "0.weight", "0.bias", "2.weight", "2.bias"}
    explained = record["explained"]
    assert sum(a["chosen"] for a in explained["alternatives"]) == 1
    assert explained["rule"] == "product: rows m, sums k, columns n"


@pytest.mark.parametrize("node", ["0", "Gemm"])
def test_a_node_is_explained(capsys, net, node):
    _, out, _ = run(
        capsys, net, "--input", "1024", "--batch-size", "512", "--devices", "4", "--explain", node
    )
    assert "rule: product: rows m, sums k, columns n" in out
    assert sum(line.startswith("* ((") for line in out.splitlines()) == 1
    assert max(map(len, out.splitlines())) <= 80


def test_a_topology_changes_the_plan(capsys, net, tmp_path):
    file = tmp_path / "slow.json"
    file.write_text('{"inside": {"bytes_per_s": 1e6}}')
    common = (net, "--input", "1024", "--batch-size", "512", "--devices", "4", "--json", "--train")
    slow, fast = (json.loads(run(capsys, *common, *more)[1])
                  for more in (("--topology", file), ()))  # fmt: skip
    assert slow["topology"]["source"].startswith(f"rates of {file}; assumed: flops_per_s, ")
    assert slow["sent_bytes"] < fast["sent_bytes"]


def test_a_model_file_is_planned_by_its_entry(capsys, tmp_path):
    import numpy as np

    from triplane.unified_ir import nn, optim, train

    trainer = train.Trainer(
        nn.Sequential(nn.Dense(8, 4)), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1)
    )
    trainer.prepare(np.zeros((2, 8), np.float32), np.zeros(2, np.int64))
    path = tmp_path / "m.tpm"
    trainer.export(["predict", "train_step"]).save(path)
    assert run(capsys, path, "--devices", "2")[1].startswith("train_step on 2 devices")
    entry = run(capsys, path, "--devices", "2", "--entry", "predict")
    assert entry[1].startswith("predict on 2 devices")
    code, _, err = run(capsys, path, "--devices", "2", "--train")
    assert code == 2
    assert "has its inputs and its training step" in err


def test_the_plan_is_kept_in_a_model_file_and_in_its_export(capsys, tmp_path):
    import numpy as np
    import onnx

    from triplane.unified_ir import nn, optim, train
    from triplane.unified_ir.onnx.importer import import_onnx
    from triplane.unified_ir.ops.check import load
    from triplane.unified_ir.passes.sharding import plan

    source, planned, file = (tmp_path / name for name in ("m.tpm", "planned.tpm", "m.onnx"))
    trainer = train.Trainer(
        nn.Sequential(nn.Dense(1024, 512), nn.ReLU(), nn.Dense(512, 16)),
        loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1),
    )  # fmt: skip
    trainer.prepare(np.zeros((2, 1024), np.float32), np.zeros(2, np.int64))
    trainer.export(["train_step", "predict"]).save(source)
    common = ("--devices", "4", "--batch-size", "512")
    assert run(capsys, source, *common, "--out-model", planned)[0] == 0
    best = plan(load(source).entry("predict"), 4, sizes={"N": 512})
    nodes = load(planned).entry("predict").nodes
    assert {i: n.strategy for i, n in enumerate(nodes) if n.strategy} == best.strategies()
    assert not any(n.strategy for n in load(planned).entry("train_step").nodes)
    assert "as written       " in run(capsys, planned, *common, "--entry", "predict")[1]
    assert shell.run(["export", str(planned), str(file)]) == 0
    assert onnx.load(file).configuration[0].num_devices == 4
    splits = [n.strategy for n in import_onnx(file).entry("predict").nodes if n.strategy]
    assert ((4, 1), (1, 1), (1,)) in splits
    assert len(splits) == len(best.strategies())
    code, _, err = run(capsys, planned, *common, "--out-model", planned)
    assert (code, "which is an input" in err) == (2, True)


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ((), "is traced with the shape of one sample: add --input 784"),
        (("--input", "3x-1"), "--input is a shape such as 3x224x224"),
        (("--input", "float7:3"), "float7"),
        (("--input", "1024", "--entry", "predict"), "--entry is for a model file"),
        (("--input", "1024", "--memory", "12 parsecs"), "memory is a number with a unit"),
        (("--input", "1024", "--memory", "0GiB"), "memory is a number with a unit"),
        (("--input", "1024", "--memory", "1KiB"), "the smallest one needs"),
        (("--input", "1024", "--out", "plan.png"), "--out writes a picture, NAME.svg"),
        (("--input", "1024", "--out-model", "m.tpm"), "--out-model writes a model file with its"),
        (("--input", "1024", "--explain", ""), "no node is called ''; give the number of a node"),
        (
            ("--input", "1024", "--batch-size", f"{10**20}"),
            "a plan takes at most 1,152,921,504,606,846,976 a tensor\n",
        ),
        (("--input", "1024", "--explain", "Nothing"), "no node is called 'Nothing'"),
        (("--input", "1024", "--explain", "123456"), "no node is called '123456'"),
        (("--input", "1024", "--sizes", "M=8"), "the inputs of predict have the sizes ['N'], but"),
        (("--input", "1024", "--devices", "5000"), "devices must be a number from 1 to 4096"),
        (
            ("--input", "1024", "--stages", "5000"),
            "stages must be a number from 1 to 4096, got 5000",
        ),
        (("--batch-size", "8", "--sizes", "N=3"), "--batch-size is the size N, so leave N out"),
        (("--measure", "rates.json"), "--measure times this machine's devices; it takes no model"),
    ],
)
def test_mistakes_are_named(capsys, net, argv, why):
    devices = () if {"--devices", "--stages"} & {*argv} else ("--devices", "4")
    code, _, err = run(capsys, net, *devices, *argv)
    assert code == 2
    assert why in err


def test_a_batch_size_beside_a_measurement_is_refused(capsys, tmp_path):
    file = tmp_path / "rates.json"
    code, _, err = run(capsys, "--measure", file, "--batch-size", "8")
    assert (code, "it takes no model and no option of a plan" in err) == (2, True)
    assert not file.exists()


def test_a_model_file_with_a_plan_has_the_suffix_of_one(capsys, tmp_path):
    wrong = tmp_path / "planned.onnx"
    code, _, err = run(capsys, tmp_path / "m.tpm", "--devices", "4", "--out-model", wrong)
    assert (code, "a model file is written" in err) == (2, True)


def test_memory_sizes_have_units(capsys, net):
    common = (net, "--input", "1024", "--devices", "4")
    assert run(capsys, *common, "--memory", "16GiB")[0] == 0
    assert run(capsys, *common, "--memory", "1.5 GB")[0] == 0
    assert run(capsys, *common, "--memory", "800mb")[0] == 0


def test_stages_are_cut_instead_of_splitting(capsys, net):
    common = (net, "--input", "1024", "--stages", "2", "--microbatches", "4")
    code, out, err = run(capsys, *common, "--train")
    assert (code, err) == (0, "")
    assert "loss in 2 stages, 4 microbatches (N=8 in each)" in out
    assert "stage 2 .  F1 F2 F3 F4 B1 B2 B3 B4 ." in out
    record = json.loads(run(capsys, *common, "--json")[1])
    assert record["bubble"] == pytest.approx(1 / 5)
    assert record["stages"][0]["layers"] == ["0"]


def test_buckets_are_compared(capsys, net):
    common = (net, "--input", "1024", "--batch-size", "512", "--devices", "4", "--buckets")
    code, out, err = run(capsys, *common, "--train")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "assumed rates of data-centre GPUs" in out
    assert "ready times: predicted" in out
    for text in ("planned", "25 MiB, the first 1 MiB", "one all-reduce"):
        assert f"\n{text}" in out
    record = json.loads(run(capsys, *common, "--train", "--json")[1])
    assert (record["sizes"], record["devices"]) == ({"N": 512}, 4)
    plans = {p["what"]: p for p in record["plans"]}
    assert plans["planned"]["exposed_seconds"] == min(p["exposed_seconds"] for p in plans.values())
    assert sum(g["bytes"] for g in record["gradients"]) > 4 * 1024 * 4096
    why = "--explain belongs to a plan, and --buckets shows none"
    assert why in run(capsys, *common, "--explain", "0")[2]
    assert "a row for each sample; buckets are for training steps" in run(capsys, *common)[2]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ((), "add --devices N to split each layer over N devices, or --stages N"),
        (("--microbatches", "4"), "--microbatches are those of a pipeline; add --stages N"),
        (
            ("--stages", "2", "--devices", "2"),
            "--stages cuts the layers into a pipeline; choose one",
        ),
        (("--stages", "2", "--microbatches", "5"), "32 does not divide into 5 equal microbatches"),
        (("--stages", "2", "--buckets"), "--buckets belongs to a plan with --devices"),
        (("--buckets",), "add --devices N"),
        (("--devices", "2", "--buckets", "--out", "x.svg"), "--out belongs to a plan"),
    ],
)
def test_devices_or_stages_are_planned(capsys, net, options, why):
    code, _, err = run(capsys, net, "--input", "1024", *options)
    assert code
    assert why in err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ((), "plan needs a model"),
        (("--devices", "2"), "plan needs a model"),
        (("--measure", "m.json", "--devices", "2"), "it takes no model and no option of a plan"),
        (("--measure", "m.json", "--buckets"), "it takes no model and no option of a plan"),
    ],
)
def test_a_model_or_a_measurement_is_wanted(capsys, options, why):
    code, _, err = run(capsys, *options)
    assert code != 0
    assert why in err
