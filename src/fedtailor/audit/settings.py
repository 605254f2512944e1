"""Whether a run keeps a signed log, as settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedtailor.audit.keys import read_key


@dataclass(frozen=True)
class AuditSettings:
    """What a run can prove afterwards. It changes no result."""

    key: str = ""
    """The file of a private key, which signs a log of every round; `fedtailor audit --new-key FILE` makes one. Empty:
    no log."""

    @property
    def active(self) -> bool:
        """Whether there is a log."""
        return bool(self.key)

    @property
    def file(self) -> Path:
        """Where the key is."""
        return Path(self.key).expanduser()

    def check(self) -> None:
        """Refuse a key that cannot sign, before a run starts."""
        if self.active:
            read_key(self.file)
