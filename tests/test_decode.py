"""Pixels: against torchvision, decoder against decoder, option by option; every kind of JPEG decodes or is refused."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal

import cv2
import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms.v2 import functional as reference

from drawbar.config import Input
from drawbar.dataset.picture import make_picture
from drawbar.errors import EnvironmentUnfit
from drawbar.input import libjpeg
from drawbar.input.augment import RecordRandom, eval_placement, random_crop
from drawbar.input.image_decoder import BadImage, ImageDecoder, Placement, resize_opencv
from drawbar.input.libjpeg import FAST_DCT, FAST_UPSAMPLING, LIBJPEG_HUFFMAN, SCALED_DCT, Pixels, View, Window
from drawbar.input.sample import SampleMaker

needs_region = pytest.mark.skipif(not libjpeg.LIBRARY.exists(), reason="the region decoder is not built here")

PICTURES = [make_picture(1, number, 1 + number % 7) for number in range(12)]
"""As the synthetic set has them: about 460 x 390, 110 kB, 4:2:0 or 4:4:4."""


def photo(height: int = 300, width: int = 400) -> Pixels:
    """A smooth picture, so that JPEG itself changes little."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return np.stack([x * 255 // width, y * 255 // height, (x + y) * 255 // (width + height)], axis=2).astype(np.uint8)


def apart(one: Pixels, two: Pixels) -> float:
    """Mean absolute difference, of 255."""
    return float(np.abs(one.astype(int) - two.astype(int)).mean())


def encoded(image: Pixels, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", **options)
    return file.getvalue()


def torchvision_resize(image: Pixels, window: Window, size: int) -> Pixels:
    top, left, height, width = window
    part = torch.from_numpy(image[top : top + height, left : left + width].copy()).permute(2, 0, 1)
    resized: Pixels = reference.resize(part, [size, size], antialias=False).permute(1, 2, 0).numpy()
    return resized


def windows(image: Pixels, count: int) -> list[Window]:
    return [random_crop(image.shape[0], image.shape[1], RecordRandom(1, 0, 0, number)) for number in range(count)]


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """As in an installation without a C compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libjpeg, "LIBRARY", libjpeg.LIBRARY.with_name("absent.so"))
        libjpeg._library.cache_clear()
        libjpeg.libjpeg_path.cache_clear()
        try:
            yield
        finally:
            libjpeg._library.cache_clear()
            libjpeg.libjpeg_path.cache_clear()


# The resize


@pytest.mark.parametrize("resize", ["drawbar", "opencv"])
def test_the_resize_is_torchvisions(resize: str) -> None:
    differences = []
    for number, picture in enumerate(PICTURES):
        image = simplejpeg.decode_jpeg(picture, "RGB")
        for window in windows(image, 4):
            out = np.empty((224, 224, 3), np.uint8)
            flip = number % 2 == 1
            if resize == "opencv":
                resize_opencv(image, Placement(window, window, flip), out)
            elif libjpeg.can_resize():
                libjpeg.resize(image, window, window, flip, out)
            else:
                pytest.skip("not built here")
            expected = torchvision_resize(image, window, 224)
            differences.append(apart(out, expected[:, ::-1] if flip else expected))
            assert np.abs(out.astype(int) - (expected[:, ::-1] if flip else expected)).max() <= 3
    assert np.mean(differences) < 0.5
    assert max(differences) < 0.5


@needs_region
@given(
    height=st.integers(1, 60), width=st.integers(1, 60), size=st.integers(1, 40), seed=st.integers(0, 99),
    flip=st.booleans(),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_the_resize_is_right_for_every_size_with_and_without_special_instructions(
    height: int, width: int, size: int, seed: int, flip: bool
) -> None:
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (height, width, 3), np.uint8)
    top, left = int(rng.integers(0, height)), int(rng.integers(0, width))
    window = Window(top, left, int(rng.integers(1, height - top + 1)), int(rng.integers(1, width - left + 1)))
    room = np.full((size + 2, size, 3), 77, np.uint8)
    libjpeg.resize(image, window, window, flip, room[1:-1])
    assert (room[0] == 77).all()
    assert (room[-1] == 77).all()
    portable = np.empty((size, size, 3), np.uint8)
    libjpeg.resize(image, window, window, flip, portable, portable=True)
    assert np.array_equal(portable, room[1:-1])
    expected = torchvision_resize(image, window, size)
    assert np.abs(portable.astype(int) - (expected[:, ::-1] if flip else expected)).max() <= 3


def test_an_evaluation_is_the_whole_image_resized_and_then_cut() -> None:
    for rule in ("mlperf", "tf_cnn"):
        for picture in PICTURES[:6]:
            image = simplejpeg.decode_jpeg(picture, "RGB")
            height, width = image.shape[:2]
            factor = 256 / min(height, width) if rule == "mlperf" else 224 * 1.145 / min(height, width)
            tall, wide = int(height * factor + 1e-6), int(width * factor + 1e-6)
            resized = reference.resize(torch.from_numpy(image).permute(2, 0, 1), [tall, wide], antialias=False)
            top, left = (tall - 224) // 2, (wide - 224) // 2
            expected = resized[:, top : top + 224, left : left + 224].permute(1, 2, 0).numpy()
            for resize in ("decoder", "opencv"):
                out = np.empty((224, 224, 3), np.uint8)
                if resize == "opencv":
                    resize_opencv(image, eval_placement(height, width, 224, rule), out)
                else:
                    SampleMaker(Input(decode="exact")).evaluate(picture, out, rule)
                assert apart(out, expected) < 0.5, (rule, resize)


# Decoders and their options


def sample(picture: bytes, placement: Placement, decoder: Any, decode: Any, size: int = 224) -> Pixels:
    out = np.empty((size, size, 3), np.uint8)
    ImageDecoder(decoder, decode).sample(picture, lambda height, width: placement, out)
    return out


@needs_region
@pytest.mark.parametrize("decode", ["fast", "exact"])
@given(
    height=st.integers(1, 90), width=st.integers(1, 90), seed=st.integers(0, 10_000),
    subsampling=st.sampled_from(["4:4:4", "4:2:2", "4:2:0", "grey"]), progressive=st.booleans(),
    restart=st.integers(0, 3), quality=st.sampled_from([5, 75, 100]), optimize=st.booleans(),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_a_window_has_the_pixels_of_the_whole_image(
    decode: Literal["fast", "exact"], height: int, width: int, seed: int, subsampling: str, progressive: bool,
    restart: int, quality: int, optimize: bool,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (height, width, 3), np.uint8)
    how: dict[str, Any] = {"progressive": progressive, "restart_marker_blocks": restart, "quality": quality}
    how["optimize"] = optimize
    if subsampling == "grey":
        picture = encoded(image[..., 0], **how)
    else:
        picture = encoded(image, subsampling=subsampling, **how)
    fast = decode == "fast"
    whole = simplejpeg.decode_jpeg(picture, "RGB", fastdct=fast, fastupsample=fast)
    top, left = int(rng.integers(0, height)), int(rng.integers(0, width))
    window = Window(top, left, int(rng.integers(1, height - top + 1)), int(rng.integers(1, width - left + 1)))
    decoder = libjpeg.open_region_decoder()
    decoder.header(np.frombuffer(picture, np.uint8))
    out = np.empty((window.height, window.width, 3), np.uint8)
    decoder.window(window, (FAST_DCT | FAST_UPSAMPLING) if fast else 0, out)
    assert np.array_equal(out, whole[top : top + window.height, left : left + window.width])


@needs_region
@given(
    seed=st.integers(0, 1_000_000), subsampling=st.sampled_from(["4:4:4", "4:2:0"]), restart=st.integers(0, 3),
    quality=st.sampled_from([30, 95]),
)  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_damaged_image_data_are_refused_wherever_libjpeg_does(
    seed: int, subsampling: str, restart: int, quality: int
) -> None:
    """Or have the same pixels: Huffman decoding is ours; libjpeg, which lets some damage pass, is the reference."""
    rng = np.random.default_rng(seed)
    picture = bytearray(encoded(
        rng.integers(0, 256, (70, 50, 3), np.uint8), subsampling=subsampling, restart_marker_blocks=restart,
        quality=quality,
    ))  # fmt: skip
    first = picture.rindex(b"\xff\xda") + 14
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(first, len(picture) - 2))
        if rng.random() < 0.3:
            del picture[at : at + int(rng.integers(1, 9))]
        else:
            picture[at] = int(rng.choice([0, 0xFF, 0xD0, 0xD1, 0xD9, int(rng.integers(256))]))
    data, window = np.frombuffer(bytes(picture), np.uint8), Window(0, 0, 70, 50)
    decoder = libjpeg.open_region_decoder()
    found: list[Pixels | None] = []
    for options in (0, LIBJPEG_HUFFMAN):
        decoder.header(data)
        out = np.empty((70, 50, 3), np.uint8)
        try:
            decoder.window(window, options, out)
        except ValueError:
            found.append(None)
        else:
            found.append(out)
    ours, theirs = found
    assert ours is None or (theirs is not None and np.array_equal(ours, theirs))


@needs_region
@pytest.mark.parametrize("decode", ["fast", "exact"])
def test_region_and_full_give_equal_samples_and_the_reference_ones(decode: Literal["fast", "exact"]) -> None:
    differences = []
    for number, picture in enumerate(PICTURES):
        image = simplejpeg.decode_jpeg(picture, "RGB")
        window = random_crop(image.shape[0], image.shape[1], RecordRandom(1, 0, 0, number))
        if min(window.height, window.width) >= 448:
            continue
        placement = Placement(window, window, number % 2 == 0)
        region, full = (sample(picture, placement, decoder, decode) for decoder in ("region", "full"))
        assert np.array_equal(region, full)
        expected = torchvision_resize(image, window, 224)
        differences.append(apart(region, expected[:, ::-1] if placement.flip else expected))
    assert len(differences) > 5
    assert np.mean(differences) < (0.5 if decode == "exact" else 2.0)


def option_error(options: int, size: int, pictures: list[bytes]) -> float:
    """Of samples decoded with these options against the same without any."""
    decoder = libjpeg.open_region_decoder()
    differences = []
    for picture in pictures:
        height, width, _ = decoder.header(np.frombuffer(picture, np.uint8))
        window = Window(1, 1, height - 3, width - 3)
        outs = []
        for flags in (0, options):
            decoder.header(np.frombuffer(picture, np.uint8))
            out = np.empty((size, size, 3), np.uint8)
            decoder.sample(window, window, flags, False, out)
            outs.append(out)
        differences.append(apart(*outs))
    return float(np.mean(differences))


@needs_region
@pytest.mark.parametrize(
    ("options", "size", "bound"),
    [(FAST_DCT, 224, 2.0), (FAST_UPSAMPLING, 224, 2.0), (SCALED_DCT, 112, 8.0), (SCALED_DCT, 56, 12.0)],
    ids=["fast-dct", "fast-upsampling", "half-size", "quarter-size"],
)
def test_each_fast_option_is_bounded_and_does_something(options: int, size: int, bound: float) -> None:
    error = option_error(options, size, PICTURES)
    print(f"mean difference {error:.3f} of 255")
    assert 0 < error < bound


@needs_region
def test_decoding_at_a_fraction_of_the_size_does_not_shift_the_picture() -> None:
    """A smooth picture is the same at every scale: half a pixel of shift would show as a ramp's step."""
    picture = encoded(photo(800, 800), quality=100, subsampling="4:4:4")
    decoder = libjpeg.open_region_decoder()
    for size in (390, 190, 90):
        for window in (Window(0, 0, 800, 800), Window(5, 9, 785, 787), Window(1, 2, 797, 795)):
            outs = []
            for flags in (0, SCALED_DCT):
                decoder.header(np.frombuffer(picture, np.uint8))
                out = np.empty((size, size, 3), np.uint8)
                decoder.sample(window, window, flags, False, out)
                outs.append(out.astype(float))
            assert abs((outs[1] - outs[0]).mean()) < 0.1


def test_same_record_same_pixels_whatever_the_number_of_threads() -> None:
    maker = SampleMaker(Input(distortions=True))

    def make(number: int) -> bytes:
        out = np.empty((64, 64, 3), np.uint8)
        maker.train(PICTURES[number % len(PICTURES)], RecordRandom(1, 0, 0, number), out)
        return out.tobytes()

    alone = [make(number) for number in range(48)]
    for threads in (2, 7):
        with ThreadPoolExecutor(threads) as pool:
            assert list(pool.map(make, range(48))) == alone
    assert len(set(alone)) == 48


def test_batch_slots_are_filled_in_place() -> None:
    batch = np.zeros((3, 32, 32, 3), np.uint8)
    SampleMaker(Input()).train(PICTURES[0], RecordRandom(0, 0, 0, 0), batch[1])
    assert batch[0].max() == batch[2].max() == 0
    assert batch[1].max() > 0


# Kinds of files


@pytest.fixture(params=["region", "full", "simplejpeg"])
def decoder(request: pytest.FixtureRequest) -> Iterator[ImageDecoder]:
    if request.param == "simplejpeg":
        with nothing_compiled():
            yield ImageDecoder("auto", "exact")
    elif not libjpeg.LIBRARY.exists():
        pytest.skip("the region decoder is not built here")
    else:
        yield ImageDecoder(request.param, "exact")


def centre(picture: bytes, decoder: ImageDecoder) -> Pixels:
    out = np.empty((50, 50, 3), np.uint8)
    decoder.sample(picture, lambda height, width: Placement(Window(50, 60, 50, 50), Window(50, 60, 50, 50)), out)
    return out


CMYK = Image.fromarray(photo()).convert("CMYK")


def cmyk_file() -> bytes:
    file = io.BytesIO()
    CMYK.save(file, "JPEG", quality=100)
    return file.getvalue()


@pytest.mark.parametrize(
    "picture",
    [
        encoded(photo(), quality=98, progressive=True),
        encoded(photo(), quality=98, subsampling="4:4:4"),
        encoded(photo(), quality=98, subsampling="4:2:2"),
        encoded(photo(), quality=98) + b"\0" * 10,
        encoded(photo(), quality=98, keep_rgb=True),
        cmyk_file(),
    ],
    ids=["progressive", "444", "422", "bytes-behind", "rgb-stored", "cmyk"],
)
def test_every_kind_of_jpeg_becomes_rgb(picture: bytes, decoder: ImageDecoder) -> None:
    assert apart(centre(picture, decoder), photo()[50:100, 60:110]) < 3
    assert decoder.image(picture).shape == (300, 400, 3)
    assert apart(decoder.image(picture), photo()) < 3


def test_grey_jpegs_become_rgb(decoder: ImageDecoder) -> None:
    out = centre(encoded(photo()[:, :, 0], quality=98), decoder)
    assert np.array_equal(out[:, :, 0], out[:, :, 2])
    assert apart(out[:, :, 0], photo()[50:100, 60:110, 0]) < 2


def absurd() -> bytes:
    picture = bytearray(encoded(photo(), quality=95))
    frame = picture.index(b"\xff\xc0")
    picture[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"
    return bytes(picture)


def corrupt() -> bytes:
    """Its image data ends early, with the end-of-image marker in place."""
    whole = encoded(np.random.default_rng(1).integers(0, 256, (300, 400, 3), np.uint8))
    return whole[:3000] + b"\xff\xd9"


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\xff",
        b"not an image",
        cv2.imencode(".png", photo())[1].tobytes(),
        PICTURES[0][:2000],
        absurd(),
        corrupt(),
    ],
    ids=["empty", "a-byte", "text", "png", "truncated", "absurd", "corrupt"],
)
def test_what_is_no_whole_jpeg_is_a_bad_image(bad: bytes, decoder: ImageDecoder) -> None:
    with pytest.raises(BadImage, match=r"^[^\n]+$"):
        centre(bad, decoder)
    with pytest.raises(BadImage, match=r"^[^\n]+$"):
        decoder.image(bad)
    # The decoder is as good as new.
    assert apart(centre(encoded(photo(), quality=98), decoder), photo()[50:100, 60:110]) < 3


def test_one_decoder_takes_images_of_all_sizes_in_turn(decoder: ImageDecoder) -> None:
    for height, width in [(20, 30), (900, 1200), (8, 8), (333, 517)]:
        image = decoder.image(encoded(photo(height, width), quality=98, subsampling="4:4:4"))
        assert image.shape == (height, width, 3)
        assert apart(image, photo(height, width)) < 3


# What is chosen


def test_without_the_library_whole_images_are_decoded_and_the_result_says_so() -> None:
    with nothing_compiled():
        decoding = ImageDecoder("auto", "fast").decoding
        assert (decoding.decoder, decoding.resize, decoding.scaled_dct) == ("full", "opencv", False)
        assert "simplejpeg" in decoding.library
        assert "no region decoder: not built" in decoding.note
        with pytest.raises(EnvironmentUnfit, match="no region decoder"):
            ImageDecoder("region", "fast")
        out = sample(PICTURES[0], Placement(Window(0, 0, 100, 100), View(0, 0, 100, 100)), "auto", "exact")
        assert out.std() > 0


@needs_region
def test_a_library_that_is_no_libjpeg_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(libjpeg.LIBJPEG_VARIABLE, "libm.so.6")
    libjpeg.libjpeg_path.cache_clear()
    try:
        with pytest.raises(libjpeg.Unavailable, match=r"libm\.so\.6: no libjpeg-turbo"):
            libjpeg.libjpeg_path()
        assert "libm.so.6" in ImageDecoder("auto", "fast").decoding.note
    finally:
        libjpeg.libjpeg_path.cache_clear()


@needs_region
def test_the_result_names_library_and_options() -> None:
    fast, exact = (ImageDecoder("auto", decode).decoding for decode in ("fast", "exact"))
    assert (fast.decoder, fast.fast_dct, fast.fast_upsampling, fast.scaled_dct) == ("region", True, True, True)
    assert (exact.fast_dct, exact.fast_upsampling, exact.scaled_dct) == (False, False, False)
    assert fast.library.startswith("libjpeg-turbo ")
    assert not fast.note
