"""JPEG decoding on a GPU by nvImageCodec: whole batches, from encoded bytes to resized pixels on the device.

`GpuDecoder` does a batch's pixels; `GpuDecodePool` stands in the loader where the decode threads are otherwise. The
crop windows and flips are those of the CPU's path: the same draws of the same records. What nvImageCodec does not
decode, and what it might decode in its own way (CMYK, RGB stored as such), is decoded on the CPU and counted.

nvImageCodec also decodes on a CPU, by the same calls: a `GpuDecoder` for the CPU is how they are tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, Literal

import numpy as np
import simplejpeg
import torch
from torch.nn import functional

from drawbar.errors import EnvironmentUnfit
from drawbar.input.augment import train_placement
from drawbar.input.batch import Batch, NoSample, Record
from drawbar.input.decode import DecodePool
from drawbar.input.image_decoder import BadImage, Decoding, Encoded, Placement, read_header
from drawbar.input.libjpeg import Window
from drawbar.input.sample import SampleMaker, cannot_decode

_PLAIN = ("YCbCr", "Gray")
"""What every JPEG decoder understands alike."""
_PROOF_BOUND = 4.0
"""Mean difference, of 255, between a smooth picture and what its JPEG decodes to: a window two pixels off is beyond."""


class GpuDecoder:
    """nvImageCodec on one device. For one thread at a time; nvImageCodec's own threads, at most `threads`, help it."""

    def __init__(self, device: torch.device, decode: Literal["fast", "exact"], threads: int) -> None:
        """Raises EnvironmentUnfit where it cannot be had, or does not decode."""
        codec = _nvimgcodec(device)
        on_gpu = device.type == "cuda"
        kinds = codec.BackendKind
        # Without the CPU among them: what the GPU does not take is told, and not decoded behind our back.
        backends = [kinds.HW_GPU_ONLY, kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU] if on_gpu else [kinds.CPU_ONLY]
        self._device, self._codec = device, codec
        self._exact = decode == "exact"
        try:
            self._decoder = codec.Decoder(
                device_id=device.index if on_gpu else codec.NVIMGCODEC_DEVICE_CPU_ONLY,
                max_num_cpu_threads=threads,
                backends=[codec.Backend(kind) for kind in backends],
                options=f":fancy_upsampling={int(self._exact)} :fast_idct={int(not self._exact)}",
            )
        except RuntimeError as error:
            raise _unfit(device, str(error)) from None
        # Exif rotation is ignored, as everywhere in Drawbar.
        self._params = codec.DecodeParams(apply_exif_orientation=False, color_spec=codec.ColorSpec.SRGB)
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.decoding = Decoding(
            decoder="gpu",
            library=f"nvImageCodec {codec.__version__} for CUDA {codec.__cuda_version__ // 1000} on {device}",
            fast_dct=not on_gpu and not self._exact,
            fast_upsampling=not self._exact,
            scaled_dct=False,
            resize="torch",
        )
        self._prove()

    def samples(self, images: Sequence[tuple[Encoded, Placement]], out: torch.Tensor) -> list[int]:
        """Fills `out`, uint8 (images, height, width, 3) on the device, each image as placed: its window, resized.

        Windows only, no views. Returns which of them nvImageCodec did not decode; their pixels are undefined. What it
        did is complete on return.
        """
        with self.stream():
            wholes = [self._codec.CodeStream(np.frombuffer(encoded, np.uint8)) for encoded, _ in images]
            # nvJPEG before 13.2 is wrong at a window's edge when it interpolates chroma, and then refuses windows.
            streams = [
                whole if self._exact else whole.get_sub_code_stream(region=self._region(placement.readable))
                for whole, (_, placement) in zip(wholes, images, strict=True)
            ]
            decoded = self._decoder.decode(streams, params=self._params, cuda_stream=self._stream_handle())
            resized = torch.empty((len(images), 3, *out.shape[1:3]), dtype=torch.float32, device=self._device)
            missing = []
            for i, (image, (_, placement)) in enumerate(zip(decoded, images, strict=True)):
                if image is None:
                    missing.append(i)
                    continue
                pixels = _crop(self._tensor(image), placement.readable) if self._exact else self._tensor(image)
                self._resize(pixels, resized[i])
            flips = torch.tensor([placement.flip for _, placement in images], device=self._device)
            flipped = torch.where(flips[:, None, None, None], resized.flip(3), resized)
            out.copy_(flipped.round_().to(torch.uint8).permute(0, 2, 3, 1))
            self.synchronize()
        # Until here `decoded` and `wholes` hold the memory that the device reads.
        return missing

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        """uint8, on the device."""
        with self.stream():
            return torch.empty(shape, dtype=torch.uint8, device=self._device)

    def stream(self) -> AbstractContextManager[Any]:
        """What is enqueued here runs beside the training."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _region(self, window: Window) -> Any:
        return self._codec.Region(
            window.top, window.left, window.top + window.height, window.left + window.width
        )  # start and end, rows first

    def _stream_handle(self) -> int:
        return self._stream.cuda_stream if self._stream is not None else 0

    def _tensor(self, image: Any) -> torch.Tensor:
        """The same memory as (height, width, 3), by the array interface, whose rows may be padded."""
        if self._device.type == "cuda":
            return torch.as_tensor(image, device=self._device)
        return torch.from_numpy(np.asarray(image))

    def _resize(self, pixels: torch.Tensor, out: torch.Tensor) -> None:
        """(height, width, 3) to float (3, height, width), bilinear between the centres of pixels, without smoothing."""
        planes = pixels.permute(2, 0, 1)[None].float()
        size = (out.shape[1], out.shape[2])
        out.copy_(functional.interpolate(planes, size, mode="bilinear", align_corners=False)[0])

    def _prove(self) -> None:
        """A picture whose pixels are known, decoded in a window: that library, driver and options work together."""
        size, window = 64, Window(9, 17, 40, 32)
        rows, columns = np.mgrid[0:size, 0:size]
        picture = np.stack([rows * 3, columns * 3, 255 - rows * 3], axis=2).astype(np.uint8)
        encoded = simplejpeg.encode_jpeg(picture, quality=98, colorsubsampling="420")
        out = self.empty((1, window.height, window.width, 3))
        if self.samples([(encoded, Placement(window, window, True))], out):
            raise _unfit(self._device, "it decodes no JPEG there; libnvjpeg may be missing")
        wanted = picture[window.top : window.top + window.height, window.left : window.left + window.width][:, ::-1]
        apart = float(np.abs(out[0].cpu().numpy().astype(int) - wanted).mean())
        if apart > _PROOF_BOUND:
            raise _unfit(self._device, f"a known picture comes out wrong there, by {apart:.1f} of 255 on average")


class GpuDecodePool(DecodePool):
    """One thread that gives whole batches to the decoder. Fills `Batch.on_device` in place of `Batch.images`.

    For images with a label, in training.
    """

    def __init__(self, decoder: GpuDecoder, threads: int, samples: SampleMaker, **settings: Any) -> None:
        """`threads` are the decoder's own, given to it before; one thread of ours keeps it busy. `settings`:
        DecodePool's, without `evaluate`."""
        self._decoder, self._maker = decoder, samples
        super().__init__(1, samples, **settings)

    def _group(self, batch_size: int) -> int:
        return batch_size

    def _decode_group(self, batch: Batch, start: int, end: int, gaps: list[int]) -> Iterator[Record]:
        batch.on_device = self._decoder.empty(batch.images.shape)
        plain: list[int] = []
        placed: dict[int, tuple[Encoded, Placement]] = {}
        for i in range(start, end):
            record = batch.records[i]
            try:
                example, boxes = self._maker.parse(record)
                try:
                    height, width, colours = read_header(example.encoded)
                except BadImage as error:
                    raise cannot_decode(record, error) from None
            except NoSample as bad:
                self._met(bad)
                gaps.append(i)
                continue
            placed[i] = (example.encoded, train_placement(height, width, self._draws(record), boxes))
            batch.labels[i] = example.label - 1
            if colours in _PLAIN:
                plain.append(i)
        rest = [i for i in placed if i not in plain]
        if plain:
            # Rows in one piece where all are plain, as nearly always.
            whole = len(plain) == len(batch.records)
            out = batch.on_device if whole else self._decoder.empty((len(plain), *batch.images.shape[1:]))
            missing = self._decoder.samples([placed[i] for i in plain], out)
            if not whole:
                with self._decoder.stream():
                    batch.on_device[torch.tensor(plain, device=out.device)] = out
                    self._decoder.synchronize()
            rest = sorted({*rest, *(plain[i] for i in missing)})
        for i in rest:
            try:
                self._on_cpu(batch, i, *placed[i])
            except BadImage as error:
                self._met(cannot_decode(batch.records[i], error))
                gaps.append(i)
        yield from (batch.records[i] for i in placed if i not in gaps)

    def _decode(self, record: Record, draws_of: Record, batch: Batch, place: int) -> None:
        """One that stands in for another; few, and on the CPU."""
        example, boxes = self._maker.parse(record)
        try:
            height, width, _ = read_header(example.encoded)
            placement = train_placement(height, width, self._draws(draws_of), boxes)
            self._on_cpu(batch, place, example.encoded, placement)
        except BadImage as error:
            raise cannot_decode(record, error) from None
        batch.labels[place] = example.label - 1

    def _on_cpu(self, batch: Batch, place: int, encoded: Encoded, placement: Placement) -> None:
        """Decodes there and copies it over. Raises BadImage."""
        assert batch.on_device is not None  # noqa: S101 (`_decode_group` has made it)
        self._maker.place(encoded, placement, batch.images[place])
        with self._decoder.stream():
            batch.on_device[place] = torch.from_numpy(batch.images[place]).to(batch.on_device.device)
            self._decoder.synchronize()
        self.fallbacks += 1


def _crop(pixels: torch.Tensor, window: Window) -> torch.Tensor:
    return pixels[window.top : window.top + window.height, window.left : window.left + window.width]


def _nvimgcodec(device: torch.device) -> Any:
    try:
        return import_module("nvidia.nvimgcodec")
    except ImportError as error:
        raise _unfit(device, str(error)) from None


def _unfit(device: torch.device, why: str) -> EnvironmentUnfit:
    cuda = (torch.version.cuda or "13").partition(".")[0]
    return EnvironmentUnfit(
        f"no JPEG decoding by nvImageCodec on {device}: {why}",
        hint=f'pip install "nvidia-nvimgcodec-cu{cuda}[nvjpeg]", or input.decoder = "auto"',
    )


def open_gpu_decoder(device: torch.device, decode: Literal["fast", "exact"], threads: int) -> GpuDecoder:
    """For a rank. Raises EnvironmentUnfit, also where the rank has no GPU."""
    if device.type != "cuda":
        raise EnvironmentUnfit(
            'input.decoder is "gpu", but this rank has no CUDA device', hint='input.decoder = "auto" decodes on the CPU'
        )
    return GpuDecoder(device, decode, threads)
