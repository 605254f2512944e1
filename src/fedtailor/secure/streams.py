"""Keys and streams: X25519 agrees on secrets, HKDF derives keys from them, AES makes masks and seals what peers send.

A key is used for one stream alone: what it is for (round, class, plan) goes into its derivation, and secrets are new in
every round, so a counter that starts at 0 repeats nothing.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedtailor.errors import FedtailorError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

Words = NDArray[np.uint32]
NONCE_BYTES = 12
SEAL_BYTES = NONCE_BYTES + 16  # that sealing adds: the nonce, and the tag of AES-GCM


@dataclass(frozen=True)
class Pair:
    """A private key and its public half, as bytes."""

    private: bytes
    public: bytes

    @classmethod
    def new(cls) -> Pair:
        """From the system's entropy."""
        return cls.of(secrets.token_bytes(32))

    @classmethod
    def of(cls, private: bytes) -> Pair:
        """The pair of a private key."""
        return cls(private, _loaded(private).public_key().public_bytes_raw())


def agreed(own: bytes, public: bytes) -> bytes:
    """The secret that two share, from the private key of one and the public key of the other."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    try:
        return _loaded(own).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # a point of small order: everybody could work out what was agreed on
        raise FedtailorError("secure: a public key with which nothing secret can be agreed on") from None


def check_public(public: bytes) -> None:
    """Refuse a key that no client can agree on anything with: it would keep all of them from taking part."""
    agreed(secrets.token_bytes(32), public)


def _loaded(private: bytes) -> X25519PrivateKey:
    check_installed()
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private)


def check_installed() -> None:
    """Refuse with the extra's name where the package is missing."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise FedtailorError(
            "[secure] needs the package cryptography: pip install 'fedtailor[secure]'"
        ) from error


def derived(secret: bytes, purpose: str) -> bytes:
    """A key of 32 bytes for one purpose."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, salt=None, info=purpose.encode()).derive(secret)


def mask(secret: bytes, purpose: str, length: int) -> Words:
    """So many words of AES-256-CTR under a key for this purpose."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import CTR

    stream = Cipher(AES(derived(secret, f"mask {purpose}")), CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(4 * length)), dtype="<u4")


def sealed(secret: bytes, purpose: str, text: bytes) -> bytes:
    """A text that only those who share the secret can read or change."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + AESGCM(derived(secret, f"seal {purpose}")).encrypt(nonce, text, None)


def opened(secret: bytes, purpose: str, message: bytes) -> bytes:
    """The inverse; a message that was changed on its way is refused."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce, text = message[:NONCE_BYTES], message[NONCE_BYTES:]
    try:
        return AESGCM(derived(secret, f"seal {purpose}")).decrypt(nonce, text, None)
    except InvalidTag:
        raise FedtailorError(
            "secure: a share was changed on its way; the client takes no part any more"
        ) from None
