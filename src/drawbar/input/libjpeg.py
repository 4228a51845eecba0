"""The region decoder: binding of `region_decode.c`, and the libjpeg-turbo it uses.

`hatch_build.py` compiles the library at installation where there is a C compiler. A `RegionDecoder` belongs to one
thread; while it decodes it lets go of the GIL. Without the library, `open_region_decoder` says why in one line.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]

LIBRARY = Path(__file__).with_name("_region_decode.so")
LIBJPEG_VARIABLE = "DRAWBAR_LIBJPEG"
"""Names the libjpeg-turbo to use instead of those that are looked for."""

FAST_DCT, FAST_UPSAMPLING, SCALED_DCT, LIBJPEG_HUFFMAN, WHOLE = 1, 2, 4, 8, 16

_INTERFACE = 2
_MESSAGE_BYTES = 200


class Window(NamedTuple):
    """Whole pixels of an image."""

    top: int
    left: int
    height: int
    width: int


class View(NamedTuple):
    """A rectangle of an image in pixels, which need not be whole ones."""

    top: float
    left: float
    height: float
    width: float


class Unavailable(Exception):
    """There is no region decoder here; says why."""


class _Size(ctypes.Structure):
    _fields_ = [("width", ctypes.c_int32), ("height", ctypes.c_int32), ("components", ctypes.c_int32)]


_WindowStruct = ctypes.c_int32 * 4
_ViewStruct = ctypes.c_double * 4


@cache
def _library() -> ctypes.CDLL:
    if not LIBRARY.exists():
        raise Unavailable("not built at installation: it needs a C compiler and libjpeg-turbo's header")
    try:
        library = ctypes.CDLL(str(LIBRARY))
        found = library.drawbar_jpeg_interface()
    except (OSError, AttributeError) as error:
        raise Unavailable(f"{LIBRARY.name} cannot be used: {error}") from None
    if found != _INTERFACE:
        raise Unavailable(f"{LIBRARY.name} is of another version of Drawbar: install again")
    # The header takes 3 us: keeping the GIL costs less than another thread's turn, which may last 5 ms.
    header = ctypes.PyDLL(str(LIBRARY)).drawbar_jpeg_header
    header.restype, header.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    library.header = header  # type: ignore[attr-defined]
    pointer, number, text = ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p
    for name, result, arguments in (
        ("new", pointer, [text, text]),
        ("free", None, [pointer]),
        ("message", text, [pointer]),
        ("path", text, [pointer]),
        ("window", ctypes.c_int, [pointer, pointer, ctypes.c_int, pointer]),
        ("sample", ctypes.c_int, [pointer, pointer, pointer, ctypes.c_int, pointer, number, number, ctypes.c_int]),
    ):
        function = getattr(library, f"drawbar_jpeg_{name}")
        function.restype, function.argtypes = result, arguments
    library.drawbar_resize.restype = ctypes.c_int
    library.drawbar_resize.argtypes = [
        pointer, ctypes.c_size_t, pointer, pointer, pointer, number, number, ctypes.c_int, ctypes.c_int,
    ]  # fmt: skip
    return library


def _candidates() -> Iterator[str]:
    """The wheels' copies come first: they are newer than most systems', and the same on every host."""
    named = os.environ.get(LIBJPEG_VARIABLE)
    if named:
        yield named
        return
    for package in ("PIL", "torchvision"):
        spec = find_spec(package)
        if spec is not None and spec.origin:
            folder = Path(spec.origin).parent.parent
            for libs in ("pillow.libs", "torchvision.libs"):
                yield from map(str, sorted((folder / libs).glob("libjpeg*.so*")))
    yield from ("libjpeg.so.62", "libjpeg.so.8")


class RegionDecoder:
    """Decodes windows of JPEGs. For one thread at a time."""

    def __init__(self, path: str) -> None:
        """Raises Unavailable where the libjpeg-turbo at `path` cannot be used."""
        self._library = _library()
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._handle = self._library.drawbar_jpeg_new(path.encode(), message)
        if not self._handle:
            raise Unavailable(f"{Path(path).name}: {message.value.decode(errors='replace')}")
        self._size = _Size()
        self._readable = _WindowStruct()
        self._shown = _ViewStruct()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.drawbar_jpeg_free(self._handle)

    @property
    def library_path(self) -> str:
        path: bytes = self._library.drawbar_jpeg_path(self._handle)
        return path.decode(errors="replace")

    def header(self, encoded: npt.NDArray[np.uint8]) -> tuple[int, int, int]:
        """Height, width and number of components of a JPEG, which must stay as it is until it is decoded.

        Raises ValueError for what is none.
        """
        size = self._size
        if self._library.header(self._handle, _address(encoded), encoded.nbytes, ctypes.byref(size)):
            raise ValueError(self._message())
        return size.height, size.width, size.components

    def window(self, window: Window, options: int, out: Pixels) -> None:
        """The window's pixels of the image whose header was read last, into `out` of its shape. Raises ValueError."""
        self._readable[:] = list(window)
        if self._library.drawbar_jpeg_window(self._handle, self._readable, options, _address(out)):
            raise ValueError(self._message())

    def sample(self, readable: Window, shown: View | Window, options: int, flip: bool, out: Pixels) -> None:
        """What `shown` covers of that image, resized to `out`, from pixels of `readable` alone; with `WHOLE` among
        `options` all of the image is decoded for it. Raises ValueError."""
        self._readable[:] = list(readable)
        self._shown[:] = list(shown)
        height, width = out.shape[:2]
        if self._library.drawbar_jpeg_sample(
            self._handle, self._readable, self._shown, options, _address(out), height, width, flip
        ):
            raise ValueError(self._message())

    def _message(self) -> str:
        message: bytes = self._library.drawbar_jpeg_message(self._handle)
        return message.decode(errors="replace")


@cache
def libjpeg_path() -> str:
    """The libjpeg-turbo that region decoders use. Raises Unavailable, naming what was tried."""
    _library()
    tried = []
    for path in _candidates():
        try:
            return RegionDecoder(path).library_path
        except Unavailable as error:
            tried.append(str(error))
    raise Unavailable("no libjpeg-turbo fits: " + "; ".join(tried))


def open_region_decoder() -> RegionDecoder:
    """For the calling thread. Raises Unavailable."""
    return RegionDecoder(libjpeg_path())


def can_resize() -> bool:
    try:
        _library()
    except Unavailable:
        return False
    return True


def resize(
    image: Pixels, readable: Window, shown: View | Window, flip: bool, out: Pixels, *, portable: bool = False
) -> None:
    """What `shown` covers of `image`, resized to `out`: bilinear between the centres of pixels, without smoothing.

    Only pixels of `readable` are used. `image` is (height, width, 3), its rows tight; so is `out`.
    """
    height, width = out.shape[:2]
    if _library().drawbar_resize(
        _address(image), image.strides[0], _WindowStruct(*readable), _ViewStruct(*shown), _address(out), height, width,
        flip, portable,
    ):  # fmt: skip
        raise MemoryError("no memory to resize an image")


def turbo_version(path: str) -> str:
    """`libjpeg-turbo 3.2.0`, as a library's own text has it; without the number where it has none."""
    try:
        found = re.search(rb"libjpeg-turbo version ([0-9][0-9.]*)", Path(path).read_bytes())
    except OSError:
        found = None
    return "libjpeg-turbo" + (f" {found[1].decode()}" if found else "")


def _address(array: npt.NDArray[np.uint8]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
