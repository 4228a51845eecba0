"""JPEG by content: what a file's header says, without decoding it and whatever its name is.

Walks the marker segments up to the frame header (ITU-T T.81, annex B). Decoding belongs to `input`.
"""

from __future__ import annotations

from dataclasses import dataclass

from drawbar.errors import DataError

SOI = b"\xff\xd8"
EOI = b"\xff\xd9"
PNG = b"\x89PNG\r\n\x1a\n"

_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0..15 without DHT, JPG, DAC
_DECODABLE = {0xC0: "baseline", 0xC1: "extended sequential", 0xC2: "progressive"}
_BARE_MARKERS = frozenset((0x01, *range(0xD0, 0xD8)))  # TEM, RST0..7: no length follows
_OTHER_MAGIC = {PNG[:4]: "PNG", b"GIF8": "GIF", b"RIFF": "WebP", b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF"}


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
    while True:
        marker, position = _next_marker(data, position)
        if marker in _BARE_MARKERS:
            continue
        if marker in (0xD9, 0xDA):
            raise DataError("JPEG without a frame header before its image data")
        size = int.from_bytes(data[position : position + 2], "big")
        end = position + size
        if end > len(data) or position + 2 > len(data):
            raise HeaderCut("truncated JPEG header")
        if size < 2:
            raise DataError(f"damaged JPEG header: segment of {size} bytes")
        if marker in _FRAME_MARKERS:
            return _frame(marker, data[position + 2 : end], adobe, position - 2)
        if marker == 0xEE and data[position + 2 : position + 7] == b"Adobe" and size >= 14:
            adobe = data[position + 13]
        position = end


def check_trainable(data: bytes, whole: bool = True) -> JpegHeader:
    """The header of a file that every decoder turns into RGB: grey or colour, 8 bits, not cut off.

    With `whole` False, `data` is only the beginning and the end is not looked at. Raises DataError with the reason.
    """
    header = parse_header(data)
    if header.components == 4:
        kind = "YCCK" if header.adobe_transform == 2 else "CMYK"
        raise DataError(f"{kind} JPEG (4 components)")
    if header.components not in (1, 3):
        raise DataError(f"JPEG with {header.components} components")
    # Within image data every FF is stuffed, so EOI cannot occur by chance. Searched from the end, as files with
    # bytes behind it are common and harmless.
    if whole and data.rfind(EOI, header.frame_offset) < 0:
        raise DataError("truncated JPEG: no end-of-image marker")
    return header


def _next_marker(data: bytes, position: int) -> tuple[int, int]:
    """The marker at `position`, and the position behind it; fill bytes (FF) before it are allowed."""
    if position < len(data) and data[position] != 0xFF:
        raise DataError(f"damaged JPEG header: no marker at byte {position}")
    while position < len(data) and data[position] == 0xFF:
        position += 1
    if position >= len(data):
        raise HeaderCut("truncated JPEG header")
    return data[position], position + 1


def _frame(marker: int, body: bytes, adobe: int | None, offset: int) -> JpegHeader:
    if marker not in _DECODABLE:
        raise DataError(f"JPEG process SOF{marker - 0xC0} is not supported by decoders")
    if len(body) < 6 or len(body) < 6 + 3 * body[5]:
        raise DataError("damaged JPEG frame header")
    bits, components = body[0], body[5]
    height = int.from_bytes(body[1:3], "big")
    width = int.from_bytes(body[3:5], "big")
    if bits != 8:
        raise DataError(f"JPEG with {bits} bits a sample; expected 8")
    if not (width and height and components):
        raise DataError(f"JPEG of {width}x{height} pixels and {components} components")
    factors = (body[7 + 3 * index] for index in range(components))
    return JpegHeader(
        width=width,
        height=height,
        components=components,
        sampling=tuple((factor >> 4, factor & 15) for factor in factors),
        progressive=marker == 0xC2,
        adobe_transform=adobe,
        frame_offset=offset,
    )


def _not_jpeg(data: bytes) -> str:
    if not data:
        return "empty file"
    for magic, name in _OTHER_MAGIC.items():
        if data.startswith(magic):
            return f"{name}, not JPEG"
    return f"not JPEG: begins with {data[:4].hex(' ')}"
