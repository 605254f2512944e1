"""Ed25519 keys that sign logs: a private one in a file that only its owner reads, a public one for everybody.

The private key lies where its owner keeps it, and never in a run folder. Public keys are in the first line of each log
and in a file beside the private one, as 64 hexadecimal digits.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtailor.errors import FedtailorError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

HEX = re.compile(r"[0-9a-f]{64}")
PUBLIC = ".pub"
LARGEST_KEY = 10_000  # bytes of a file


def new_key(path: Path) -> str:
    """Make a private key in a new file, and its public key beside it; the public key."""
    serialization, ed25519 = _library()
    key = ed25519.Ed25519PrivateKey.generate()
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
        Path(f"{path}{PUBLIC}").write_text(f"{public_of(key)}\n", encoding="ascii")
    except FileExistsError:
        raise FedtailorError(f"{path} is there already: expected a new file for a key") from None
    except OSError as error:
        raise FedtailorError(f"{path} cannot be written: {error.strerror or error}") from error
    return public_of(key)


def read_key(path: Path) -> Ed25519PrivateKey:
    """The private key in a file."""
    serialization, ed25519 = _library()
    advice = f"`fedtailor audit --new-key {path}` makes one"
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_KEY)
    except FileNotFoundError:
        raise FedtailorError(f"audit.key = {str(path)!r}: no such file; {advice}") from None
    except OSError as error:
        raise FedtailorError(
            f"audit.key = {str(path)!r} cannot be read: {error.strerror or error}"
        ) from error
    try:
        key: Ed25519PrivateKey | None = serialization.load_pem_private_key(text, None)
    except (ValueError, TypeError):  # TypeError: it has a password
        key = None
    if key is None or not isinstance(key, ed25519.Ed25519PrivateKey):
        raise FedtailorError(
            f"audit.key = {str(path)!r}: expected an Ed25519 private key without a password; {advice}"
        )
    return key


def public_of(key: Ed25519PrivateKey) -> str:
    """The public key as text."""
    serialization, _ = _library()
    raw = serialization.PublicFormat.Raw
    return str(key.public_key().public_bytes(serialization.Encoding.Raw, raw).hex())


def read_public(given: str) -> str:
    """A public key that was given as text or as the file that holds it."""
    path = Path(given)
    try:
        text = path.read_text(encoding="ascii")[:LARGEST_KEY].strip() if path.is_file() else given
    except (OSError, ValueError):
        text = ""
    if not HEX.fullmatch(text):
        raise FedtailorError(
            f"--key {given!r}: expected a public key of 64 hexadecimal digits, or the file that holds it"
        )
    return text


def is_signed(public: str, signature: str, text: bytes) -> bool:
    """Whether the owner of a public key signed this text."""
    _, ed25519 = _library()
    from cryptography.exceptions import InvalidSignature

    try:
        raw = bytes.fromhex(signature)
        if raw.hex() != signature:  # another spelling of the same bytes
            return False
        ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(raw, text)
    except (ValueError, InvalidSignature):
        return False
    return True


def _library() -> tuple[Any, Any]:
    """Two modules of ``cryptography``; without it, the error that names the extra."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise FedtailorError(
            "audit: signed logs need the package cryptography: pip install 'fedtailor[trust]'"
        ) from None
    return serialization, ed25519
