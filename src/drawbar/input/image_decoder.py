"""JPEG to pixels: which decoder, with which options, and what it makes of every kind of file.

Two decoders: `region` decodes a window only, `full` the whole image; both resize in the same call
(`libjpeg.RegionDecoder`). Where that was not compiled there is `full` alone, by simplejpeg. With equal options all give
equal pixels, except where the first decodes at a fraction of the size. What is chosen, and why not the faster one, is
part of every result (`Decoding`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal, NamedTuple

import cv2
import numpy as np
import simplejpeg
import simplejpeg._jpeg

from drawbar.dataset.fix import cmyk_to_rgb
from drawbar.dataset.jpeg import EOI, MAX_PIXELS, check_content, check_size, parse_header
from drawbar.errors import DataError, EnvironmentUnfit
from drawbar.input import libjpeg
from drawbar.input.libjpeg import FAST_DCT, FAST_UPSAMPLING, SCALED_DCT, WHOLE, Pixels, RegionDecoder, View, Window

# One decode thread works on one image: OpenCV's own pool would only fight with ours.
cv2.setNumThreads(1)

Encoded = bytes | memoryview


class BadImage(DataError):
    """An image that is damaged or of a kind that is not decoded. Says why; the caller knows shard and record."""


class Placement(NamedTuple):
    """What of an image becomes a sample."""

    readable: Window
    """Its pixels may be used."""
    shown: View | Window
    """Covers the sample."""
    flip: bool = False
    """Left to right."""


Place = Callable[[int, int], Placement]
"""From an image's height and width."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How images are decoded, as the result states it."""

    decoder: Literal["region", "full", "gpu"]
    library: str
    """Its name and version."""
    fast_dct: bool
    """Fast integer inverse DCT, or the accurate one."""
    fast_upsampling: bool
    """Chroma repeated, or interpolated."""
    scaled_dct: bool
    """Decoded at 1/2, 1/4 or 1/8 where the window is at least that many times larger than the sample."""
    resize: Literal["drawbar", "opencv", "torch"]
    """Bilinear between the centres of pixels, without smoothing, all of them."""
    note: str = ""
    """Why not the faster decoder; beside a GPU, what decodes the rest."""


class Header(NamedTuple):
    height: int
    width: int
    colours: str
    """`YCbCr`, `Gray`, `RGB`, `CMYK` or `YCCK`: how they are stored."""


def read_header(encoded: Encoded) -> Header:
    """Raises BadImage for what no decoder here takes, as far as a header tells; and for a file that is cut off."""
    try:
        check_ends(encoded)
        height, width, colours, _ = simplejpeg.decode_jpeg_header(encoded)
        check_size(width, height, MAX_PIXELS)
    except ValueError as error:
        raise BadImage(str(error)) from None
    except BadImage:
        raise
    except DataError as error:
        raise BadImage(error.message) from None
    return Header(height, width, colours)


def check_ends(encoded: Encoded) -> None:
    """Raises DataError with the reason where a file has no end-of-image marker of its own: one of a thumbnail in its
    header is another's."""
    if encoded[-2:] != EOI:
        data = bytes(encoded)
        check_content(data, parse_header(data))


class ImageDecoder:
    """Decodes in any number of threads, each with buffers of its own."""

    def __init__(self, decoder: Literal["auto", "region", "full"], decode: Literal["fast", "exact"]) -> None:
        """Raises EnvironmentUnfit where the decoder that is asked for is not to be had."""
        self._threads = threading.local()
        fast = decode == "fast"
        note = library = ""
        try:
            library = libjpeg.turbo_version(libjpeg.libjpeg_path())
        except libjpeg.Unavailable as error:
            if decoder == "region":
                raise EnvironmentUnfit(
                    f"no region decoder: {error}",
                    hint='install a C compiler and libjpeg-dev and then Drawbar again, or input.decoder = "auto"',
                ) from None
            if decoder == "auto":
                note = f"whole images are decoded, as there is no region decoder: {error}"
        region = bool(library) and decoder != "full"
        self._is_compiled = bool(library)
        self.decoding = Decoding(
            decoder="region" if region else "full",
            library=library or _simplejpeg_version(),
            fast_dct=fast,
            fast_upsampling=fast,
            scaled_dct=fast and region,
            resize="drawbar" if libjpeg.can_resize() else "opencv",
            note=note,
        )
        self._options = FAST_DCT * fast | FAST_UPSAMPLING * fast | SCALED_DCT * (fast and region) | WHOLE * (not region)

    def sample(self, encoded: Encoded, place: Place, out: Pixels) -> None:
        """Fills `out`, uint8 (height, width, 3) RGB with tight rows, with what `place` says. Raises BadImage."""
        if self._is_compiled:
            data, decoder = np.frombuffer(encoded, np.uint8), self._region_decoder()
            try:
                height, width, components = _header(decoder, data, encoded)
                if components != 4:
                    readable, shown, flip = place(height, width)
                    return decoder.sample(readable, shown, self._options, flip, out)
            except ValueError as error:
                raise BadImage(str(error)) from None
        image = self._whole(encoded)
        self._resize(image, place(image.shape[0], image.shape[1]), out)

    def image(self, encoded: Encoded) -> Pixels:
        """The whole image, uint8 (height, width, 3) RGB, never at a fraction of its size. Raises BadImage."""
        if self._is_compiled:
            data, decoder = np.frombuffer(encoded, np.uint8), self._region_decoder()
            try:
                height, width, components = _header(decoder, data, encoded)
                if components != 4:
                    out = np.empty((height, width, 3), np.uint8)
                    decoder.window(Window(0, 0, height, width), self._options, out)
                    return out
            except ValueError as error:
                raise BadImage(str(error)) from None
        return self._whole(encoded, reuse=False)

    def _region_decoder(self) -> RegionDecoder:
        try:
            return self._threads.decoder  # type: ignore[no-any-return]
        except AttributeError:
            self._threads.decoder = libjpeg.open_region_decoder()
            return self._threads.decoder  # type: ignore[no-any-return]

    def _whole(self, encoded: Encoded, *, reuse: bool = True) -> Pixels:
        """By simplejpeg; with `reuse` into this thread's buffer, where the next image will lie."""
        fast = self.decoding.fast_dct
        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(encoded)
            check_size(width, height, MAX_PIXELS)
            if colours in ("CMYK", "YCCK"):
                header = parse_header(bytes(encoded))
                cmyk = simplejpeg.decode_jpeg(encoded, "CMYK", fastdct=fast, fastupsample=fast)
                converted: Pixels = cmyk_to_rgb(cmyk, inverted=header.adobe_transform is not None)
                return converted
            room = self._room(height * width * 3) if reuse else None
            image: Pixels = simplejpeg.decode_jpeg(encoded, "RGB", fastdct=fast, fastupsample=fast, buffer=room)
        except ValueError as error:
            raise BadImage(str(error)) from None
        except DataError as error:
            raise BadImage(error.message) from None
        return image

    def _room(self, size: int) -> Pixels:
        room: Pixels | None = getattr(self._threads, "room", None)
        if room is None or room.nbytes < size:
            room = self._threads.room = np.empty(size, np.uint8)
        return room

    def _resize(self, image: Pixels, placement: Placement, out: Pixels) -> None:
        if self.decoding.resize == "drawbar":
            libjpeg.resize(image, *placement, out)
        else:
            resize_opencv(image, placement, out)


def resize_opencv(image: Pixels, placement: Placement, out: Pixels) -> None:
    """The same rule as `libjpeg.resize`, for where that was not built: at most 2 of 255 apart, and slower."""
    readable, shown, flip = placement
    height, width = out.shape[:2]
    part = image[readable.top : readable.top + readable.height, readable.left : readable.left + readable.width]
    if readable == shown:
        resized = cv2.resize(part, (width, height), interpolation=cv2.INTER_LINEAR)
    else:
        down, right = shown.height / height, shown.width / width
        rows = (np.arange(height) + 0.5) * down - 0.5 + shown.top - readable.top
        columns = (np.arange(width) + 0.5) * right - 0.5 + shown.left - readable.left
        x, y = np.meshgrid(columns.astype(np.float32), rows.astype(np.float32))
        resized = cv2.remap(part, x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    out[:] = resized[:, ::-1] if flip else resized


def _header(decoder: RegionDecoder, data: Pixels, encoded: Encoded) -> tuple[int, int, int]:
    """Raises ValueError. What is cut off is refused even where the window would end before: as by a whole decoding."""
    try:
        check_ends(encoded)
        height, width, components = decoder.header(data)
        if components not in (1, 3, 4):
            raise ValueError(f"JPEG with {components} components")
        check_size(width, height, MAX_PIXELS)
    except DataError as error:
        raise ValueError(error.message) from None
    return height, width, components


def _simplejpeg_version() -> str:
    return f"simplejpeg {version('simplejpeg')}, {libjpeg.turbo_version(simplejpeg._jpeg.__file__)}"
