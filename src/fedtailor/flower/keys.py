"""Certificates and keys for a SuperLink: a fresh authority, whose own key is not kept, and keys of SuperNodes."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fedtailor.errors import FedtailorError, require
from fedtailor.storage.files import disk_errors

ISSUER = "fedtailor"
LOOPBACK = "127.0.0.1"
HERE = ("localhost", LOOPBACK)  # a SuperLink's own processes talk to it too, by these names
DAYS, MOST_DAYS = 30, 36_500
HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
LONGEST_NODE = 64
# In the order in which they are written: the last says that all are.
AUTHORITY = ("server.key", "server.crt", "ca.crt")


def write_keys(folder: Path, hosts: Sequence[str], nodes: Sequence[str], days: int) -> list[Path]:
    """Certificates of a SuperLink that answers under these names, and a key for each node; what is there stays.

    Nodes may get their keys later: they need no authority, because a SuperLink knows them by their public keys.
    """
    there = (folder / "ca.crt").exists()
    if there and hosts:
        raise FedtailorError(f"{folder} has an authority already: expected a new folder, or --node alone")
    require(there or bool(hosts), "--host", "", "a name or an address of the SuperLink's machine")
    require(1 <= days <= MOST_DAYS, "--days", days, f"1 to {MOST_DAYS:,}")
    keys = [folder / f"{node}.key" for node in dict.fromkeys(nodes)]
    for node in nodes:
        fine = HOST.fullmatch(node) is not None and len(node) <= LONGEST_NODE and node != "server"
        require(fine, "--node", node, f"up to {LONGEST_NODE} letters, digits, . and -")
    new = [file for key in keys for file in (key, key.with_suffix(".pub"))]
    for file in new if there else [*new, *(folder / name for name in AUTHORITY)]:
        if os.path.lexists(file):
            raise FedtailorError(f"{file} exists already: it stays as it is")
    if not there:
        write_authority(folder, list(dict.fromkeys([*hosts, *HERE])), days)
    return [write_node_key(key) for key in keys]


def write_authority(folder: Path, hosts: Sequence[str] = HERE, days: int = DAYS) -> None:
    """``ca.crt``, ``server.crt`` and ``server.key``; the authority's own key is not kept."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    names = [_name(x509, host) for host in hosts]
    root, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key())
    of_authority = [(x509.BasicConstraints(ca=True, path_length=0), True), (_usage(x509, signs=True), True)]
    of_server = [
        (x509.BasicConstraints(ca=False, path_length=None), True), (_usage(x509, signs=False), True),
        (issuer, False), (x509.SubjectAlternativeName(names), False),
    ]  # fmt: skip
    authority = _unsigned(x509, ISSUER, root.public_key(), days, of_authority)
    certificate = _unsigned(x509, hosts[0][:64], server.public_key(), days, of_server)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    written = [
        server.private_bytes(pem, form, serialization.NoEncryption()),
        certificate.sign(root, hashes.SHA256()).public_bytes(pem),
        authority.sign(root, hashes.SHA256()).public_bytes(pem),
    ]
    for name, data in zip(AUTHORITY, written, strict=True):
        _write(folder / name, data, secret=name.endswith(".key"))


def _unsigned(x509: Any, subject: str, key: Any, days: int, extensions: Sequence[tuple[Any, bool]]) -> Any:
    """A certificate to be signed by the authority; Python 3.13 refuses one that does not say whose key it is."""

    def named(text: str) -> Any:
        return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)])

    now = datetime.now(UTC)
    built = x509.CertificateBuilder().subject_name(named(subject)).issuer_name(named(ISSUER))
    built = built.public_key(key).serial_number(x509.random_serial_number())
    built = built.not_valid_before(now - timedelta(minutes=5)).not_valid_after(now + timedelta(days=days))
    for extension, critical in [(x509.SubjectKeyIdentifier.from_public_key(key), False), *extensions]:
        built = built.add_extension(extension, critical=critical)
    return built


def _usage(x509: Any, *, signs: bool) -> Any:
    """What a key is for: an authority's signs certificates, a server's shows that it is the server."""
    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


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
    """A new file: never into one that is there, nor through a link, and nobody else reads a secret meanwhile."""
    how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with disk_errors(path, len(data)):
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, how, 0o600 if secret else 0o644), "wb") as file:
            file.write(data)
