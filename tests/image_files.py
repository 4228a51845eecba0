"""Image files of every kind that sets have been seen to hold, made here: good JPEGs, and what is called JPEG."""

from __future__ import annotations

import io
from typing import Any

import cv2
import numpy as np
import simplejpeg
from PIL import Image


def pixels(number: int = 0, height: int = 40, width: int = 64) -> Any:
    """RGB blocks of 8x8 pixels, each of one colour: JPEG at high quality changes them by little."""
    rng = np.random.default_rng(number)
    blocks = rng.integers(0, 256, (-(-height // 8), -(-width // 8), 3), np.uint8)
    return np.ascontiguousarray(np.kron(blocks, np.ones((8, 8, 1), np.uint8))[:height, :width])


def jpeg(number: int = 0, height: int = 40, width: int = 64, sampling: str = "420") -> bytes:
    data: bytes = simplejpeg.encode_jpeg(pixels(number, height, width), quality=95, colorsubsampling=sampling)
    return data


def saved(image: Any, kind: str, **options: Any) -> bytes:
    """By Pillow."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def by_opencv(suffix: str, image: Any, *options: int) -> bytes:
    done, encoded = cv2.imencode(suffix, image, list(options))
    assert done
    return encoded.tobytes()


def cmyk_pixels() -> Any:
    """Blocks of single inks, of two together, of none and of all; ink is 255."""
    inks = [(255, 0, 0, 0), (0, 255, 0, 0), (0, 0, 255, 0), (0, 0, 0, 255), (0, 0, 0, 0), (255, 255, 0, 0)]
    inks += [(128, 0, 0, 0), (0, 0, 0, 128), (128, 64, 32, 64), (255, 255, 255, 255)]
    return np.kron(np.array([inks], np.uint8), np.ones((16, 16, 1), np.uint8))


def without_adobe(data: bytes) -> bytes:
    at = data.index(b"\xff\xeeAdobe"[:2] + b"\x00\x0eAdobe")
    return data[:at] + data[at + 16 :]


def cmyk(adobe: bool = True) -> bytes:
    """As Photoshop writes it, inverted; without Adobe's segment the inks stand as they are."""
    image = Image.fromarray(cmyk_pixels(), "CMYK") if adobe else Image.fromarray(255 - cmyk_pixels(), "CMYK")
    data = saved(image, "JPEG", quality=100, subsampling=0)
    return data if adobe else without_adobe(data)


def ycck() -> bytes:
    """libjpeg-turbo takes Adobe's inverted inks, and stores four components with a transform."""
    data: bytes = simplejpeg.encode_jpeg(255 - cmyk_pixels(), quality=100, colorspace="CMYK", colorsubsampling="444")
    return data


def rotated(orientation: int = 6, order: str = "II") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    raw = exif.tobytes()
    if order == "MM":
        raw = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01" + orientation.to_bytes(2, "big") + bytes(6)
    return saved(Image.fromarray(pixels()), "JPEG", exif=raw)


def good_jpegs() -> dict[str, bytes]:
    rgb, grey = pixels(), pixels()[:, :, 0].copy()
    profile = b"\xff\xe2\xff\xf0" + bytes(0xFFF0 - 2)
    return {
        **{f"baseline {sampling}": jpeg(1, 41, 67, sampling) for sampling in ("444", "422", "440", "420", "411")},
        "grey": simplejpeg.encode_jpeg(grey[..., None], colorspace="GRAY", colorsubsampling="Gray"),
        "progressive": by_opencv(".jpg", rgb, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
        "progressive grey": by_opencv(".jpg", grey, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
        "restart markers": by_opencv(".jpg", rgb, cv2.IMWRITE_JPEG_RST_INTERVAL, 2),
        "stored as RGB": saved(Image.fromarray(rgb), "JPEG", keep_rgb=True),
        "Exif rotated": rotated(),
        "long header": b"\xff\xd8" + profile * 3 + jpeg()[2:],
        "comment and fill bytes": b"\xff\xd8" + b"\xff" * 3 + b"\xfe\x00\x05abc" + jpeg()[2:],
        "bytes behind the end": jpeg() + b"more\xff\x00",
        "one pixel": jpeg(2, 1, 1),
        "wide": jpeg(3, 1, 4000),
    }


def four_component_jpegs() -> dict[str, bytes]:
    return {"CMYK": cmyk(), "CMYK without Adobe": cmyk(adobe=False), "YCCK": ycck()}


def other_formats() -> dict[str, bytes]:
    """Each shows `pixels()`; lossless but for WebP's lossy kind and the palettes."""
    rgb = pixels()
    image = Image.fromarray(rgb)
    deep = rgb[:, :, ::-1].astype(np.uint16) * 257
    return {
        "PNG": saved(image, "PNG"),
        "PNG 16 bits": by_opencv(".png", deep),
        "PNG palette": saved(image.quantize(64), "PNG"),
        "PNG alpha": saved(Image.merge("RGBA", (*image.split(), Image.new("L", image.size, 90))), "PNG"),
        "WebP": saved(image, "WEBP", quality=100),
        "WebP lossless": saved(image, "WEBP", lossless=True),
        "WebP alpha": saved(Image.merge("RGBA", (*image.split(), Image.new("L", image.size, 90))), "WEBP", quality=100),
        "GIF": saved(image.quantize(64), "GIF"),
        "BMP": saved(image, "BMP"),
        "BMP 32 bits": saved(image.convert("RGBA"), "BMP"),
    }
