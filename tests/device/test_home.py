"""A device's folder: settings, one process, and what a broken file gives."""

import pytest

from triplane.device.home import DeviceHome, Settings
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound


def test_settings_come_back_and_absent_ones_are_the_defaults(tmp_path):
    home = DeviceHome(tmp_path / "home")
    assert home.settings == Settings()
    home.make()
    chosen = Settings().but(data=tmp_path / "a.npz", population="cameras", held_out=0.5)
    home.save_settings(chosen)
    assert home.settings == chosen
    assert chosen.data == str(tmp_path / "a.npz")
    assert chosen.but(data=None, population=None, held_out=None) == chosen


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"other": 1}', '{"held_out": "x"}', '{"held_out": 1}', '{"population": ""}'],
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
        Settings(**{field: value})


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
