"""Where each file lies in an uncompressed tar archive, so that it can be read without unpacking.

Python's `tarfile` takes a truncated archive for a short one, and needs 50 us and a large object for each member; here
an archive that does not end as it should is an error, and nothing is kept. Formats: ustar, GNU and PAX (long names,
sizes beyond 8 GiB, hard links).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from drawbar.errors import DataError

_BLOCK = 512
_REGULAR = (b"0", b"\0", b"7")
_HARD_LINK, _SYMLINK = b"1", b"2"
_MAX_NAME_BYTES = 1 << 20
_MAX_DIGITS = 19
_OCTAL = re.compile(rb"[0-7]*")
_CHUNK_BYTES = 1 << 20
_RECORD_BYTES = 20 * _BLOCK
"""What tar fills its files up to a multiple of, if not told otherwise."""
_MAX_RECORD_BYTES = 16 << 20


class Member(NamedTuple):
    """A regular file in an archive."""

    name: str
    offset: int
    """Of its content, from the start of the outermost file."""
    size_bytes: int
    symlink: str = ""
    """What it points to, if it is a symbolic link; then it has no content here."""


class _Link(NamedTuple):
    """A hard link, which has the content of an earlier member."""

    name: str
    target: str


class TarReader:
    """Members of the archive that lies in bytes [start, end) of an open file."""

    def __init__(self, descriptor: int, start: int = 0, end: int | None = None) -> None:
        self._descriptor = descriptor
        self._start = start
        self._end = os.fstat(descriptor).st_size if end is None else end

    def members(self) -> Iterator[Member]:
        """Files and symbolic links in the archive's order, then hard links, as files with their targets' content.

        Raises DataError with the reason alone where it is damaged or cut off.
        """
        targets: set[str] = set()
        for entry in self._entries():
            if isinstance(entry, Member):
                yield entry
            else:
                targets.add(_plain(entry.target))
        if targets:
            yield from self._linked(targets)

    def _linked(self, targets: set[str]) -> Iterator[Member]:
        """A second pass, as archives with hard links are rare and the names of a million members are not small."""
        found: dict[str, Member] = {}
        for entry in self._entries():
            if isinstance(entry, Member):
                member = entry
            elif _plain(entry.target) in found:
                member = found[_plain(entry.target)]._replace(name=entry.name)
                yield member
            else:
                raise DataError(f"{entry.name} is a hard link to {entry.target}, which the tar does not hold before it")
            if _plain(entry.name) in targets:
                found[_plain(entry.name)] = member

    def _entries(self) -> Iterator[Member | _Link]:
        at = self._start
        extended = _Extended()  # what extension headers say of the next member
        while True:
            header = self._read(at, _BLOCK)
            if header.count(0) == _BLOCK:
                if extended.any():
                    raise DataError(f"damaged tar: a member's extended header, and zeros behind it, at byte {at}")
                self._check_end(at)
                return
            kind, size = _checked(header, at)
            content = at + _BLOCK
            if kind == b"L":
                extended.name = self._text(content, size)
            elif kind == b"K":
                extended.link = self._text(content, size)
            elif kind == b"x":
                self._extend(content, size, extended)
            elif kind in (b"S", b"M"):
                what = "sparse file" if kind == b"S" else "file that began in another volume"
                raise DataError(f"{what} in the tar at byte {at}: not supported")
            elif kind != b"g":
                size = self._stored_size(kind, size, extended)
                entry = _entry(kind, header, content, size, extended)
                if entry is not None:
                    self._check_inside(entry)
                    yield entry
                extended = _Extended()
            at = content + (size + _BLOCK - 1) // _BLOCK * _BLOCK

    @staticmethod
    def _stored_size(kind: bytes, size: int, extended: _Extended) -> int:
        if kind == _HARD_LINK:
            return 0  # some writers tell the target's size here; GNU tar and Python store nothing either
        return extended.size if kind in _REGULAR and extended.size >= 0 else size

    def _check_inside(self, entry: Member | _Link) -> None:
        if isinstance(entry, Member) and entry.offset + entry.size_bytes > self._end:
            raise DataError(
                f"truncated tar: {entry.name} ends at byte {entry.offset + entry.size_bytes}, "
                f"the archive at {self._end}"
            )

    def _check_end(self, at: int) -> None:
        """Two blocks of zeros end an archive, and only zeros follow: a hole, as in a file that was not downloaded
        whole, looks like an end otherwise. Raises DataError."""
        position = at + _BLOCK
        while position < self._end:
            chunk = os.pread(self._descriptor, min(_CHUNK_BYTES, self._end - position), position)
            if not chunk:
                raise DataError(f"truncated tar: cut off at byte {position}")
            if chunk.count(0) < len(chunk):
                found = position + len(chunk) - len(chunk.lstrip(b"\0"))
                raise DataError(
                    f"damaged tar: zeros at byte {at}, as at an archive's end, but more at byte {found}: a file with "
                    "a hole, or several archives in one"
                )
            position += len(chunk)
            if position - at > _MAX_RECORD_BYTES + 2 * _BLOCK:
                break
        zeros = self._end - at
        if zeros < 2 * _BLOCK:
            raise DataError(f"truncated tar: {zeros} bytes of zeros at byte {at}; an archive ends with {2 * _BLOCK}")
        if not _is_padding(zeros, self._end - self._start):
            raise DataError(
                f"damaged tar: zeros from byte {at} on, {zeros} bytes before its end, more than tar fills up with: "
                "perhaps not downloaded whole"
            )

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

    def _extend(self, position: int, size: int, extended: _Extended) -> None:
        """Names and size from a PAX header: lines of `LENGTH KEY=VALUE`."""
        if size > _MAX_NAME_BYTES:
            raise DataError(f"damaged tar: an extended header of {size} bytes at byte {position}")
        rest = self._read(position, size)
        while rest:
            length, _, line = rest.partition(b" ")
            if not _is_number(length) or not len(length) < int(length) <= len(rest):
                raise DataError(f"damaged tar: extended header at byte {position}")
            key, _, value = line[: int(length) - len(length) - 2].partition(b"=")
            if key == b"path":
                extended.name = os.fsdecode(value)
            elif key == b"linkpath":
                extended.link = os.fsdecode(value)
            elif key == b"size":
                if not _is_number(value):
                    raise DataError(f"damaged tar: size {value[:40]!r} in the extended header at byte {position}")
                extended.size = int(value)
            elif key.startswith(b"GNU.sparse."):
                raise DataError(f"sparse file in the tar at byte {position}: not supported")
            rest = rest[int(length) :]


@dataclass
class _Extended:
    """Of the next member, where an extension header tells: its name, what it links to, its size."""

    name: str = ""
    link: str = ""
    size: int = -1

    def any(self) -> bool:
        return self != _Extended()


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
    digits = field.strip(b"\0 ")
    if not _OCTAL.fullmatch(digits):
        raise ValueError("no octal number")
    return int(digits or b"0", 8)


def _is_number(digits: bytes) -> bool:
    return digits.isdigit() and len(digits) <= _MAX_DIGITS


def _is_padding(zeros: int, total: int) -> bool:
    """Whether an archive of `total` bytes may end with so many: it is filled up to a multiple of tar's record size,
    10 KiB in files, larger powers of two on tapes or by `--blocking-factor`."""
    sizes = [base << shift for base in (_RECORD_BYTES, _BLOCK) for shift in range(16)]
    fitting = [size for size in sizes if total % size == 0 and size <= _MAX_RECORD_BYTES]
    return zeros < max([*fitting, _RECORD_BYTES]) + 2 * _BLOCK


def _entry(kind: bytes, header: bytes, content: int, size: int, extended: _Extended) -> Member | _Link | None:
    """None for folders, devices, and what other tars add."""
    name = extended.name or _name(header)
    if kind in _REGULAR:
        return Member(name, content, size)
    link = extended.link or os.fsdecode(header[157:257].partition(b"\0")[0])
    if kind == _HARD_LINK:
        return _Link(name, link)
    return Member(name, content, 0, link) if kind == _SYMLINK else None


def _plain(name: str) -> str:
    return name.removeprefix("./")


def _name(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return os.fsdecode(prefix + b"/" + name if prefix else name)
