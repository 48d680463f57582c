"""The home of a node or a device: its identity and its settings."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Generic, TypeVar

from triplane.proto.credentials import IdentityFolder
from triplane.proto.disk import OS_DISK, write_atomic
from triplane.proto.errors import Corrupt, InvalidInput, NotFound

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")

MAX_SETTINGS_BYTES: Final = 64 << 10


class MachineHome(Generic[S]):
    """A home at `path`, with settings of the class `kind`, which checks its values.

    role: the role in its token. verb: its command. settings_name: the name of its settings file.
    """

    role: ClassVar[str]
    verb: ClassVar[str]
    settings_name: ClassVar[str]

    def __init__(self, path: Path | str, kind: type[S]) -> None:
        self.path = Path(path).expanduser().absolute()
        self.identity = IdentityFolder(self.path / "identity")
        self.settings_file = self.path / self.settings_name
        self._kind = kind

    def make_folders(self, *folders: Path) -> None:
        """Make the home and these folders; only this user may enter."""
        for folder in (self.path, *folders):
            OS_DISK.make_folder(folder)
        self.path.chmod(0o700)

    @property
    def is_enrolled(self) -> bool:
        """Whether the home has an identity."""
        return (self.identity.path / "cert.pem").is_file()

    def require_enrolled(self) -> None:
        """Raise NotFound unless the home has an identity."""
        if not self.is_enrolled:
            raise NotFound(
                f"no enrolled {self.role} in {self.path}; ask an operator for `triplane cloud "
                f"token --role {self.role}`, then: triplane {self.verb} enrol TOKEN --cloud "
                f"HOST:PORT --home {self.path}"
            )

    @property
    def settings(self) -> S:
        """The settings, or the defaults without a file. Corrupt names what is wrong with it."""
        try:
            # One byte beyond the limit is enough: a longer document is cut and fails to parse.
            data = self.settings_file.read_bytes()[: MAX_SETTINGS_BYTES + 1]
        except FileNotFoundError:
            return self._kind()
        except IsADirectoryError as error:
            raise Corrupt(f"{self.settings_file} cannot be read: it is a folder") from error
        try:
            values = json.loads(data)
            names = {field.name for field in fields(self._kind)}
            if not isinstance(values, dict) or not values.keys() <= names:
                raise InvalidInput(f"keys are {', '.join(sorted(names))}")
            return self._kind(**values)
        except (ValueError, TypeError, RecursionError) as error:
            raise Corrupt(f"{self.settings_file} cannot be read: {error}") from error

    def save_settings(self, settings: S) -> None:
        """Replace the file of settings."""
        text = json.dumps(asdict(settings), indent=1, sort_keys=True)
        write_atomic(self.settings_file, f"{text}\n".encode())
