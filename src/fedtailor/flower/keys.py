"""Certificates and keys for a SuperLink: a fresh authority, whose own key is not kept, and keys of SuperNodes."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fedtailor.errors import FedtailorError, require

ISSUER = "fedtailor"
LOOPBACK = "127.0.0.1"
HERE = ("localhost", LOOPBACK)  # a SuperLink's own processes talk to it too, by these names
DAYS = 30
HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


def write_keys(folder: Path, hosts: Sequence[str], nodes: Sequence[str], days: int) -> list[Path]:
    """Certificates of a SuperLink that answers under these names, and a key for each node; what is there stays.

    Nodes may get their keys later: they need no authority, because a SuperLink knows them by their public keys.
    """
    there = (folder / "ca.crt").exists()
    if there and hosts:
        raise FedtailorError(f"{folder} has an authority already: expected a new folder, or --node alone")
    require(there or bool(hosts), "--host", "", "a name or an address of the SuperLink's machine")
    keys = [folder / f"{node}.key" for node in nodes]
    for node, key in zip(nodes, keys, strict=True):
        require(
            HOST.fullmatch(node) is not None and node != "server", "--node", node, "letters, digits, . and -"
        )
        if key.exists():
            raise FedtailorError(f"{key} exists already: it stays as it is")
    folder.mkdir(parents=True, exist_ok=True)
    if not there:
        write_authority(folder, list(dict.fromkeys([*hosts, *HERE])), days)
    return [write_node_key(key) for key in keys]


def write_authority(folder: Path, hosts: Sequence[str] = HERE, days: int = DAYS) -> None:
    """``ca.crt``, ``server.crt`` and ``server.key``; the authority's own key is not kept."""
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
        return built.not_valid_before(now - timedelta(minutes=5)).not_valid_after(now + timedelta(days=days))

    root, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    authority = unsigned(ISSUER, ISSUER, root.public_key())
    authority = authority.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    names = [_name(x509, host) for host in hosts]
    certificate = unsigned(hosts[0][:64], ISSUER, server.public_key())
    certificate = certificate.add_extension(x509.SubjectAlternativeName(names), critical=False)
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


def _name(x509: Any, host: str) -> Any:
    """A host in a certificate: an address or a name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        require(HOST.fullmatch(host) is not None, "--host", host, "a name or an address, without a port")
        return x509.DNSName(host)


def _write(path: Path, data: bytes, secret: bool = False) -> None:
    path.touch(mode=0o600 if secret else 0o644)
    path.write_bytes(data)
