"""Decoding by nvImageCodec: the CPU's windows, flips and pixels, what it leaves to the CPU, and what it says when it
cannot. Its calls are made here on nvImageCodec's CPU decoder; those marked `gpu` make them on a device."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from drawbar.config import Input, Launch, Recipe, Storage
from drawbar.dataset.listing import list_shards
from drawbar.dataset.picture import make_picture
from drawbar.errors import DataError, EnvironmentUnfit
from drawbar.input import gpu_decode
from drawbar.input.augment import RecordRandom, train_placement
from drawbar.input.decode import DecodePool
from drawbar.input.gpu_decode import GpuDecodePool, GpuDecoder, open_gpu_decoder
from drawbar.input.image_decoder import Placement, read_header
from drawbar.input.libjpeg import Window
from drawbar.input.loader import Loader, ReadPlan
from drawbar.input.sample import SampleMaker
from drawbar.journal import InputReport, InputTotals
from drawbar.storage.reader import CountedReader
from drawbar.storage.stores import open_place
from tests.drawbar_process import drawbar
from tests.small_set import NUM_CLASSES, example, write_set

CPU = torch.device("cpu")

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: needs a CUDA device")

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def image_file(mode: str, seed: int = 0, **options: Any) -> bytes:
    """Smooth, 70 x 90, in one of PIL's modes."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8)).resize((90, 70), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    coarse.convert(mode).save(file, "JPEG", **{"quality": 92} | options)
    return file.getvalue()


def batches(
    folder: Path, pool: Callable[..., DecodePool], decode: Literal["fast", "exact"], count: int = 6, side: int = 32
) -> tuple[list[Pixels], list[list[int]], InputTotals, InputReport]:
    """Pixels and labels of the first batches of 16, and what the loader counted."""
    storage = Storage(request_bytes=8192, read_ahead=3)
    settings = Input(image_size=side, decode=decode, decoder="auto")
    place = open_place(str(folder), None, None, storage)
    loader = Loader(
        ReadPlan(shards=list_shards(place.store, place.prefix).shards, rank=0, world_size=1, batch_size=16),
        CountedReader(place, storage, lambda request: None),
        num_classes=NUM_CLASSES,
        input=settings,
        storage=storage,
        decode_threads=2,
        pool=pool,
        unfinished=2,
    )
    pixels, labels = [], []
    try:
        for _ in range(count):
            batch = loader.next_batch(60)
            images = batch.images if batch.on_device is None else batch.on_device.cpu().numpy()
            pixels.append(images.copy())
            labels.append(batch.labels.tolist())
            loader.recycle(batch)
    finally:
        totals = loader.close()
    return pixels, labels, totals, loader.report()


def pool_of(device: torch.device, decode: Literal["fast", "exact"]) -> Callable[..., DecodePool]:
    return partial(GpuDecodePool, GpuDecoder(device, decode, 2))


# Of exact samples only the resize differs, float against weights of 7 bits. The CPU's fast path decodes windows of at
# least twice the sample's side at a fraction of the size: there only the mean is near.
@pytest.mark.parametrize(("decode", "side", "mean", "most"), [("exact", 32, 0.5, 3), ("fast", 200, 8.0, 255)])
def test_the_same_samples_as_by_the_cpu(
    tmp_path: Path, decode: Literal["fast", "exact"], side: int, mean: float, most: int
) -> None:
    payloads = {number: example(number, 1 + number % 10, make_picture(1, number, 3)) for number in range(96)}
    write_set(tmp_path, payloads=payloads)
    mine, my_labels, my_totals, my_report = batches(tmp_path, pool_of(CPU, decode), decode, side=side)
    theirs, their_labels, totals, report = batches(tmp_path, DecodePool, decode, side=side)
    assert my_labels == their_labels
    assert my_totals.trained_images == totals.trained_images == 96
    assert my_totals.decoded_images >= 96
    assert my_report.fallback_images == report.fallback_images == 0
    for one, other in zip(mine, theirs, strict=True):
        apart = np.abs(one.astype(int) - other.astype(int))
        # Image by image: a window or a flip that is another one would stand out by far.
        assert apart.mean(axis=(1, 2, 3)).max() < mean
        assert apart.max() <= most


def test_windows_are_pieces_of_the_whole_picture() -> None:
    encoded = make_picture(1, 5, 2)
    pairs = [
        (GpuDecoder(CPU, "fast", 1), simplejpeg.decode_jpeg(encoded, "RGB", fastdct=True, fastupsample=True)),
        (GpuDecoder(CPU, "exact", 1), simplejpeg.decode_jpeg(encoded, "RGB", fastdct=False, fastupsample=False)),
    ]
    for number in range(12):
        height, width, _ = read_header(encoded)
        window, _, flip = train_placement(height, width, RecordRandom(3, 0, 0, number))
        # Shown at its own size, nothing is resized.
        out = torch.empty((1, window.height, window.width, 3), dtype=torch.uint8)
        for decoder, reference in pairs:
            assert decoder.samples([(encoded, Placement(window, window, flip))], out) == []
            part = reference[window.top : window.top + window.height, window.left : window.left + window.width]
            assert np.array_equal(out[0].numpy(), part[:, ::-1] if flip else part)


def test_what_is_no_plain_jpeg_is_left_to_the_cpu_and_counted(tmp_path: Path) -> None:
    kinds = [
        image_file("CMYK"),
        image_file("RGB", keep_rgb=True),
        image_file("L"),
        image_file("RGB", progressive=True),
        image_file("RGB", subsampling=0),
    ]
    payloads = {number: example(number, 1 + number % 10, kinds[number % len(kinds)]) for number in range(96)}
    write_set(tmp_path, payloads=payloads)
    mine, my_labels, totals, report = batches(tmp_path, pool_of(CPU, "exact"), "exact", count=2)
    theirs, labels, _, _ = batches(tmp_path, DecodePool, "exact", count=2)
    assert my_labels == labels
    for one, other in zip(mine, theirs, strict=True):
        assert np.abs(one.astype(int) - other.astype(int)).max() <= 3
    assert 0 < report.fallback_images < totals.decoded_images
    # Two of five kinds, in all batches that were decoded, trained or not.
    assert report.fallback_images / totals.decoded_images == pytest.approx(2 / 5, abs=0.15)


def test_what_nvimagecodec_does_not_decode_is_left_to_the_cpu(tmp_path: Path) -> None:
    write_set(tmp_path)
    decoder = GpuDecoder(CPU, "exact", 1)
    real = decoder._decoder
    decoder._decoder = SimpleNamespace(
        decode=lambda streams, **more: [
            None if i % 3 == 1 else image for i, image in enumerate(real.decode(streams, **more))
        ]
    )
    mine, _, _, report = batches(tmp_path, partial(GpuDecodePool, decoder), "exact", count=2)
    theirs, _, _, _ = batches(tmp_path, DecodePool, "exact", count=2)
    for one, other in zip(mine, theirs, strict=True):
        assert np.abs(one.astype(int) - other.astype(int)).max() <= 3
    assert report.fallback_images % 5 == 0  # 5 of each batch of 16
    assert report.fallback_images >= 10


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"this is no image", "cannot decode image"),
        (image_file("RGB")[:-400], "no end-of-image marker"),
    ],
)
def test_a_bad_image_is_named_with_its_place(tmp_path: Path, payload: bytes, reason: str) -> None:
    write_set(tmp_path, payloads={5: example(5, 1, payload)})
    with pytest.raises(DataError, match=reason) as caught:
        batches(tmp_path, pool_of(CPU, "fast"), "fast")
    assert "train-00000-of-00004 at byte" in str(caught.value)


def test_a_label_out_of_range_is_named(tmp_path: Path) -> None:
    write_set(tmp_path, payloads={5: example(5, 11, image_file("RGB"))})
    with pytest.raises(DataError, match="label 11 is out of range"):
        batches(tmp_path, pool_of(CPU, "fast"), "fast")


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)
    with pytest.raises(EnvironmentUnfit, match="no JPEG decoding by nvImageCodec on cpu") as caught:
        GpuDecoder(CPU, "fast", 1)
    assert "pip install" in (caught.value.hint or "")


def wrapped(monkeypatch: pytest.MonkeyPatch, decode: Callable[[list[Any]], list[Any]]) -> None:
    """nvImageCodec, its decoder's answers changed."""
    real = gpu_decode._nvimgcodec(CPU)

    def make(**options: Any) -> Any:
        decoder = real.Decoder(**options)
        return SimpleNamespace(decode=lambda streams, **more: decode(decoder.decode(streams, **more)))

    names = {name: getattr(real, name) for name in dir(real) if not name.startswith("__")}
    versions = {"__version__": real.__version__, "__cuda_version__": real.__cuda_version__}
    monkeypatch.setattr(
        gpu_decode, "_nvimgcodec", lambda device: SimpleNamespace(**names | versions | {"Decoder": make})
    )


def test_a_library_that_decodes_nothing_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without libnvjpeg: every image would silently be the CPU's."""
    wrapped(monkeypatch, lambda images: [None for _ in images])
    with pytest.raises(EnvironmentUnfit, match="decodes no JPEG there"):
        GpuDecoder(CPU, "fast", 1)


def test_a_library_with_wrong_pixels_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped(monkeypatch, lambda images: [np.asarray(image)[:, :, ::-1].copy() for image in images])
    with pytest.raises(EnvironmentUnfit, match="comes out wrong there, by"):
        GpuDecoder(CPU, "fast", 1)


def test_a_rank_without_a_gpu_ends_at_once() -> None:
    with pytest.raises(EnvironmentUnfit, match="this rank has no CUDA device"):
        open_gpu_decoder(CPU, "fast", 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.run
def test_a_run_without_a_gpu_says_so_in_one_line(tmp_path: Path) -> None:
    write_set(tmp_path / "set")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        Recipe(input=Input(decoder="gpu", image_size=32), launch=Launch(stall_timeout_s=60))
        .to_toml()
        .replace("s3://imagenet-like/train", str(tmp_path / "set"))
    )
    finished = drawbar("run", recipe, "--out", tmp_path / "run", "--set", "data.num_classes=10")
    assert finished.code == 3
    assert 'input.decoder is "gpu", but this rank has no CUDA device' in finished.error_line
    assert " on ," not in finished.error_line


def test_recipes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r'launch\.device is "cpu"'):
        Recipe(input=Input(decoder="gpu"), launch=Launch(device="cpu"))
    with pytest.raises(ValueError, match="colours are distorted on the CPU"):
        Recipe(input=Input(decoder="gpu", distortions=True))


def test_beside_a_gpu_the_cpu_decodes_as_ever() -> None:
    """Evaluation, and what the GPU leaves over."""
    assert SampleMaker(Input(decoder="gpu")).decoding == SampleMaker(Input(decoder="auto")).decoding


@gpu
@needs_gpu
@pytest.mark.parametrize(("decode", "mean"), [("exact", 1.5), ("fast", 8.0)])
def test_on_a_gpu_the_same_samples_as_by_the_cpu(tmp_path: Path, decode: Literal["fast", "exact"], mean: float) -> None:
    payloads = {number: example(number, 1 + number % 10, make_picture(1, number, 3)) for number in range(96)}
    payloads[7] = example(7, 8, image_file("CMYK"))
    payloads[8] = example(8, 9, image_file("L"))
    write_set(tmp_path, payloads=payloads)
    mine, my_labels, _, report = batches(tmp_path, pool_of(torch.device("cuda", 0), decode), decode, side=200)
    theirs, labels, _, _ = batches(tmp_path, DecodePool, decode, side=200)
    assert my_labels == labels
    for one, other in zip(mine, theirs, strict=True):
        assert np.abs(one.astype(int) - other.astype(int)).mean(axis=(1, 2, 3)).max() < mean
    assert report.fallback_images >= 1


@gpu
@needs_gpu
def test_on_a_gpu_windows_at_every_edge() -> None:
    encoded = make_picture(1, 5, 2)
    height, width, _ = read_header(encoded)
    whole = simplejpeg.decode_jpeg(encoded, "RGB", fastdct=False, fastupsample=True)
    decoder = GpuDecoder(torch.device("cuda", 0), "fast", 2)
    for top, left in ((0, 0), (height - 65, width - 67), (1, 15), (17, 0)):
        window = Window(top, left, 65, 67)
        out = decoder.empty((1, 65, 67, 3))
        assert decoder.samples([(encoded, Placement(window, window))], out) == []
        wanted = whole[top : top + 65, left : left + 67].astype(int)
        assert np.abs(out[0].cpu().numpy() - wanted).mean() < 1.5
