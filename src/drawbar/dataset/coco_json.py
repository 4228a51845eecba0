"""Walks a JSON file of any size element by element, telling where each stands: COCO's annotation files, 450 MB large.

The file is one object; each element of its top-level arrays is handed out with its byte span, so that an index of
spans takes the place of the elements themselves, and a span can be read again later. Memory is a few times the largest
element. No key order is assumed. What the elements mean belongs to `coco_index`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from drawbar.errors import DataError, InputError

_CHUNK_BYTES = 1 << 20
_MAX_VALUE_BYTES = 64 << 20
"""One annotation of this size is no annotation; it would be read whole."""

_CUT = re.compile(r"[-+.\w\\]*[ \t\r\n]*\Z")
"""What may follow the position of an error where more text would mend it: a number, word or escape that is cut."""

_NUMBER_REST = re.compile(r"[-+.eE0-9]*\Z")
"""What may follow a number that was decoded from a buffer that ends within it: `1` of `1.5`, of `1e+22`."""

_BLANK = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_UTF8_BOM = b"\xef\xbb\xbf"


class Element(NamedTuple):
    """One element of a top-level array."""

    key: str
    """The array's."""
    start: int
    """Byte offset in the file."""
    size_bytes: int
    value: Any
    """Numbers and structure are right, but text only where it is ASCII: see `text`."""
    raw: str
    """The element's bytes, one character each."""

    def text(self) -> Any:
        """The value with its text right."""
        if self.raw.isascii():
            return self.value
        try:
            return json.loads(self.raw.encode("latin-1"))
        except UnicodeDecodeError as error:
            raise DataError(f"byte offset {self.start + error.start} is no UTF-8 text") from None
        except ValueError as error:
            raise DataError(f"byte offset {self.start}: {_reason(error)}") from None


class JsonFile:
    """One pass over a file. `sha256` is of the whole file once the pass has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys: list[str] = []
        """Top-level keys met so far, whether or not their values are arrays."""
        self.sha256 = ""
        self._digest = hashlib.sha256()
        self._buffer = ""
        self._position = 0
        self._start = 0
        """Byte offset of the buffer's first character."""
        self._ended = False

    def elements(self, progress: Callable[[int], None] = lambda done_bytes: None) -> Iterator[Element]:
        """Yields the elements of all top-level arrays, in the file's order.

        Raises DataError naming file and byte offset for what is no JSON object or ends too early, InputError where
        the file cannot be opened. `progress` is told the bytes read.
        """
        try:
            # Latin-1 makes one character of each byte, so that positions in the text are positions in the file.
            with open(self.path, "rb", buffering=0) as self._file:
                self._progress = progress
                yield from self._walk()
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror}") from None

    def _walk(self) -> Iterator[Element]:
        self._begin()
        if self._peek() != "{":
            raise self._error(f"expected an object, found {self._peek()!r}")
        self._position += 1
        if self._peek() == "}":
            self._position += 1
        else:
            yield from self._members()
        if self._peek():
            raise self._error("something follows the end of the object")
        self.sha256 = self._digest.hexdigest()

    def _members(self) -> Iterator[Element]:
        while True:
            if self._peek() != '"':
                raise self._error(f"expected a key, found {self._peek()!r}")
            key = str(self._value())
            if key in self.keys:
                raise self._error(f"the key {key!r} comes twice")
            self.keys.append(key)
            self._expect(":")
            if self._peek() == "[":
                yield from self._array(key)
            else:
                self._value()
            if self._expect(",}") == "}":
                return

    def _array(self, key: str) -> Iterator[Element]:
        self._position += 1
        if self._peek() == "]":
            self._position += 1
            return
        while True:
            self._peek()
            start = self._start + self._position
            value = self._value()
            end = self._start + self._position
            yield Element(key, start, end - start, value, self._buffer[start - self._start : self._position])
            if self._expect(",]") == "]":
                return

    # The buffer

    def _begin(self) -> None:
        self._read_chunk()
        head = self._buffer[:3].encode("latin-1")
        if head[:2] in _BOMS:
            raise DataError(f"{self.path} is {_BOMS[head[:2]]} text; expected UTF-8")
        if head == _UTF8_BOM:
            self._position = 3

    def _read_chunk(self) -> None:
        """Adds a chunk and drops what was consumed."""
        raw = self._file.read(_CHUNK_BYTES) or b""
        self._digest.update(raw)
        self._ended = not raw
        self._buffer = self._buffer[self._position :] + raw.decode("latin-1")
        self._start += self._position
        self._position = 0
        self._progress(self._start + len(self._buffer))

    def _peek(self) -> str:
        """The next character that is no blank, without consuming it; empty at the end of the file."""
        while True:
            match = _BLANK.match(self._buffer, self._position)
            self._position = match.end() if match else self._position
            if self._position < len(self._buffer):
                return self._buffer[self._position]
            if self._ended:
                return ""
            self._read_chunk()

    def _expect(self, allowed: str) -> str:
        found = self._peek()
        if not found or found not in allowed:
            raise self._error(f"expected {' or '.join(map(repr, allowed))}, found {found!r}")
        self._position += 1
        return found

    def _value(self) -> Any:
        """Decodes and consumes the value at the position. Reads on for as long as it may merely be cut."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._buffer, self._position)
            except json.JSONDecodeError as error:
                self._read_on(error)
                continue
            except (ValueError, RecursionError) as error:
                raise self._error(_reason(error)) from None
            if self._ended or type(value) not in (int, float) or not _NUMBER_REST.match(self._buffer, end):
                self._position = end
                return value
            self._read_more()

    def _read_on(self, error: json.JSONDecodeError) -> None:
        cut = _CUT.match(self._buffer, error.pos) or error.msg.startswith("Unterminated string")
        if self._ended or not cut:
            at = self._start + error.pos
            if self._ended and cut:
                raise self._error("it is truncated", self._start + len(self._buffer))
            raise self._error(_reason(error), at)
        self._read_more()

    def _read_more(self) -> None:
        if len(self._buffer) - self._position > _MAX_VALUE_BYTES:
            raise self._error(f"one value is longer than {_MAX_VALUE_BYTES >> 20} MiB")
        self._read_chunk()

    def _error(self, reason: str, at: int | None = None) -> DataError:
        offset = self._start + self._position if at is None else at
        if at is None and self._ended and self._position >= len(self._buffer):
            reason = "it is truncated"
        return DataError(
            f"{self.path} is no COCO annotation file: byte offset {offset}: {reason}",
            hint="a truncated file was perhaps not downloaded whole" if reason == "it is truncated" else None,
        )


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return error.msg[:1].lower() + error.msg[1:]
    return str(error)
