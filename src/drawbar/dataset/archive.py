"""Where each file lies in an uncompressed tar archive, so that it can be read without unpacking.

Python's `tarfile` takes a truncated archive for a short one, and needs 50 us and a large object for each member; here
an archive that does not end as it should is an error, and nothing is kept. Formats: ustar, GNU and PAX (long names,
sizes beyond 8 GiB).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from drawbar.errors import DataError

_BLOCK = 512
_REGULAR = (b"0", b"\0", b"7")
_MAX_NAME_BYTES = 1 << 20


class Member(NamedTuple):
    """A regular file in an archive."""

    name: str
    offset: int
    """Of its content, from the start of the outermost file."""
    size_bytes: int


class TarReader:
    """Members of the archive that lies in bytes [start, end) of an open file."""

    def __init__(self, descriptor: int, start: int = 0, end: int | None = None) -> None:
        self._descriptor = descriptor
        self._position = start
        self._end = os.fstat(descriptor).st_size if end is None else end

    def members(self) -> Iterator[Member]:
        """In the archive's order. Raises DataError with the reason alone where it is damaged or cut off."""
        name, size = "", -1  # what an extension header says of the next member
        while True:
            at = self._position
            header = self._read(at, _BLOCK)
            if header.count(0) == _BLOCK:
                return
            kind, stored_size = _checked(header, at)
            content = at + _BLOCK
            if kind == b"L":
                name = self._text(content, stored_size)
            elif kind == b"x":
                name, size = self._extended(content, stored_size, name, size)
            elif kind in _REGULAR:
                member = Member(name or _name(header), content, stored_size if size < 0 else size)
                if member.offset + member.size_bytes > self._end:
                    raise DataError(
                        f"truncated tar: {member.name} ends at byte {member.offset + member.size_bytes}, "
                        f"the archive at {self._end}"
                    )
                yield member
                stored_size = member.size_bytes
                name, size = "", -1
            elif kind == b"S":
                raise DataError(f"sparse file in the tar at byte {at}: not supported")
            else:  # folders, links, a global header, what other tars add
                if kind not in (b"g", b"K"):
                    name, size = "", -1
            self._position = content + (stored_size + _BLOCK - 1) // _BLOCK * _BLOCK

    def _read(self, position: int, size: int) -> bytes:
        if position >= self._end:
            raise DataError(f"truncated tar: no end-of-archive mark, its bytes end at {self._end}")
        data = os.pread(self._descriptor, size, position) if position + size <= self._end else b""
        if len(data) < size:
            raise DataError(f"truncated tar: cut off at byte {min(self._end, position + size)}")
        return data

    def _text(self, position: int, size: int) -> str:
        if size > _MAX_NAME_BYTES:
            raise DataError(f"damaged tar: a name of {size} bytes at byte {position}")
        return os.fsdecode(self._read(position, size).rstrip(b"\0"))

    def _extended(self, position: int, size: int, name: str, member_size: int) -> tuple[str, int]:
        """Name and size from a PAX header: lines of `LENGTH KEY=VALUE`."""
        if size > _MAX_NAME_BYTES:
            raise DataError(f"damaged tar: an extended header of {size} bytes at byte {position}")
        rest = self._read(position, size)
        while rest:
            length, _, line = rest.partition(b" ")
            if not length.isdigit() or not len(length) < int(length) <= len(rest):
                raise DataError(f"damaged tar: extended header at byte {position}")
            key, _, value = line[: int(length) - len(length) - 2].partition(b"=")
            if key == b"path":
                name = os.fsdecode(value)
            elif key == b"size":
                member_size = int(value)
            rest = rest[int(length) :]
        return name, member_size


def looks_like_tar(descriptor: int) -> bool:
    """By the first header's checksum, as the oldest tars have no magic."""
    header = os.pread(descriptor, _BLOCK, 0)
    try:
        return len(header) == _BLOCK and bool(_checked(header, 0))
    except DataError:
        return False


def _checked(header: bytes, position: int) -> tuple[bytes, int]:
    """Kind and stored size of a member. Raises DataError where this is no header."""
    # The sum is over the header with blanks for the sum itself.
    total = sum(header) - sum(header[148:156]) + 8 * 0x20
    try:
        stored = int(header[148:156].strip(b"\0 ") or b"0", 8)
        size = _number(header[124:136])
    except ValueError:
        stored, size = -1, 0
    if stored != total:
        raise DataError(f"damaged tar: no header at byte {position}")
    return header[156:157], size


def _number(field: bytes) -> int:
    """Octal digits, or for large values GNU's binary form."""
    if field[0] & 0x80:
        return int.from_bytes(field, "big") & ~(0x80 << 8 * (len(field) - 1))
    return int(field.strip(b"\0 ") or b"0", 8)


def _name(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return os.fsdecode(prefix + b"/" + name if prefix else name)
