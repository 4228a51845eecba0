"""A zip archive read at random: stored and deflated members, from any process, with little memory per member.

The standard library reads the central directory, once; here its answer is kept as plain columns, which workers get
pickled. `zipfile` itself would read that directory anew in each worker, and seeks in one shared file object.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from array import array
from bisect import bisect_left
from itertools import pairwise
from pathlib import Path
from typing import Any

from drawbar.dataset import jpeg
from drawbar.errors import DataError, InputError

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_LOCAL_MAGIC = b"PK\x03\x04"
_ENCRYPTED = 0x1


class ZipIndex:
    """Names and places of an archive's files; `read` gives their content. Picklable; opened on first use."""

    def __init__(self, path: Path) -> None:
        """Raises InputError for what is no zip archive."""
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                found = sorted((info for info in archive.infolist() if not info.is_dir()), key=lambda i: i.filename)
        except (zipfile.BadZipFile, NotImplementedError) as error:
            raise InputError(f"{path} is no zip archive: {error}") from None
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}") from None
        self.names = [info.filename for info in found]
        """Sorted."""
        for name, following in pairwise(self.names):
            if name == following:
                raise InputError(f"{path} holds {name} twice", hint="unpack it, and keep the file that is meant")
        self._offsets = array("q", [info.header_offset for info in found])
        self._packed = array("q", [info.compress_size for info in found])
        self._sizes = array("q", [info.file_size for info in found])
        self._crcs = array("L", [info.CRC for info in found])
        self._methods = array("H", [info.compress_type for info in found])
        if any(info.flag_bits & _ENCRYPTED for info in found):
            raise InputError(f"{path} is encrypted", hint="unpack it first")
        self._descriptor = -1

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_descriptor": -1}

    def size_bytes(self, name: str) -> int | None:
        """Unpacked; None where the archive has no such file."""
        row = self._row(name)
        return None if row < 0 else self._sizes[row]

    def read(self, name: str) -> bytes:
        """The file's content, its CRC checked.

        Raises DataError with the reason alone where it is missing or damaged, InputError where reading fails.
        """
        row = self._row(name)
        if row < 0:
            raise DataError(f"missing in {self.path}")
        jpeg.check_file_size(max(self._sizes[row], self._packed[row]))
        try:
            raw = self._raw(row)
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror}") from None
        data = self._unpack(raw, row)
        if len(data) != self._sizes[row] or zlib.crc32(data) != self._crcs[row]:
            raise DataError("wrong CRC in the zip archive")
        return data

    def _row(self, name: str) -> int:
        row = bisect_left(self.names, name)
        return row if row < len(self.names) and self.names[row] == name else -1

    def _raw(self, row: int) -> bytes:
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        header = os.pread(self._descriptor, _LOCAL_HEADER.size, self._offsets[row])
        if len(header) < _LOCAL_HEADER.size or not header.startswith(_LOCAL_MAGIC):
            raise DataError("damaged zip archive: no file header where the directory says")
        name_size, extra_size = _LOCAL_HEADER.unpack(header)[-2:]
        start = self._offsets[row] + _LOCAL_HEADER.size + name_size + extra_size
        raw = os.pread(self._descriptor, self._packed[row], start)
        if len(raw) != self._packed[row]:
            raise DataError("truncated zip archive")
        return raw

    def _unpack(self, raw: bytes, row: int) -> bytes:
        method = self._methods[row]
        if method == zipfile.ZIP_STORED:
            return raw
        if method != zipfile.ZIP_DEFLATED:
            raise DataError(f"zip compression method {method}; expected stored or deflated")
        try:
            # One byte more than announced would show a wrong size; the rest of a bomb is never unpacked.
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(raw, self._sizes[row] + 1)
        except zlib.error:
            raise DataError("damaged deflate data in the zip archive") from None
