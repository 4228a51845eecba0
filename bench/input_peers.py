"""Drawbar's input path against tf.data, DALI and the DataLoader, and against the decoder's own limit, in turn.

    python bench/input_peers.py [--images 2048] [--rounds 5] [--dir FOLDER] [--quick] [--no-s3]

Everybody reads the same TFRecord shards of 105-115 kB images from the page cache, decodes the same crop windows, given
beforehand, resizes to 224 pixels by bilinear interpolation without smoothing, flips, and hands over batches of 64 uint8
images; with 2 threads, or 2 workers. Rounds alternate, the order turned each time; each pass begins in the middle of a
stream, so nobody lives on what was prefetched. Figures are medians, ratios are medians over rounds. The first images of
each are compared with one reference, exactly decoded. `limit` is Drawbar's decoder alone, `limit libjpeg-turbo`
the same with libjpeg-turbo's own Huffman decoding. From S3 (`storage_peers.py`) the server runs on the same cores: what
they allow is worked out from the CPU time of reading, serving and decoding, each measured alone.

Peers run in the environment that `scripts/peers` makes (or DRAWBAR_PEERS_PYTHON); what is not there is left out. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import psutil
import simplejpeg
import storage_peers
import torch
from input_contenders import BATCH_SIZE, CHECKED_IMAGES, SIZE, THREADS, UNTIMED_BATCHES, Plan
from torchvision.transforms.v2 import functional

from drawbar.config import Recipe
from drawbar.dataset.example import parse_image_example
from drawbar.dataset.jpeg import parse_header
from drawbar.dataset.tfrecord import RecordSplitter
from drawbar.input import libjpeg
from drawbar.input.augment import RecordRandom, train_placement
from drawbar.launch.environment import rank_environment

REPOSITORY = Path(__file__).resolve().parents[1]
SHARDS = 16
ENDPOINTS = 5
LARGEST_DIFFERENCE = 3.0
"""Mean of 255 from the exact reference: what the fast options cost together, and far less than a wrong window."""


@dataclass
class Contender:
    """A child process with one endless stream of batches."""

    name: str
    process: subprocess.Popen[str]
    settings: str = ""
    rates: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    """Per image, of the child and its children."""

    def ask(self, line: str) -> dict[str, Any]:
        stdin, stdout = self.process.stdin, self.process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("started without pipes")
        if line:
            stdin.write(line + "\n")
            stdin.flush()
        answer = stdout.readline()
        if not answer:
            sys.exit(f"{self.name} ended with {self.process.wait(10)}: see the messages above")
        found: dict[str, Any] = json.loads(answer)
        return found

    def cpu_s(self) -> float:
        process = psutil.Process(self.process.pid)
        return storage_peers.cpu_s([process, *process.children(recursive=True)])

    def measure(self, images: int) -> None:
        before_s = self.cpu_s()
        self.rates.append(self.ask(str(images))["images_per_s"])
        self.cpu_us.append((self.cpu_s() - before_s) / (images + UNTIMED_BATCHES * BATCH_SIZE) * 1e6)

    @property
    def rate(self) -> float:
        return float(median(self.rates))


@contextmanager
def contender(name: str, command: list[str], env: dict[str, str]) -> Iterator[Contender]:
    env = env | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "src"), env.get("PYTHONPATH", "")])}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    try:
        found = Contender(name, process)
        found.settings = found.ask("")["settings"]
        yield found
    finally:
        with suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def make_set(folder: Path, images: int) -> None:
    """The images and their shards; what is there already is kept."""
    drawbar = [sys.executable, "-m", "drawbar", "data"]
    for command in (
        ["make", "imagenet-like", str(folder / "images"), "--images", str(images), "--classes", "8"],
        ["pack", "folder", str(folder / "images"), str(folder / "set"), "--shards", str(SHARDS)],
    ):
        done = subprocess.run([*drawbar, *command], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command[:2])} failed: {done.stderr.strip()}")


def write_plan(shards: Path, path: Path, epochs: int, seed: int) -> Plan:
    """Windows and flips as Drawbar draws them, for every record in every epoch."""
    names = sorted(shards.glob("train-*-of-*"))
    rows, sizes = [], []
    for number, name in enumerate(names):
        data = name.read_bytes()
        splitter = RecordSplitter(name.name)
        for record in splitter.feed(data):
            example = parse_image_example(record.payload)
            encoded = bytes(example.encoded)
            header = parse_header(encoded)
            rows.append((number, record.offset, data.index(encoded, record.offset), len(encoded)))
            sizes.append((header.height, header.width))
    table = np.array(rows)
    windows, flips = np.empty((epochs, len(rows), 4), np.int64), np.empty((epochs, len(rows)), np.bool_)
    for epoch in range(epochs):
        for i, ((shard, offset, _, _), (height, width)) in enumerate(zip(rows, sizes, strict=True)):
            placement = train_placement(height, width, RecordRandom(seed, epoch, shard, offset))
            windows[epoch, i], flips[epoch, i] = placement.readable, placement.flip
    np.savez(
        path, shards=np.array([str(name) for name in names]), shard=table[:, 0], offset=table[:, 1], jpeg=table[:, 2:],
        windows=windows, flips=flips,
    )  # fmt: skip
    return Plan(str(path))


def reference(plan: Plan, number: int) -> np.ndarray:
    """Record `number` in the first epoch: decoded exactly and whole, cropped, resized by torchvision."""
    start, size = plan.jpeg[number]
    with open(plan.shards[plan.shard[number]], "rb") as file:
        file.seek(start)
        image = torch.from_numpy(simplejpeg.decode_jpeg(file.read(size), "RGB")).permute(2, 0, 1)
    top, left, height, width = plan.windows[0, number]
    resized = functional.resize(image[:, top : top + height, left : left + width], [SIZE, SIZE], antialias=False)
    pixels: np.ndarray = resized.permute(1, 2, 0).numpy()
    return pixels[:, ::-1] if plan.flips[0, number] else pixels


def check_pixels(found: Contender, plan: Plan, folder: Path) -> None:
    """Ends the program where its images are not those of the windows."""
    path = folder / "pixels.npy"
    found.ask(f"pixels {path}")
    saved = np.load(path if path.exists() else f"{path}.npz")
    numbers, images = (saved["numbers"], saved["images"]) if isinstance(saved, np.lib.npyio.NpzFile) else (None, saved)
    numbers = np.arange(CHECKED_IMAGES) if numbers is None else numbers
    differences = [
        np.abs(image.astype(int) - reference(plan, int(number))).mean()
        for number, image in zip(numbers, images, strict=True)
    ]
    print(f"{found.name}: {np.mean(differences):.2f} of 255 from the exact reference; {found.settings}", flush=True)
    if np.mean(differences) > LARGEST_DIFFERENCE or max(differences) > 8 * LARGEST_DIFFERENCE:
        sys.exit(f"{found.name} does not make the same images: up to {max(differences):.1f} of 255 apart")
    for name in (path, Path(f"{path}.npz")):
        name.unlink(missing_ok=True)


def peers_python() -> str:
    """An interpreter with the peers, or empty."""
    for python in (os.environ.get("DRAWBAR_PEERS_PYTHON", ""), str(REPOSITORY / ".venv-peers/bin/python")):
        if python and os.access(python, os.X_OK):
            return python
    return ""


def recipe(folder: Path, name: str, url: str, decoder: Literal["region", "full"]) -> tuple[Path, Recipe]:
    found = Recipe.model_validate(
        {
            "name": name,
            "data": {"url": url, "num_classes": 8},
            "input": {"decoder": decoder, "decode_threads": THREADS, "image_size": SIZE},
            "train": {"batch_size": BATCH_SIZE},
        }
    )
    path = folder / f"{name}.toml"
    path.write_text(found.to_toml())
    return path, found


@dataclass(frozen=True)
class Bench:
    folder: Path
    plan: Plan
    plan_path: Path

    def drawbar(self, kind: str, name: str, url: str, decoder: Any, more: dict[str, str] | None = None) -> Any:
        path, found = recipe(self.folder, name.replace(" ", "-"), url, decoder)
        command = [sys.executable, str(REPOSITORY / "bench/input_drawbar.py"), kind, str(self.plan_path), str(path)]
        return contender(name, command, rank_environment(found, os.environ | (more or {}), 1))

    def peer(self, name: str, python: str) -> Any:
        command = [python, str(REPOSITORY / "bench/input_contenders.py"), name, str(self.plan_path)]
        return contender(name, command, dict(os.environ))


def alternate(contenders: list[Contender], rounds: int, images: int) -> None:
    for number in range(rounds):
        for found in contenders[:: 1 if number % 2 else -1]:
            found.measure(images)
        words = ", ".join(f"{found.name} {found.rates[-1]:.0f}" for found in contenders)
        print(f"round {number + 1}: {words} images/s", flush=True)


def ratio(one: Contender, other: Contender) -> float:
    return median(a / b for a, b in zip(one.rates, other.rates, strict=True))


def measure_local(bench: Bench, rounds: int, images: int, region: bool) -> tuple[dict[str, Any], float]:
    """The figures, and CPU seconds an image of Drawbar's best way from local files."""
    url, python = str(bench.folder / "set"), peers_python()
    decoders = ["region", "full"] if region else ["full"]
    openers: list[Callable[[], Any]] = []
    for decoder in decoders:
        openers.append(partial(bench.drawbar, "loader", f"drawbar {decoder}", url, decoder))
        openers.append(partial(bench.drawbar, "limit", f"limit {decoder}", url, decoder))
    if region:
        openers.append(partial(bench.drawbar, "limit_libjpeg", "limit libjpeg-turbo", url, "region"))
    openers.append(partial(bench.peer, "DataLoader", sys.executable))
    if python:
        openers += [partial(bench.peer, "tf.data", python), partial(bench.peer, "DALI", python)]
    else:
        print("no tf.data and no DALI: run scripts/peers, or set DRAWBAR_PEERS_PYTHON", flush=True)
    with _all(openers) as contenders:
        by_name = {found.name: found for found in contenders}
        for found in contenders:
            if found.name.startswith("limit"):
                print(f"{found.name}: {found.settings}", flush=True)
            else:
                check_pixels(found, bench.plan, bench.folder)
        alternate(contenders, rounds, images)
        best = by_name[f"drawbar {decoders[0]}"]
        figures: dict[str, Any] = {"images_per_s": best.rate}
        for decoder in decoders:
            ours = by_name[f"drawbar {decoder}"]
            end = "" if decoder == decoders[0] else "_full_decode"
            for name, key in (("tf.data", "tfdata"), ("DALI", "dali"), ("DataLoader", "dataloader")):
                if name in by_name:
                    figures[f"ratio_{key}{end}"] = ratio(ours, by_name[name])
            figures[f"fraction_of_limit{end}"] = ratio(ours, by_name[f"limit {decoder}"])
        if region:
            figures["fraction_of_libjpeg_turbo_limit"] = ratio(best, by_name["limit libjpeg-turbo"])
        figures["all_images_per_s"] = {found.name: found.rate for found in contenders}
        figures["cpu_us_per_image"] = {found.name: median(found.cpu_us) for found in contenders}
        return figures, median(best.cpu_us) / 1e6


@contextmanager
def _all(openers: Sequence[Callable[[], Any]]) -> Iterator[list[Contender]]:
    """All children at once: idle ones wait for a line, and take no CPU."""
    if not openers:
        yield []
        return
    with openers[0]() as first, _all(openers[1:]) as rest:
        yield [first, *rest]


def measure_s3(bench: Bench, rounds: int, images: int, decoder: str, local_cpu_s: float) -> dict[str, Any]:
    """From the embedded store, beside the local files; and the clients' and the server's CPU time by themselves."""
    with storage_peers.stored_set(bench.folder / "images", bench.folder / "s3", ENDPOINTS, SHARDS) as store:
        env = storage_peers.client_environment(store)
        os.environ.update(env)
        alone = storage_peers.measure(store, rounds)
        openers = [
            partial(bench.drawbar, "loader", "drawbar S3", "s3://bench/set", decoder, env),
            partial(bench.drawbar, "loader", "drawbar local", str(bench.folder / "set"), decoder),
        ]
        with _all(openers) as (from_s3, local):
            check_pixels(from_s3, bench.plan, bench.folder)
            alternate([from_s3, local], rounds, images)
        image_gb = sum(os.path.getsize(shard) for shard in bench.plan.shards) / 1e9 / len(bench.plan.offset)
        read_s = image_gb * (alone["client_cpu_s_per_gb"]["drawbar"] + alone["server_cpu_s_per_gb"])
        allowed = len(os.sched_getaffinity(0)) / (local_cpu_s + read_s)
        return {
            "ratio_s3_to_local": ratio(from_s3, local),
            "s3_images_per_s": from_s3.rate,
            "s3_allowed_by_cpu_images_per_s": allowed,
            "s3_fraction_of_cpu_budget": from_s3.rate / allowed,
            **alone,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2048, help="of the set, and of one pass")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="keeps the set for another time")
    parser.add_argument("--quick", action="store_true", help="3 rounds, no S3")
    parser.add_argument("--no-s3", action="store_true")
    options = parser.parse_args()
    rounds = 3 if options.quick else options.rounds
    with tempfile.TemporaryDirectory(prefix="drawbar-bench-") as scratch:
        folder = options.dir or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        make_set(folder, options.images)
        images = options.images // BATCH_SIZE * BATCH_SIZE
        epochs = (CHECKED_IMAGES + (rounds + 1) * (images + UNTIMED_BATCHES * BATCH_SIZE)) // images + 2
        plan_path = folder / "plan.npz"
        plan = write_plan(folder / "set", plan_path, epochs, Recipe().input.seed)
        try:
            region = bool(libjpeg.libjpeg_path())
        except libjpeg.Unavailable as error:
            region = False
            print(f"no region decoder: {error}", flush=True)
        print(
            f"{len(plan.offset)} images of {plan.jpeg[:, 1].mean() / 1000:.1f} kB, {SIZE} pixels, batches of "
            f"{BATCH_SIZE}, {THREADS} threads on {len(os.sched_getaffinity(0))} cores",
            flush=True,
        )
        bench = Bench(folder, plan, plan_path)
        figures, local_cpu_s = measure_local(bench, rounds, images, region)
        if not (options.no_s3 or options.quick):
            figures |= measure_s3(bench, rounds, images, "region" if region else "full", local_cpu_s)
        print(json.dumps(figures | {"region_decode": region, "rounds": rounds}))


if __name__ == "__main__":
    main()
