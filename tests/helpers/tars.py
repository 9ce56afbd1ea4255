"""Tars with any members, and what sources make of them."""

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

from data_prep.sources.build import Entry, Source

# (name, content), or a header of another type
Member = tuple[str, bytes] | tarfile.TarInfo


def write_tar(path: Path, members: Sequence[Member], mode: str = "w", kind=tarfile.GNU_FORMAT):
    """Write a tar with members in this order; mode and kind as tarfile takes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, format=kind) as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
                continue
            name, content = member
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def header(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    """A member of another type, such as a link."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def contents(source: Source) -> dict[str, tuple[object, bytes | str]]:
    """Name -> (labels, content, or the problem where there is one) of all entries of a source.

    Fails where two entries have the same name, or another size than they say.
    """
    found: dict[str, tuple[object, bytes | str]] = {}
    for entry in source.entries():
        assert entry.name not in found, entry.name
        found[entry.name] = (entry.labels, entry.problem or read(source, entry))
    return found


def read(source: Source, entry: Entry) -> bytes:
    """The bytes of an entry."""
    data = source.read(entry)
    assert len(data) == entry.num_bytes
    return data
