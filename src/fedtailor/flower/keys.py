"""Certificates and keys for a SuperLink on this machine: a fresh authority, valid for a month."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

DAYS = 30
LOOPBACK = "127.0.0.1"


def write_authority(folder: Path, host: str = LOOPBACK) -> None:
    """``ca.crt``, ``server.crt`` and ``server.key`` for an IP address; the authority's own key is not kept."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def named(text: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def unsigned(subject: str, issuer: str, key: Any) -> Any:
        now = datetime.now(UTC)
        built = x509.CertificateBuilder().subject_name(named(subject)).issuer_name(named(issuer))
        built = built.public_key(key).serial_number(x509.random_serial_number())
        return built.not_valid_before(now - timedelta(minutes=5)).not_valid_after(now + timedelta(days=DAYS))

    root, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    authority = unsigned("fedtailor loopback", "fedtailor loopback", root.public_key())
    authority = authority.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(host))]
    certificate = unsigned("localhost", "fedtailor loopback", server.public_key())
    certificate = certificate.add_extension(x509.SubjectAlternativeName(here), critical=False)
    pem = serialization.Encoding.PEM
    _write(folder / "ca.crt", authority.sign(root, hashes.SHA256()).public_bytes(pem))
    _write(folder / "server.crt", certificate.sign(root, hashes.SHA256()).public_bytes(pem))
    form = serialization.PrivateFormat.PKCS8
    _write(folder / "server.key", server.private_bytes(pem, form, serialization.NoEncryption()), secret=True)


def write_node_key(path: Path) -> Path:
    """A SuperNode's private key, and the public one beside it, which is returned: it is what is registered."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
    _write(path, key.private_bytes(pem, form, serialization.NoEncryption()), secret=True)
    public = path.with_suffix(".pub")
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(public, line + b"\n")
    return public


def _write(path: Path, data: bytes, secret: bool = False) -> None:
    path.touch(mode=0o600 if secret else 0o644)
    path.write_bytes(data)
