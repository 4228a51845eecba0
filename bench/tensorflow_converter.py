"""A TensorFlow converter written the usual way, for `bench/pack.py` to be measured against. Imports no Drawbar.

    python bench/tensorflow_converter.py IMAGES DEST --shards 64 --threads 8

After tensorflow/models `build_imagenet_data.py`, in TensorFlow 2: files listed by class, shuffled with Python's random,
cut into shards; threads each read a file, decode it with `tf.io.decode_jpeg` for its size, build a `tf.train.Example`
with the 15 keys and write it with a `TFRecordWriter`. Prints one JSON object: images and seconds, imports left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf: Any = import_module("tensorflow")


def int64_feature(values: list[int]) -> Any:
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def float_feature(values: list[float]) -> Any:
    return tf.train.Feature(float_list=tf.train.FloatList(value=values))


def bytes_feature(value: bytes) -> Any:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))


def convert(path: Path, label: int, synset: str) -> bytes:
    encoded = path.read_bytes()
    height, width, channels = tf.io.decode_jpeg(encoded, channels=3).shape
    example = tf.train.Example(
        features=tf.train.Features(
            feature={
                "image/height": int64_feature([height]),
                "image/width": int64_feature([width]),
                "image/colorspace": bytes_feature(b"RGB"),
                "image/channels": int64_feature([channels]),
                "image/class/label": int64_feature([label]),
                "image/class/synset": bytes_feature(synset.encode()),
                "image/class/text": bytes_feature(synset.encode()),
                "image/object/bbox/xmin": float_feature([]),
                "image/object/bbox/xmax": float_feature([]),
                "image/object/bbox/ymin": float_feature([]),
                "image/object/bbox/ymax": float_feature([]),
                "image/object/bbox/label": int64_feature([]),
                "image/format": bytes_feature(b"JPEG"),
                "image/filename": bytes_feature(path.name.encode()),
                "image/encoded": bytes_feature(encoded),
            }
        )
    )
    serialized: bytes = example.SerializeToString()
    return serialized


def write_shard(name: Path, images: list[tuple[Path, int, str]]) -> None:
    with tf.io.TFRecordWriter(str(name)) as writer:
        for path, label, synset in images:
            writer.write(convert(path, label, synset))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("images", type=Path)
    parser.add_argument("dest", type=Path)
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    start = time.perf_counter()
    synsets = sorted(path.name for path in options.images.iterdir() if path.is_dir())
    images = [
        (path, label, synset)
        for label, synset in enumerate(synsets, start=1)
        for path in sorted((options.images / synset).iterdir())
    ]
    random.Random(12345).shuffle(images)
    options.dest.mkdir(parents=True)
    cuts = [len(images) * index // options.shards for index in range(options.shards + 1)]
    with ThreadPoolExecutor(options.threads) as pool:
        jobs = [
            pool.submit(
                write_shard,
                options.dest / f"train-{index:05d}-of-{options.shards:05d}",
                images[cuts[index] : cuts[index + 1]],
            )
            for index in range(options.shards)
        ]
        for job in jobs:
            job.result()
    print(json.dumps({"images": len(images), "passed_s": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
