"""Bad images by content: what a header tells, which files are kept, mended or refused, and with which pixels."""

from __future__ import annotations

import io
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image

from drawbar.dataset.fix import check_image, fix_image
from drawbar.dataset.jpeg import MAX_PIXELS, HeaderCut, check_trainable, parse_header
from drawbar.errors import DataError
from tests.image_files import (
    by_opencv,
    cmyk,
    cmyk_pixels,
    four_component_jpegs,
    good_jpegs,
    jpeg,
    other_formats,
    pixels,
    rotated,
    without_adobe,
    ycck,
)

GOOD, FOUR, OTHER = good_jpegs(), four_component_jpegs(), other_formats()


def refused(data: bytes, max_pixels: int = MAX_PIXELS) -> str:
    with pytest.raises(DataError) as caught:
        check_image(data, max_pixels)
    return caught.value.message


def fixed_pixels(data: bytes) -> Any:
    reason = refused(data)
    image = fix_image(data, reason)
    assert image.fixed == reason
    assert check_image(image.data).header == image.header
    assert image.header.components == 3
    assert image.header.sampling == ((1, 1),) * 3
    return simplejpeg.decode_jpeg(image.data, "RGB")


def distance(a: Any, b: Any) -> int:
    return int(np.abs(a.astype(int) - b.astype(int)).max())


@pytest.mark.parametrize("data", (GOOD | FOUR).values(), ids=(GOOD | FOUR).keys())
def test_the_header_says_what_full_decoding_finds(data: bytes) -> None:
    header = parse_header(data)
    decoded = Image.open(io.BytesIO(data))
    decoded.load()
    assert (header.width, header.height) == decoded.size
    assert header.components == len(decoded.getbands())
    assert header.progressive == bool(decoded.info.get("progressive"))
    assert header.orientation == decoded.getexif().get(0x0112, 1)
    assert header.bits == 8
    other = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    assert other is not None
    assert other.shape == (header.height, header.width, 3)


@pytest.mark.parametrize("data", GOOD.values(), ids=GOOD.keys())
def test_good_files_keep_their_bytes(data: bytes) -> None:
    image = check_image(data)
    assert image.data is data
    assert image.fixed == ""


def test_sampling_and_processes() -> None:
    factors = {"444": (1, 1), "422": (2, 1), "440": (1, 2), "420": (2, 2), "411": (4, 1)}
    for sampling, first in factors.items():
        assert parse_header(GOOD[f"baseline {sampling}"]).sampling == (first, (1, 1), (1, 1))
    assert parse_header(GOOD["stored as RGB"]).adobe_transform == 0
    assert parse_header(FOUR["YCCK"]).adobe_transform == 2
    assert parse_header(FOUR["CMYK"]).adobe_transform == 0
    assert parse_header(FOUR["CMYK without Adobe"]).adobe_transform is None


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("order", ["II", "MM"])
def test_orientation_is_read_in_both_byte_orders(orientation: int, order: str) -> None:
    assert parse_header(rotated(orientation, order)).orientation == orientation


def test_damaged_exif_decides_nothing() -> None:
    data = rotated()
    at = data.index(b"Exif\0\0") + 6
    for tiff in (b"", b"II", b"II*\0\xff\xff\xff\xff", data[at : at + 16], b"\xff" * 60):
        segment = b"\xff\xe1" + (8 + len(tiff)).to_bytes(2, "big") + b"Exif\0\0" + tiff
        assert parse_header(b"\xff\xd8" + segment + jpeg()[2:]).orientation == 1


@pytest.mark.parametrize("length", range(1, 150, 7))
def test_a_beginning_is_told_from_damage(length: int) -> None:
    with pytest.raises(HeaderCut):
        parse_header(jpeg()[:length])


# CMYK: a wrong polarity or a forgotten transform gives a negative, which no size or label would tell


@pytest.mark.parametrize("data", FOUR.values(), ids=FOUR.keys())
def test_inks_become_the_colours_they_print(data: bytes) -> None:
    inks = cmyk_pixels().astype(int)
    printed = (255 - inks[:, :, :3]) * (255 - inks[:, :, 3:]) // 255
    found = fixed_pixels(data)
    assert distance(found, printed) <= 4
    assert distance(found[8, 8], np.array([0, 255, 255])) <= 4  # pure cyan
    assert distance(found[8, 72], np.array([255, 255, 255])) <= 4  # paper
    assert found[8, 56].max() <= 4  # pure black


def test_cmyk_agrees_with_pillow() -> None:
    for data in (cmyk(), ycck()):
        assert distance(fixed_pixels(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))) <= 4


def test_kinds_are_named() -> None:
    assert refused(cmyk()) == "CMYK JPEG (4 components)"
    assert refused(without_adobe(cmyk())) == "CMYK JPEG (4 components)"
    assert refused(ycck()) == "YCCK JPEG (4 components)"


# Other formats


@pytest.mark.parametrize(("kind", "data"), OTHER.items(), ids=OTHER.keys())
def test_other_formats_are_encoded_again(kind: str, data: bytes) -> None:
    assert refused(data) == f"{kind.split()[0]}, not JPEG"
    tolerance = 60 if "palette" in kind or kind == "GIF" else 20 if kind in ("WebP", "WebP alpha") else 4
    found = fixed_pixels(data)
    assert found.shape == pixels().shape
    # In the middle of blocks, as lossy WebP blurs their edges.
    assert distance(found[4::8, 4::8], pixels()[4::8, 4::8]) <= tolerance


def test_16_bits_grey() -> None:
    ramp = np.repeat(np.arange(0, 65536, 256, dtype=np.uint16)[None], 16, 0)
    found = fixed_pixels(by_opencv(".png", ramp))
    assert distance(found[8], np.repeat((ramp[8] >> 8)[:, None], 3, 1)) <= 3


def test_the_same_file_gives_the_same_bytes() -> None:
    for data in (*FOUR.values(), *OTHER.values()):
        reason = refused(data)
        assert fix_image(data, reason) == fix_image(data, reason)


# What cannot be mended


@pytest.mark.parametrize("data", (FOUR | OTHER).values(), ids=(FOUR | OTHER).keys())
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_truncated_files_are_refused(data: bytes, share: float) -> None:
    cut = data[: int(len(data) * share)]
    with pytest.raises(DataError):
        fix_image(cut, refused(cut))


def test_bytes_behind_the_end_of_a_png_are_of_no_matter() -> None:
    png = OTHER["PNG"]
    assert distance(fixed_pixels(png + b"more" * 100), pixels()) <= 4
    for cut in (png[:-12], png[:-1], png[: len(png) // 2] + b"IEND" + bytes(50), png[:-12] + b"IEND"):
        with pytest.raises(DataError, match=r"^PNG, not JPEG; truncated$"):
            fix_image(cut, refused(cut))


@pytest.mark.parametrize("data", GOOD.values(), ids=GOOD.keys())
def test_truncated_jpegs_are_refused(data: bytes) -> None:
    end = data.rindex(b"\xff\xd9")
    for cut in (data[:end], data[: end // 2]):
        reason = refused(cut)
        assert reason.startswith("truncated JPEG")
        with pytest.raises(DataError, match=r"^truncated JPEG"):
            fix_image(cut, reason)


def frame_patched(offset: int, new: bytes, data: bytes | None = None) -> bytes:
    """A JPEG with other bytes in its frame header; 0 is the marker."""
    data = jpeg() if data is None else data
    at = parse_header(data).frame_offset + offset
    return data[:at] + new + data[at + len(new) :]


def test_reasons() -> None:
    cases = {
        "empty file": b"",
        "not JPEG: begins with 3c 68 74 6d": b"<html>not found</html>",
        "JPEG process SOF3 is not supported by decoders": frame_patched(1, b"\xc3"),
        "JPEG with 12 bits a sample; expected 8": frame_patched(4, b"\x0c", frame_patched(1, b"\xc1")),
        "image of 64x0 pixels": frame_patched(5, b"\0\0"),
        "damaged JPEG header: no marker at byte 2": b"\xff\xd8nothing",
        "JPEG without a frame header before its image data": b"\xff\xd8\xff\xda\x00\x02",
        "damaged JPEG header: segment of 1 bytes": b"\xff\xd8\xff\xe0\x00\x01more",
        "damaged JPEG frame header": frame_patched(9, b"\x09"),
        "TIFF, not JPEG": b"II*\0" + bytes(40),
        "GIF, not JPEG": b"GIF89a",
        "not JPEG: begins with 52 49 46 46": b"RIFF\0\0\0\0AVI " + bytes(40),
    }
    for reason, data in cases.items():
        assert refused(data) == reason
        with pytest.raises(DataError) as caught:
            fix_image(data, reason)
        assert caught.value.message.startswith(reason)


def scan_at(data: bytes) -> int:
    """Where the header of the first scan begins."""
    return data.index(b"\xff\xda", parse_header(data).frame_offset)


def without_tables(data: bytes) -> bytes:
    while b"\xff\xdb" in data:
        at = data.index(b"\xff\xdb")
        data = data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]
    return data


def test_what_no_decoder_takes_is_refused() -> None:
    """Each of these has a good header and an end."""
    data = jpeg()
    scan, frame = scan_at(data), parse_header(data).frame_offset
    cases = {
        "JPEG without image data": data[:scan] + b"\xff\xd9",
        "damaged JPEG frame header: sampling factors 0x2": frame_patched(11, b"\x02"),
        "damaged JPEG frame header: sampling factors 2x5": frame_patched(11, b"\x25"),
        "JPEG without its quantisation table 9": frame_patched(12, b"\x09"),
        "JPEG without its quantisation table 3": frame_patched(15, b"\x03"),
        "JPEG without its quantisation table 0": without_tables(data),
        "damaged JPEG scan header: no component 7": data[: scan + 5] + b"\x07" + data[scan + 6 :],
        "damaged JPEG scan header": data[: scan + 4] + b"\x09" + data[scan + 5 :],
        "JPEG with two frame headers": data[:scan] + data[frame : frame + 19] + data[scan:],
        "truncated JPEG: 0 bytes for 64x40 pixels": data[: scan + 14] + b"\xff\xd9",
    }
    for reason, bad in cases.items():
        assert refused(bad) == reason
        with pytest.raises(DataError, match=f"^{reason}"):
            fix_image(bad, reason)
        with pytest.raises(ValueError, match=r".+"):
            simplejpeg.decode_jpeg(bad)


def test_a_size_that_the_bytes_cannot_hold_is_refused() -> None:
    data = jpeg()
    for process in (b"\xc0", b"\xc2"):
        lying = frame_patched(5, b"\x10\0\x10\0", frame_patched(1, process, data))
        assert refused(lying) == f"truncated JPEG: {len(data) - 2 - scan_at(data) - 14} bytes for 4096x4096 pixels"


@pytest.mark.parametrize("sampling", ["444", "422", "440", "420", "411", "grey"])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (8, 8), (17, 33), (512, 2048)])
def test_the_smallest_of_its_size_is_good(sampling: str, progressive: bool, height: int, width: int) -> None:
    """One colour, coarsely quantised, with the shortest codes there are."""
    image = Image.new("L" if sampling == "grey" else "RGB", (width, height), 128 if sampling == "grey" else (128,) * 3)
    table = [255] * 64
    factors = {"444": 0x11, "422": 0x21, "440": 0x12, "420": 0x22, "411": 0x41, "grey": 0x11}
    for optimize in (False, True):
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", qtables=[table, table], optimize=optimize, progressive=progressive, subsampling=0)
        check_image(buffer.getvalue())
    if sampling != "grey":
        flags = [
            cv2.IMWRITE_JPEG_QUALITY,
            1,
            cv2.IMWRITE_JPEG_OPTIMIZE,
            1,
            cv2.IMWRITE_JPEG_PROGRESSIVE,
            int(progressive),
        ]
        flags += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factors[sampling] << 16 | 0x1111]
        data = by_opencv(".jpg", np.asarray(image), *flags)
        assert check_image(data).header.sampling[0] == (factors[sampling] >> 4, factors[sampling] & 15)


def test_tables_between_scans_are_taken() -> None:
    """A component needs its table by its own first scan, not by the file's."""
    data = by_opencv(".jpg", pixels(), cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
    first = data.index(b"\xff\xdb")
    second = data.index(b"\xff\xdb", first + 2)
    size = 2 + int.from_bytes(data[second + 2 : second + 4], "big")
    table = data[second : second + size]
    moved = data[:second] + data[second + size :]
    assert refused(moved) == "JPEG without its quantisation table 1"  # all are in the first scan here
    scan = scan_at(moved)
    check_image(moved[:scan] + table + moved[scan:])  # behind the frame header


def test_two_components_are_refused() -> None:
    at = parse_header(jpeg()).frame_offset
    frame = b"\xff\xc0\0\x0e\x08\0\x10\0\x10\2\1\x11\0\2\x11\0"
    data = jpeg()[:at] + frame + jpeg()[at + 19 :]
    assert refused(data) == "JPEG with 2 components"
    with pytest.raises(DataError, match="JPEG with 2 components"):
        fix_image(data, "JPEG with 2 components")


def test_absurd_sizes_are_refused_by_the_header() -> None:
    huge = (60000).to_bytes(4, "little")
    bomb = OTHER["PNG"]
    files = {
        "JPEG": frame_patched(5, b"\xff\xff\xff\xff"),
        "CMYK": frame_patched(5, b"\xff\xff\xff\xff", cmyk()),
        "PNG": bomb[:16] + (60000).to_bytes(4, "big") * 2 + bomb[24:],
        "BMP": OTHER["BMP"][:18] + huge * 2 + OTHER["BMP"][26:],
        "GIF": b"GIF89a" + b"\x60\xea\x60\xea" + OTHER["GIF"][10:],
        "WebP lossless": OTHER["WebP lossless"][:21] + b"\xff\xff\xff\x0f" + OTHER["WebP lossless"][25:],
        "WebP extended": OTHER["WebP alpha"][:24] + b"\xff\xff\0\xff\xff\0" + OTHER["WebP alpha"][30:],
    }
    for name, data in files.items():
        with pytest.raises(DataError, match=r"absurd size: \d+x\d+ pixels, more than 67108864"):
            fix_image(data, "absurd size" if name == "JPEG" else refused(data))
    assert refused(files["JPEG"]) == "absurd size: 65535x65535 pixels, more than 67108864"


def test_the_limit_is_a_setting() -> None:
    assert check_trainable(jpeg(0, 40, 64), 2560).pixels == 2560
    assert refused(jpeg(0, 40, 64), 2559) == "absurd size: 64x40 pixels, more than 2559"
    with pytest.raises(DataError, match="absurd size: 64x40"):
        fix_image(OTHER["PNG"], "PNG, not JPEG", 2559)
    with pytest.raises(DataError, match="absurd size: 64x40"):
        fix_image(OTHER["WebP"], "WebP, not JPEG", 2559)
