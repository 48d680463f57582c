"""Ways to damage one file of a node's home; each takes the node and a model that it serves."""

from triplane.edge.serving.pointers import read_pointers


def bundle_of(node, model):
    return node.home / "bundles" / read_pointers(node.home / "models")[0][model].sha256


def truncate(node, model):
    with bundle_of(node, model).open("r+b") as file:
        file.truncate(1000)


def flip(node, model):
    _flip(bundle_of(node, model), 0.5)


def remove(node, model):
    bundle_of(node, model).unlink()


def replace_by_folder(node, model):
    path = bundle_of(node, model)
    path.unlink()
    path.mkdir()
    (path / "inside").write_bytes(b"left by somebody")


def point_elsewhere(node, model):
    path = node.home / "models" / f"{model}.json"
    version = read_pointers(node.home / "models")[0][model].version
    path.write_text(path.read_text().replace(f'"version": {version}', '"version": 1234'))


def point_nowhere(node, model):
    (node.home / "models" / f"{model}.json").write_bytes(b"\xff\x00 no pointer")


def spoil_journal(node, _):
    _flip(node.home / "journal", 0.0)


def spoil_document(node, _):
    (node.home / "desired").write_bytes(b"\xff" * 50)


def _flip(path, where):
    data = bytearray(path.read_bytes())
    data[10 + int(where * (len(data) - 10))] ^= 1
    path.write_bytes(data)


DAMAGES = (
    truncate, flip, remove, replace_by_folder, point_elsewhere, point_nowhere, spoil_journal,
    spoil_document,
)  # fmt: skip
OF_BUNDLES = (truncate, flip, remove, replace_by_folder)
"""Those that need the file of a bundle."""
