"""Synthetic sets: the same bytes again, ImageNet's shape, learnable from texture but not from colour."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from numpy.typing import NDArray

from drawbar.dataset import picture
from drawbar.dataset.destination import FolderDestination
from drawbar.dataset.folder import scan_folder
from drawbar.dataset.imagenet import ImageNetFiles, scan_imagenet
from drawbar.dataset.jpeg import JpegHeader, parse_header
from drawbar.dataset.making import write_whole
from drawbar.dataset.pack import pack
from drawbar.dataset.shard_writer import PackSettings
from drawbar.dataset.synthetic import MARKER_NAME, ImagenetLikeSet, SyntheticSource, make_imagenet_like
from drawbar.errors import EnvironmentUnfit, InputError
from tests.drawbar_process import drawbar

NUM_IMAGES = 360
NUM_CLASSES = 10


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "set"
    stats = make_imagenet_like(folder, num_images=NUM_IMAGES, num_classes=NUM_CLASSES, seed=3, workers=2)
    assert (stats.num_images, stats.made, stats.num_classes) == (NUM_IMAGES, NUM_IMAGES, NUM_CLASSES)
    assert stats.total_bytes == sum(path.stat().st_size for path in files(folder))
    return folder


@pytest.fixture(scope="module")
def headers(made: Path) -> list[JpegHeader]:
    return [parse_header(path.read_bytes()) for path in files(made)]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.JPEG"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in files(folder)}


def decode(data: bytes) -> NDArray[np.uint8]:
    return np.asarray(simplejpeg.decode_jpeg(data, colorspace="RGB"), np.uint8)


def test_same_bytes_for_any_number_of_workers(tmp_path: Path) -> None:
    sets = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        make_imagenet_like(folder, num_images=40, num_classes=7, seed=5, workers=workers)
        sets.append(contents(folder))
    assert sets[0] == sets[1]
    assert len(set(sets[0].values())) == 40
    make_imagenet_like(tmp_path / "other", num_images=2, num_classes=7, seed=6, workers=1)
    assert not set(contents(tmp_path / "other").values()) & set(sets[0].values())


def test_evenly_spread_over_named_classes(made: Path, tmp_path: Path) -> None:
    counts = {folder.name: len(list(folder.iterdir())) for folder in made.iterdir() if folder.is_dir()}
    assert counts == {f"n{label:08d}": NUM_IMAGES // NUM_CLASSES for label in range(1, NUM_CLASSES + 1)}
    assert (made / "n00000001" / "n00000001_12.JPEG").exists()
    make_imagenet_like(tmp_path / "few", num_images=3, num_classes=5, workers=1)
    assert len([folder for folder in (tmp_path / "few").iterdir() if folder.is_dir()]) == 5
    assert len(files(tmp_path / "few")) == 3


def test_sizes_like_imagenet(made: Path) -> None:
    sizes = np.array([path.stat().st_size for path in files(made)])
    assert 105_000 < sizes.mean() < 115_000
    assert 38_000 < sizes.std() < 60_000
    assert sizes.min() < 45_000
    assert sizes.max() > 220_000
    assert np.median(sizes) < sizes.mean()


@pytest.mark.parametrize("seed", [1, 2])
def test_mean_size_of_other_seeds_and_of_a_thousand_classes(seed: int) -> None:
    sizes = [len(picture.make_picture(seed, index, index * 9 + 1)) for index in range(110)]
    assert 104_000 < np.mean(sizes) < 116_000


def test_pixels_like_imagenet(headers: list[JpegHeader]) -> None:
    landscape = np.mean([header.width > header.height for header in headers])
    assert 0.6 < landscape < 0.9
    assert np.mean([header.width < header.height for header in headers]) > 0.1
    assert 440 < np.median([max(header.width, header.height) for header in headers]) < 540
    assert 300 < np.median([min(header.width, header.height) for header in headers]) < 400
    assert len({(header.width, header.height) for header in headers}) > 50


def test_chroma_is_420(headers: list[JpegHeader]) -> None:
    assert {header.sampling for header in headers} == {((2, 2), (1, 1), (1, 1))}
    assert not any(header.progressive for header in headers)


def test_detail_lies_between_flat_and_noise(made: Path) -> None:
    """Bits per pixel at one quality: a photograph's, far from a blurred picture's and from white noise's."""

    def bits(pixels: NDArray[np.uint8]) -> float:
        data = simplejpeg.encode_jpeg(pixels, quality=85, colorsubsampling="420")
        return 8 * len(data) / float(pixels.size / 3)

    noise = bits(np.random.default_rng(0).integers(0, 256, (375, 500, 3), np.uint8))
    flat = bits(np.full((375, 500, 3), 99, np.uint8))
    each = np.array([bits(np.ascontiguousarray(decode(path.read_bytes()))) for path in files(made)[::12]])
    assert 1.3 < np.median(each) < 4.0
    assert 5 * flat < each.min()
    assert np.median(each) < 0.6 * noise


def test_power_falls_with_frequency_as_in_nature(made: Path) -> None:
    """Natural images: power about f^-2 (Field, 1987); white noise has exponent 0."""
    exponents = []
    for path in files(made)[::12]:
        grey = cv2.resize(decode(path.read_bytes()).mean(2), (256, 256), interpolation=cv2.INTER_AREA)
        window = np.outer(np.hanning(256), np.hanning(256))
        power = np.abs(np.fft.fftshift(np.fft.fft2((grey - grey.mean()) * window))) ** 2
        radius = np.hypot(*np.meshgrid(np.arange(-128, 128), np.arange(-128, 128))).astype(int)
        radial = np.bincount(radius.ravel(), power.ravel()) / np.bincount(radius.ravel())
        exponents.append(np.polyfit(np.log(np.arange(4, 100)), np.log(radial[4:100]), 1)[0])
    assert -3.0 < np.median(exponents) < -1.3


def orientation_histograms(pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Gradient orientations, 18 bins at each of 3 scales, weighted by strength; no colour, no place."""
    grey = cv2.cvtColor(cv2.resize(pixels, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA), cv2.COLOR_RGB2GRAY)
    histograms = []
    for sigma in (0.5, 1.0, 2.0):
        smooth = cv2.GaussianBlur(grey.astype(np.float32), (0, 0), sigma)
        across, down = cv2.Sobel(smooth, cv2.CV_32F, 1, 0), cv2.Sobel(smooth, cv2.CV_32F, 0, 1)
        bins = (cv2.phase(across, down) * (18 / np.pi)).astype(int).ravel() % 18
        histogram = np.bincount(bins, cv2.magnitude(across, down).ravel(), 18)
        histograms.append(histogram / histogram.sum())
    return np.concatenate(histograms)


def held_out_accuracy(features: NDArray[Any], labels: NDArray[Any]) -> float:
    linear_model = pytest.importorskip("sklearn.linear_model")
    features = (features - features.mean(0)) / features.std(0)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[: len(order) * 2 // 3], order[len(order) * 2 // 3 :]
    model = linear_model.LogisticRegression(max_iter=1000).fit(features[train], labels[train])
    return float(model.score(features[test], labels[test]))


def test_classes_are_in_texture_and_not_in_colour(made: Path) -> None:
    labels = np.array([path.parent.name for path in files(made)])
    pictures = [decode(path.read_bytes()) for path in files(made)]
    chance = 1 / NUM_CLASSES
    colours = np.array([pixels.mean((0, 1)) for pixels in pictures])
    assert held_out_accuracy(colours, labels) < 2 * chance
    textures = np.array([orientation_histograms(pixels) for pixels in pictures])
    assert held_out_accuracy(textures, labels) > 7 * chance


def test_a_thousand_classes_differ() -> None:
    patterns = [picture.class_pattern(label) for label in range(1, 1001)]
    assert len(set(patterns)) == 1000
    assert all(0 <= pattern.angle <= np.pi / 2 for pattern in patterns)


def test_resuming_makes_only_what_is_missing(tmp_path: Path) -> None:
    def make() -> int:
        return make_imagenet_like(tmp_path / "set", num_images=12, num_classes=3, seed=2, workers=1).made

    seen: list[tuple[str, int, int]] = []
    assert make() == 12
    before = contents(tmp_path / "set")
    for path in files(tmp_path / "set")[3:5]:
        path.unlink()
    (tmp_path / "set" / "n00000001" / ".n00000001_0.JPEG.tmp").write_bytes(b"left by an interrupted run")
    stats = make_imagenet_like(
        tmp_path / "set", num_images=12, num_classes=3, seed=2, workers=1, progress=lambda *step: seen.append(step)
    )
    assert stats.made == 2
    assert seen == [("making images", 12, 12)]
    assert contents(tmp_path / "set") == before
    assert make() == 0


def test_occupied_folders_are_refused(tmp_path: Path) -> None:
    def make(folder: Path, **settings: int) -> None:
        make_imagenet_like(folder, **{"num_images": 2, "num_classes": 2, "seed": 1, "workers": 1} | settings)  # type: ignore[arg-type]

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match="is not empty and no synthetic set"):
        make(foreign)
    assert [path.name for path in foreign.iterdir()] == ["thesis.tex"]
    with pytest.raises(InputError, match="is no folder"):
        make(foreign / "thesis.tex")
    with pytest.raises(EnvironmentUnfit, match="cannot write to"):
        make(foreign / "thesis.tex" / "below")
    make(tmp_path / "set")
    with pytest.raises(InputError, match="another synthetic set: seed 1 instead of 9"):
        make(tmp_path / "set", seed=9)
    (tmp_path / "set" / MARKER_NAME).write_text("{")
    with pytest.raises(InputError, match="is damaged"):
        make(tmp_path / "set")
    with pytest.raises(InputError, match="number of images is 0; expected at least 1"):
        make(tmp_path / "new", num_images=0)
    assert not (tmp_path / "new").exists()


def test_small_pictures(tmp_path: Path) -> None:
    stats = make_imagenet_like(tmp_path / "set", num_images=40, num_classes=4, seed=1, size=64, workers=1)
    headers = [parse_header(path.read_bytes()) for path in files(tmp_path / "set")]
    assert 50 < np.median([max(header.width, header.height) for header in headers]) < 78
    assert 1200 < stats.mean_bytes < 3000
    with pytest.raises(InputError, match="another synthetic set: size 64 instead of 500"):
        make_imagenet_like(tmp_path / "set", num_images=40, num_classes=4, seed=1)
    with pytest.raises(InputError, match="size is 8; expected 32 to 4096 pixels"):
        make_imagenet_like(tmp_path / "new", num_images=1, size=8)


def test_a_size_of_zero_is_not_the_usual_one(tmp_path: Path) -> None:
    for kind in ("imagenet-like", "coco-like"):
        for shards in ([], ["--shards", "1"]):
            refused = drawbar("data", "make", kind, tmp_path / "set", "--images", "1", "--size", "0", *shards)
            assert refused.code == 2
            assert "size is 0; expected" in refused.error_line


def test_a_full_disk_leaves_no_half_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(tmp_path / "a.JPEG", bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_sets_of_earlier_versions_go_on(tmp_path: Path) -> None:
    settings = {"num_images": 2, "num_classes": 2, "seed": 1, "workers": 1}
    make_imagenet_like(tmp_path, **settings)  # type: ignore[arg-type]
    (tmp_path / MARKER_NAME).write_text('{"generator": 1, "num_images": 2, "num_classes": 2, "seed": 1}')
    assert make_imagenet_like(tmp_path, **settings).made == 0  # type: ignore[arg-type]


def test_a_set_whose_making_was_interrupted_is_not_packed(tmp_path: Path) -> None:
    make_imagenet_like(tmp_path / "set", num_images=10, num_classes=4, seed=1, size=64, workers=1)
    files(tmp_path / "set")[3].unlink()
    unfinished = r"set is a synthetic set whose making did not end: it has 9 of 10 images"
    with pytest.raises(InputError, match=unfinished):
        scan_folder(tmp_path / "set")
    with pytest.raises(InputError, match=unfinished):
        scan_imagenet(tmp_path / "set", ImageNetFiles())
    make_imagenet_like(tmp_path / "set", num_images=10, num_classes=4, seed=1, size=64, workers=1)
    assert len(scan_folder(tmp_path / "set").items()) == 10


def test_a_synthetic_set_that_is_kept_is_not_said_to_have_files(tmp_path: Path) -> None:
    source = SyntheticSource(ImagenetLikeSet(6, 2, 1, 64))
    notes: list[str] = []
    for _ in range(2):
        pack(source, FolderDestination(tmp_path), PackSettings(num_shards=1), workers=1, note=notes.append)
    (note,) = notes
    assert "holds this set already, and it was kept: it was made with the same settings (--overwrite" in note


def test_records_are_the_same_without_a_folder(tmp_path: Path) -> None:
    make_imagenet_like(tmp_path / "set", num_images=30, num_classes=7, seed=2, size=96, workers=1)
    shards = []
    for number, source in enumerate((scan_folder(tmp_path / "set"), SyntheticSource(ImagenetLikeSet(30, 7, 2, 96)))):
        place = tmp_path / f"packed{number}"
        manifest = pack(source, FolderDestination(place), PackSettings(num_shards=3), workers=number + 1)
        assert (manifest.num_records, manifest.bad) == (30, ())
        content = [(place / shard.name).read_bytes() for shard in manifest.shards]
        shards.append((content, manifest.class_counts, manifest.labels))
    assert shards[0] == shards[1]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_small_network_learns_the_small_pictures() -> None:
    """ResNet-18 from scratch, 8 passes over 4,384 pictures of 10 classes, 3 minutes on 2 cores; held out: >= 90 %."""
    import torch
    from torch.nn.functional import cross_entropy
    from torchvision.models import resnet18

    wanted = ImagenetLikeSet(5000, num_classes=10, seed=1, size=64)
    num_train, crop, batch, epochs = 4384, 48, 32, 8
    torch.manual_seed(0)
    pixels = np.stack([cv2.resize(decode(wanted.draw(index)), (64, 64)) for index in range(wanted.num_images)])
    images = ((torch.from_numpy(pixels).permute(0, 3, 1, 2).float() - 120) / 60).contiguous(
        memory_format=torch.channels_last
    )
    labels = torch.tensor([wanted.label(index) - 1 for index in range(wanted.num_images)])
    model: Any = resnet18(num_classes=10).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), 0.002, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.002, total_steps=num_train // batch * epochs)
    for _ in range(epochs):
        model.train()
        for chosen in torch.randperm(num_train).view(-1, batch):
            top, left = torch.randint(0, 64 - crop + 1, (2,)).tolist()
            found = model(images[chosen, :, top : top + crop, left : left + crop])
            optimizer.zero_grad()
            cross_entropy(found, labels[chosen], label_smoothing=0.1).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    model.eval()
    edge = (64 - crop) // 2
    with torch.no_grad():
        found = model(images[num_train:, :, edge : edge + crop, edge : edge + crop]).argmax(1)
    assert (found == labels[num_train:]).float().mean() >= 0.9


def test_marker_says_what_it_is(made: Path) -> None:
    marker = json.loads((made / MARKER_NAME).read_text())
    assert marker == {"generator": 1, "num_images": NUM_IMAGES, "num_classes": NUM_CLASSES, "seed": 3, "size": 500}
