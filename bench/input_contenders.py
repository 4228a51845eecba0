"""The peers' side of `bench/input_peers.py`: one input pipeline a process, in the peers' own environment.

    python bench/input_contenders.py NAME PLAN.npz

Without Drawbar. Each reads the same TFRecord shards, decodes the same crop windows, resizes to 224 by bilinear
interpolation without smoothing, flips, and hands over uint8 batches in file order. Protocol: a line with its settings
when it is ready; for each line `COUNT` on standard input it takes some batches untimed, to stand where it stands in the
middle of a run, then COUNT images timed, and prints a line; `pixels PATH` saves the first images it ever made.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]

BATCH_SIZE = 64
THREADS = 2
SIZE = 224
UNTIMED_BATCHES = 8
CHECKED_IMAGES = 128


class Plan:
    """What every contender reads; `input_peers.write_plan` makes it."""

    def __init__(self, path: str) -> None:
        with np.load(path) as saved:
            self.shards: list[str] = [str(name) for name in saved["shards"]]
            self.shard: npt.NDArray[np.int64] = saved["shard"]
            """(records,): index in `shards`."""
            self.offset: npt.NDArray[np.int64] = saved["offset"]
            """(records,): of the record."""
            self.jpeg: npt.NDArray[np.int64] = saved["jpeg"]
            """(records, 2): where its image starts in the file, and its bytes."""
            self.windows: npt.NDArray[np.int64] = saved["windows"]
            """(epochs, records, 4): top, left, height, width."""
            self.flips: npt.NDArray[np.bool_] = saved["flips"]
            """(epochs, records)."""


def tensorflow(plan: Plan) -> tuple[str, Iterator[Pixels]]:
    """tf.data as tf_cnn_benchmarks uses it, with what the tf.data performance guide adds."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    tf = import_module("tensorflow")
    features = {"image/encoded": tf.io.FixedLenFeature([], tf.string)}
    epochs = len(plan.windows)

    def sample(raw: Any, window: Any, flip: Any) -> Any:
        encoded = tf.io.parse_single_example(raw, features)["image/encoded"]
        image = tf.image.decode_and_crop_jpeg(
            encoded, window, channels=3, dct_method="INTEGER_FAST", fancy_upscaling=False
        )
        resized = tf.image.resize(image, [SIZE, SIZE], method="bilinear", antialias=False)
        flipped = tf.cond(flip, lambda: tf.reverse(resized, [1]), lambda: resized)
        return tf.cast(flipped + 0.5, tf.uint8)

    records = tf.data.TFRecordDataset(plan.shards, buffer_size=8 << 20).repeat(epochs)
    windows = tf.data.Dataset.from_tensor_slices((plan.windows.reshape(-1, 4).astype(np.int32), plan.flips.reshape(-1)))
    dataset = tf.data.Dataset.zip((records, windows)).map(
        lambda raw, where: sample(raw, *where), num_parallel_calls=THREADS, deterministic=True
    )
    dataset = dataset.batch(BATCH_SIZE, drop_remainder=True).prefetch(2)
    options = tf.data.Options()
    options.threading.private_threadpool_size = THREADS
    options.threading.max_intra_op_parallelism = 1
    options.experimental_optimization.map_and_batch_fusion = True
    words = (
        f"TensorFlow {tf.__version__}, decode_and_crop_jpeg (fused), dct_method INTEGER_FAST, fancy_upscaling off, "
        f"private threadpool of {THREADS}, parallel map, map_and_batch_fusion, prefetch 2"
    )
    return words, dataset.with_options(options).as_numpy_iterator()


def dali(plan: Plan) -> tuple[str, Iterator[Pixels]]:
    """DALI's CPU operators: the decoder decodes the window only."""
    package, fn = import_module("nvidia.dali"), import_module("nvidia.dali.fn")
    types, tfrecord = import_module("nvidia.dali.types"), import_module("nvidia.dali.tfrecord")
    folder = tempfile.mkdtemp(prefix="drawbar-bench-dali-")
    indices = []
    for number, shard in enumerate(plan.shards):
        starts = plan.offset[plan.shard == number]
        ends = np.append(starts[1:], os.path.getsize(shard))
        index = Path(folder) / Path(shard).name
        index.write_text("".join(f"{start} {end - start}\n" for start, end in zip(starts, ends, strict=True)))
        indices.append(str(index))
    windows, flips = plan.windows.reshape(-1, 4), plan.flips.reshape(-1)

    def batch_windows(number: int) -> Any:
        part = slice(number * BATCH_SIZE, (number + 1) * BATCH_SIZE)
        where = windows[part].astype(np.int32)
        return where[:, :2].copy(), where[:, 2:].copy(), flips[part].astype(np.int32)

    pipe = package.Pipeline(batch_size=BATCH_SIZE, num_threads=THREADS, device_id=None, prefetch_queue_depth=2)
    with pipe:
        read = fn.readers.tfrecord(
            path=plan.shards,
            index_path=indices,
            features={"image/encoded": tfrecord.FixedLenFeature((), tfrecord.string, "")},
            random_shuffle=False,
            prefetch_queue_depth=2,
        )
        anchors, shapes, mirror = fn.external_source(batch_windows, num_outputs=3, batch=True, dtype=types.INT32)
        images = fn.decoders.image_slice(
            read["image/encoded"],
            start=anchors,
            shape=shapes,
            axis_names="HW",
            device="cpu",
            output_type=types.RGB,
            use_fast_idct=True,
            jpeg_fancy_upsampling=False,
        )
        resized = fn.resize(images, size=[SIZE, SIZE], interp_type=types.INTERP_LINEAR, antialias=False)
        pipe.set_outputs(fn.flip(resized, horizontal=mirror))
    pipe.build()

    def batches() -> Iterator[Pixels]:
        while True:
            (images,) = pipe.run()
            yield images.as_array()

    words = (
        f"DALI {package.__version__} CPU, decoders.image_slice (fused), use_fast_idct, jpeg_fancy_upsampling off, "
        f"{THREADS} threads, prefetch 2"
    )
    return words, batches()


def dataloader(plan: Plan) -> tuple[str, Iterator[Pixels]]:
    """torch's DataLoader with torchvision, one worker a core."""
    torch, torchvision = import_module("torch"), import_module("torchvision")
    torch.set_num_threads(1)
    functional = import_module("torchvision.transforms.v2.functional")
    records = len(plan.offset)
    windows, flips = plan.windows.reshape(-1, 4), plan.flips.reshape(-1)

    class Images(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
        files: list[int] | None = None

        def __len__(self) -> int:
            return len(windows)

        def __getitem__(self, number: int) -> Any:
            if self.files is None:
                self.files = [os.open(shard, os.O_RDONLY) for shard in plan.shards]
            record = number % records
            start, size = plan.jpeg[record]
            encoded = torch.frombuffer(
                bytearray(os.pread(self.files[plan.shard[record]], size, start)), dtype=torch.uint8
            )
            image = torchvision.io.decode_jpeg(encoded, torchvision.io.ImageReadMode.RGB)
            top, left, height, width = windows[number]
            cropped = image[:, top : top + height, left : left + width]
            resized = functional.resize(cropped, [SIZE, SIZE], antialias=False)
            return functional.horizontal_flip(resized) if flips[number] else resized

    loader = torch.utils.data.DataLoader(
        Images(), BATCH_SIZE, shuffle=False, num_workers=THREADS, prefetch_factor=2, persistent_workers=True,
        drop_last=True,
    )  # fmt: skip
    words = (
        f"torch {torch.__version__} DataLoader, {THREADS} workers, torchvision {torchvision.__version__} "
        "io.decode_jpeg (whole image, accurate DCT and smooth upsampling: it has no options), v2 uint8 resize"
    )
    return words, (batch.permute(0, 2, 3, 1).numpy() for batch in loader)


def serve(words: str, batches: Iterator[Pixels]) -> None:
    """Answers the parent; batches are those of one endless stream."""
    first = [np.array(next(batches)) for _ in range(CHECKED_IMAGES // BATCH_SIZE)]
    print(json.dumps({"settings": words}), flush=True)
    for line in sys.stdin:
        command, _, path = line.strip().partition(" ")
        if command == "pixels":
            np.save(path, np.concatenate(first))
            print("{}", flush=True)
            continue
        for _ in range(UNTIMED_BATCHES):
            next(batches)
        count = int(command)
        begin_t = time.perf_counter()
        for _ in range(count // BATCH_SIZE):
            next(batches)
        print(json.dumps({"images_per_s": count / (time.perf_counter() - begin_t)}), flush=True)


def main() -> None:
    name, plan = sys.argv[1], Plan(sys.argv[2])
    serve(*{"tf.data": tensorflow, "DALI": dali, "DataLoader": dataloader}[name](plan))


if __name__ == "__main__":
    main()
