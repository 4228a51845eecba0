"""Bad images: what is wrong with a file, and its RGB JPEG where one can be made of it.

A good JPEG keeps its own bytes: grey, progressive and Exif-rotated ones too, as every decoder takes them. Anything else
is decoded and encoded again, or refused with a reason. Sizes come from headers, before anything is decoded.
"""

from __future__ import annotations

from typing import Any

from drawbar.dataset import jpeg
from drawbar.dataset.items import CheckedImage
from drawbar.errors import DataError

QUALITY = 100
"""Of re-encoded images, without chroma subsampling, so that they lose nearly nothing."""


def check_image(data: bytes, max_pixels: int = jpeg.MAX_PIXELS) -> CheckedImage:
    """A good JPEG with its own bytes. Raises DataError with the reason alone for every other file."""
    return CheckedImage(data, jpeg.check_trainable(data, max_pixels))


def fix_image(data: bytes, reason: str, max_pixels: int = jpeg.MAX_PIXELS) -> CheckedImage:
    """An RGB JPEG of what `check_image` refused for `reason`. About 8 bytes of memory a pixel.

    Equal files give equal bytes with equal versions of the codecs. Raises DataError with the reason where it cannot be
    decoded whole.
    """
    import simplejpeg  # with numpy, half a second: most sets have no bad file, and a worker never needs it

    decode = _decode_jpeg if data.startswith(jpeg.SOI) else _decode_other
    pixels = decode(data, reason, max_pixels)
    encoded: bytes = simplejpeg.encode_jpeg(pixels, quality=QUALITY, colorspace="RGB", colorsubsampling="444")
    return CheckedImage(encoded, jpeg.check_trainable(encoded, max_pixels), reason)


def _decode_jpeg(data: bytes, reason: str, max_pixels: int) -> Any:
    import simplejpeg

    header = jpeg.parse_header(data)
    jpeg.check_size(header.width, header.height, max_pixels)
    if header.bits != 8 or header.components not in (1, 3, 4):
        raise DataError(reason)
    jpeg.check_content(data, header)
    try:
        if header.components == 4:
            return cmyk_to_rgb(simplejpeg.decode_jpeg(data, "CMYK"), inverted=header.adobe_transform is not None)
        return simplejpeg.decode_jpeg(data, "RGB")
    except ValueError as error:
        raise DataError(f"{reason}; cannot be decoded: {error}") from None


def cmyk_to_rgb(cmyk: Any, *, inverted: bool) -> Any:
    """The conversion of TensorFlow's decoder: (1 - ink) (1 - black), with Adobe's files storing 1 - ink already."""
    import numpy as np

    rgb = np.empty((*cmyk.shape[:2], 3), np.uint8)
    # Row by row: products need 16 bits, and an image of them would be the largest thing in memory.
    for row, target in zip(cmyk, rgb, strict=True):
        light = (row if inverted else 255 - row).astype(np.uint16)
        target[:] = light[:, :3] * light[:, 3:] // 255
    return rgb


def _decode_other(data: bytes, reason: str, max_pixels: int) -> Any:
    import cv2
    import numpy as np

    kind = jpeg.other_format(data)
    size = _size_of(kind, data)
    if size is None:
        raise DataError(reason)
    jpeg.check_size(*size, max_pixels)
    if kind == "PNG" and not _has_end(data):
        raise DataError(f"{reason}; truncated")
    level = cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # the manifest says it instead
    # Rotation by Exif is left alone here as it is in JPEG files.
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    cv2.utils.logging.setLogLevel(level)
    if pixels is None or pixels.shape[:2] != (size[1], size[0]):
        raise DataError(f"{reason}; cannot be decoded")
    return np.ascontiguousarray(pixels[:, :, ::-1])


def _has_end(png: bytes) -> bool:
    """Whether the file goes on to its last chunk; what may follow that is of no matter. OpenCV fills up what lacks."""
    position = len(jpeg.PNG)
    while position + 12 <= len(png):
        end = position + 12 + int.from_bytes(png[position : position + 4], "big")
        if png[position + 4 : position + 8] == b"IEND":
            return end <= len(png)
        position = end
    return False


def _size_of(kind: str, data: bytes) -> tuple[int, int] | None:
    """Width and height by the header; None for a format that is not mended, or a header that is cut."""
    if kind == "PNG" and len(data) >= 24:
        return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    if kind == "GIF" and len(data) >= 10:
        return int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    if kind == "BMP" and len(data) >= 26:
        width, height = (int.from_bytes(data[at : at + 4], "little", signed=True) for at in (18, 22))
        return abs(width), abs(height)
    if kind == "WebP" and len(data) >= 30:
        return _webp_size(data)
    return None


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """By the first chunk: lossy, lossless or extended (RFC 9649)."""
    chunk = data[12:16]
    if chunk == b"VP8 ":
        return tuple(int.from_bytes(data[at : at + 2], "little") & 0x3FFF for at in (26, 28))  # type: ignore[return-value]
    if chunk == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if chunk == b"VP8X":
        width, height = (1 + int.from_bytes(data[at : at + 3], "little") for at in (24, 27))
        return width, height
    return None
