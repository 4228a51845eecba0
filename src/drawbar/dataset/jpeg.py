"""JPEG by content: what a file's header says, without decoding it and whatever its name is.

Walks the marker segments up to the frame header, or to the first scan (ITU-T T.81, annex B). Decoding belongs to
`input`, mending to `fix`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

from drawbar.errors import DataError

SOI = b"\xff\xd8"
EOI = b"\xff\xd9"
PNG = b"\x89PNG\r\n\x1a\n"

_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0..15 without DHT, JPG, DAC
_DECODABLE = (0, 1, 2)  # SOFN: baseline, extended sequential, progressive
_BARE_MARKERS = frozenset((0x01, *range(0xD0, 0xD8)))  # TEM, RST0..7: no length follows
_SEGMENT_MARKERS = frozenset((*range(0xC0, 0xD0), *range(0xDA, 0xFF)))  # of those in use, that a length follows
_SEGMENT = struct.Struct(">BBH")
_OTHER_MAGIC = {PNG[:4]: "PNG", b"GIF8": "GIF", b"RIFF": "WebP", b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF"}
_EXIF = b"Exif\0\0"
_ORIENTATION = 0x0112

MAX_PIXELS = 1 << 26
"""An image of more is called absurd before anything is decoded: 201 MB as RGB."""
MAX_FILE_BYTES = 128 * 1024 * 1024
"""A file of more is called absurd before it is read: 16 bits for each pixel of the largest image."""


class HeaderCut(DataError):
    """The bytes end before the header does: with more of the file it may be right."""


@dataclass(frozen=True, slots=True)
class JpegHeader:
    width: int
    """Pixels."""
    height: int
    """Pixels."""
    components: int
    """1 grey, 3 colour, 4 CMYK or YCCK."""
    sampling: tuple[tuple[int, int], ...]
    """Horizontal and vertical factor of each component; ((2, 2), (1, 1), (1, 1)) is 4:2:0."""
    progressive: bool
    adobe_transform: int | None
    """0 stored as is, 1 YCbCr, 2 YCCK; None without an Adobe segment."""
    frame_offset: int
    """Byte offset of the frame header's marker."""
    process: int = 0
    """N of the frame marker SOFN: 0 baseline, 1 extended, 2 progressive; decoders take no other."""
    bits: int = 8
    """Of a sample."""
    orientation: int = 1
    """Of Exif, 1..8; 1 is upright. Training ignores it, as TensorFlow's converters do."""
    tables: int = 0
    """A bit for each quantisation table that is defined before the frame header."""

    @property
    def pixels(self) -> int:
        return self.width * self.height


def parse_header(data: bytes) -> JpegHeader:
    """Reads as much of a JPEG file as its header takes, at least; `data` may be only the file's beginning.

    Raises DataError with the reason alone (the caller knows the file), HeaderCut where more bytes are needed.
    """
    if len(data) == 1 and SOI.startswith(data):
        raise HeaderCut("truncated JPEG header")
    if not data.startswith(SOI):
        raise DataError(_not_jpeg(data))
    position = 2
    adobe: int | None = None
    orientation = 1
    tables = 0
    while True:
        marker, position, end = _next_segment(data, position)
        if marker in (0xD9, 0xDA):
            raise DataError("JPEG without a frame header before its image data")
        if marker in _FRAME_MARKERS:
            return _frame(marker, data[position + 2 : end], adobe, orientation, position - 2, tables)
        if marker == 0xDB:
            tables |= _tables(data, position + 2, end)
        elif marker == 0xEE and data[position + 2 : position + 7] == b"Adobe" and end >= position + 14:
            adobe = data[position + 13]
        elif marker == 0xE1 and data.startswith(_EXIF, position + 2):
            orientation = _exif_orientation(data[position + 8 : end])
        position = end


def check_trainable(data: bytes, max_pixels: int = MAX_PIXELS) -> JpegHeader:
    """The header of a whole file that every decoder turns into RGB: grey or colour, 8 bits, not cut off, with the
    tables and as many bytes as its pixels need at least. Whether these bytes are right only decoding tells.

    Raises DataError with the reason alone.
    """
    header = parse_header(data)
    check_size(header.width, header.height, max_pixels)
    if header.process not in _DECODABLE:
        raise DataError(f"JPEG process SOF{header.process} is not supported by decoders")
    if header.bits != 8:
        raise DataError(f"JPEG with {header.bits} bits a sample; expected 8")
    if header.components == 4:
        kind = "YCCK" if header.adobe_transform == 2 else "CMYK"
        raise DataError(f"{kind} JPEG (4 components)")
    if header.components not in (1, 3):
        raise DataError(f"JPEG with {header.components} components")
    check_content(data, header)
    return header


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Raises DataError for an image without pixels, and for one so large that decoding it would be an attack."""
    if not (width and height):
        raise DataError(f"image of {width}x{height} pixels")
    if width * height > max_pixels:
        raise DataError(f"absurd size: {width}x{height} pixels, more than {max_pixels}")


def check_file_size(size_bytes: int) -> None:
    """Raises DataError for a file that is larger than any image within the limits."""
    if size_bytes > MAX_FILE_BYTES:
        raise DataError(f"absurd size: {size_bytes} bytes, more than {MAX_FILE_BYTES}")


def check_content(data: bytes, header: JpegHeader) -> None:
    """Raises DataError where no decoder takes what comes with the header, or the file is cut off."""
    for across, down in header.sampling:
        if not (1 <= across <= 4 and 1 <= down <= 4):
            raise DataError(f"damaged JPEG frame header: sampling factors {across}x{down}")
    start = _first_scan(data, header)
    # Within image data every FF is stuffed, so EOI cannot occur by chance. Searched from the end, as files with
    # bytes behind it are common and harmless.
    end = data.rfind(EOI, start)
    if end < 0:
        raise DataError("truncated JPEG: no end-of-image marker")
    if (end - start) * 8 < _least_bits(header):
        raise DataError(f"truncated JPEG: {end - start} bytes for {header.width}x{header.height} pixels")


def _first_scan(data: bytes, header: JpegHeader) -> int:
    """Where the entropy-coded bytes of the first scan begin.

    Raises DataError where there is none, or a component in it has no quantisation table by then; other components may
    get theirs between scans.
    """
    tables = header.tables
    frame = header.frame_offset + 10  # of three bytes a component: id, sampling, table
    position = header.frame_offset + 2
    position += int.from_bytes(data[position : position + 2], "big")
    while True:
        marker, position, end = _next_segment(data, position)
        if marker == 0xD9:
            raise DataError("JPEG without image data")
        if marker == 0xDB:
            tables |= _tables(data, position + 2, end)
        elif marker == 0xDA:
            break
        elif marker in _FRAME_MARKERS:
            raise DataError("JPEG with two frame headers")
        position = end
    count = data[position + 2] if end > position + 2 else 0
    if not 1 <= count <= header.components or end < position + 6 + 2 * count:
        raise DataError("damaged JPEG scan header")
    ids = data[frame : frame + 3 * header.components : 3]
    for component in data[position + 3 : position + 3 + 2 * count : 2]:
        number = ids.find(component)
        if number < 0:
            raise DataError(f"damaged JPEG scan header: no component {component}")
        table = data[frame + 3 * number + 2]
        if table > 3 or not tables >> table & 1:
            raise DataError(f"JPEG without its quantisation table {table}")
    return end


def _tables(data: bytes, position: int, end: int) -> int:
    """A bit for each quantisation table that a segment defines."""
    tables = 0
    while position < end:
        tables |= 1 << (data[position] & 15)
        position += 129 if data[position] >> 4 else 65
    return tables


def _least_bits(header: JpegHeader) -> int:
    """What image data of this size takes at least.

    A block of 8 x 8 samples has a code for its DC value and one for the end of the others, of a bit at least each; in
    progressive files the others may end for many blocks together.
    """
    across, down = header.sampling[0]
    for h, v in header.sampling:
        across, down = max(across, h), max(down, v)
    blocks = 0
    for h, v in header.sampling:
        blocks += (-header.width * h // (8 * across)) * (-header.height * v // (8 * down))  # both rounded up, negative
    return blocks if header.progressive else 2 * blocks


def _next_segment(data: bytes, position: int) -> tuple[int, int, int]:
    """The marker at `position`, and where its segment begins and ends; both the same for EOI, which has none.

    Raises DataError where there is no marker, HeaderCut where the bytes end before the segment does.
    """
    if position + 4 <= len(data):  # the usual case, as this runs a dozen times for each image
        fill, marker, size = _SEGMENT.unpack_from(data, position)
        begin, end = position + 2, position + 2 + size
        if fill == 0xFF and marker in _SEGMENT_MARKERS and size >= 2 and end <= len(data):
            return marker, begin, end
    marker, begin = _next_marker(data, position)
    while marker in _BARE_MARKERS:
        marker, begin = _next_marker(data, begin)
    if marker == 0xD9:
        return marker, begin, begin
    size = int.from_bytes(data[begin : begin + 2], "big")
    end = begin + size
    if end > len(data) or begin + 2 > len(data):
        raise HeaderCut("truncated JPEG header")
    if size < 2:
        raise DataError(f"damaged JPEG header: segment of {size} bytes")
    return marker, begin, end


def _next_marker(data: bytes, position: int) -> tuple[int, int]:
    """The marker at `position`, and the position behind it; fill bytes (FF) before it are allowed."""
    if position < len(data) and data[position] != 0xFF:
        raise DataError(f"damaged JPEG header: no marker at byte {position}")
    while position < len(data) and data[position] == 0xFF:
        position += 1
    if position >= len(data):
        raise HeaderCut("truncated JPEG header")
    return data[position], position + 1


def _frame(marker: int, body: bytes, adobe: int | None, orientation: int, offset: int, tables: int) -> JpegHeader:
    if len(body) < 6 or len(body) < 6 + 3 * body[5]:
        raise DataError("damaged JPEG frame header")
    components = body[5]
    factors = body[7 : 7 + 3 * components : 3]
    return JpegHeader(
        width=int.from_bytes(body[3:5], "big"),
        height=int.from_bytes(body[1:3], "big"),
        components=components,
        sampling=tuple([(factor >> 4, factor & 15) for factor in factors]),
        progressive=marker == 0xC2,
        adobe_transform=adobe,
        frame_offset=offset,
        process=marker - 0xC0,
        bits=body[0],
        orientation=orientation,
        tables=tables,
    )


def _exif_orientation(tiff: bytes) -> int:
    """Of the first image directory; 1 where there is none, or the segment is damaged: it decides nothing."""
    order: Literal["big", "little"] = "big" if tiff.startswith(b"MM") else "little"
    start = int.from_bytes(tiff[4:8], order)
    count = int.from_bytes(tiff[start : start + 2], order)
    for at in range(start + 2, min(start + 2 + 12 * count, len(tiff) - 11), 12):
        if int.from_bytes(tiff[at : at + 2], order) == _ORIENTATION:
            value = int.from_bytes(tiff[at + 8 : at + 10], order)
            return value if 1 <= value <= 8 else 1
    return 1


def _not_jpeg(data: bytes) -> str:
    if not data:
        return "empty file"
    kind = other_format(data)
    if kind:
        return f"{kind}, not JPEG"
    return f"not JPEG: begins with {data[:4].hex(' ')}"


def other_format(data: bytes) -> str:
    """Name of the image format that `data` is in instead; empty where it is none that we know."""
    for magic, name in _OTHER_MAGIC.items():
        if data.startswith(magic) and (name != "WebP" or data[8:12] == b"WEBP"):
            return name
    return ""
