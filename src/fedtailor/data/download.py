"""Fetch one published file: several mirrors, checksum, retry, resume; nothing half written under its final name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RemoteFile:
    """A published file: where it goes in the cache, where it can be had, and what it must be."""

    path: str  # relative to the cache folder
    mirrors: tuple[str, ...]  # full addresses, tried in order
    checksum: str  # "sha256:..." or "md5:...", as published
    size: int  # bytes
