"""A device's folder: settings, one process, and what a broken file gives."""

import os

import pytest

from triplane.device.home import DeviceHome, DeviceSettings
from triplane.proto.disk import OS_DISK
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound


def test_settings_come_back_and_absent_ones_are_the_defaults(tmp_path):
    home = DeviceHome(tmp_path / "home")
    assert home.settings == DeviceSettings()
    home.make()
    chosen = DeviceSettings().but(
        data=tmp_path / "a.npz", population="cameras", held_out=0.5, x=["ch*"],
        form={"window": 32, "size": (3, 8, 8), "query": "select 1", "pixels": False,
              "keep": ("file",)},
    )  # fmt: skip
    home.save_settings(chosen)
    assert home.settings == chosen
    assert chosen.data == str(tmp_path / "a.npz")
    assert chosen.x == ("ch*",)
    assert chosen.but(data=None, population=None, held_out=None) == chosen
    changed = chosen.but(data=None, population=None, held_out=None, form={"window": 9})
    assert changed.form == {**chosen.form, "window": 9}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"other": 1}',
        '{"held_out": "x"}',
        '{"held_out": 1}',
        '{"population": ""}',
        '{"x": [1]}',
        '{"y": "y"}',
        '{"form": ["window"]}',
        '{"form": {"windows": 3}}',
        '{"form": {"window": "3"}}',
        '{"form": {"window": true}}',
        '{"form": {"size": [8]}}',
        '{"form": {"size": [8, 0]}}',
        '{"form": {"keep": "file"}}',
        '{"form": {"keep": [1]}}',
    ],
)
def test_settings_that_are_none_are_corrupt_and_name_the_file(tmp_path, text):
    home = DeviceHome(tmp_path)
    home.settings_file.write_text(text)
    with pytest.raises(Corrupt, match=r"device\.json cannot be read"):
        _ = home.settings


@pytest.mark.parametrize(
    ("field", "value"), [("population", "x" * 65), ("held_out", -0.1), ("held_out", float("nan"))]
)
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(InvalidInput, match=field):
        DeviceSettings(**{field: value})


def test_the_processor_time_of_a_task_is_that_of_all_processors():
    """Threads count together: a task on many of them may take an hour as well."""
    assert DeviceSettings().max_cpu_s == 3600.0 * (os.cpu_count() or 1)


def test_one_process_works_in_a_home(tmp_path):
    assert not DeviceHome(tmp_path).is_held
    with DeviceHome(tmp_path).held():
        assert DeviceHome(tmp_path).is_held
        second = DeviceHome(tmp_path).held()
        with pytest.raises(Conflict, match="another process works in"):
            second.__enter__()
    assert not DeviceHome(tmp_path).is_held


def test_only_its_user_may_enter(tmp_path):
    home = DeviceHome(tmp_path / "home")
    home.make()
    assert home.path.stat().st_mode & 0o777 == 0o700


def test_an_empty_home_says_how_to_enrol(tmp_path):
    with pytest.raises(NotFound, match="triplane cloud token --role device"):
        DeviceHome(tmp_path).require_enrolled()


def test_what_a_killed_process_wrote_in_part_goes_when_the_next_one_works_here(tmp_path):
    home = DeviceHome(tmp_path / "home")
    home.make()
    kept = [home.pending / "0.update", home.pending / "0.out", home.personal / "0.state"]
    partial = [
        home.path / ".device.json.ab.tmp", home.personal / ".0.state.cd.tmp",
        home.pending / ".0.update.ef.tmp", home.pending / "1.new", home.pending / "2.out",
    ]  # fmt: skip
    for path in (*kept, *partial):
        path.write_bytes(b"x")
    with home.held():
        assert [path.exists() for path in kept] == [True] * len(kept)
        assert [path.exists() for path in partial] == [False] * len(partial)


def test_an_unfinished_download_is_synced_before_it_goes_on(tmp_path, monkeypatch):
    home = DeviceHome(tmp_path / "home")
    home.make()
    partial = home.plans / "partial" / ("ab" * 32)
    partial.parent.mkdir()
    partial.write_bytes(b"all bytes, none synced")
    synced = []
    monkeypatch.setattr(OS_DISK, "sync", lambda file: synced.append(file.name), raising=False)
    with home.held():
        assert list(map(str, synced)) == [str(partial)]
    assert partial.read_bytes() == b"all bytes, none synced"
