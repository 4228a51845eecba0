"""`drawbar data pack folder` against `tar` (the limit) and against a TensorFlow converter, in turn, on this machine.

    python bench/pack.py [--images 20000] [--rounds 3] [--shards 64] [--dir FOLDER] [--no-s3] [--no-linear]

* `tar cf FILE` of the same folder to a real file reads and writes the same bytes and does nothing else.
* The TensorFlow converter is `bench/tensorflow_converter.py`, with the number of threads that is faster here: one per
  core, or 8 as upstream has it. Its time is without importing TensorFlow; Drawbar's is that of its whole command.

All read from the page cache (the images are read once before) and write to the same file system; what was written is
synced and deleted between measurements, outside of the times. Rounds alternate, the order turned each time; figures are
medians, ratios are medians over rounds. CPU time, imports included, is in the last line too: it says more than images/s
on a busy machine. Both sets are then compared record by record. Memory is that of the largest process. Linear: half the
images against twice the images (each file under four names). Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import median

from drawbar.dataset.example import parse_image_example
from drawbar.dataset.synthetic import make_imagenet_like
from drawbar.dataset.tfrecord import RecordSplitter
from drawbar.storage import embedded

REPOSITORY = Path(__file__).resolve().parents[1]
CONVERTER = Path(__file__).with_name("tensorflow_converter.py")


@dataclass(frozen=True)
class Measured:
    images_per_s: float
    peak_mb: float
    """Of the largest process."""
    cpu_us_per_image: float
    """User and system time of all its processes: what a busy machine distorts less than images/s."""
    stdout: str


def run(command: list[str], images: int) -> Measured:
    """Times a command; its processes' largest resident size comes from the kernel."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        passed_s = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode != 0:
            sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{err.read()[-2000:]}")
        cpu_us = (usage.ru_utime + usage.ru_stime) / images * 1e6
        return Measured(images / passed_s, usage.ru_maxrss * 1024 / 1e6, cpu_us, out.read())


@dataclass(frozen=True)
class Bench:
    images_dir: Path
    scratch: Path
    images: int
    shards: int
    workers: int
    tensorflow: str
    """Interpreter that has it; empty: none."""

    @contextmanager
    def output(self, name: str) -> Iterator[Path]:
        """A path to write to; afterwards it is gone and the disk is quiet again."""
        path = self.scratch / name
        try:
            yield path
        finally:
            os.sync()
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            os.sync()

    def drawbar_command(self, source: Path, dest: str, *options: str) -> list[str]:
        command = [sys.executable, "-m", "drawbar", "data", "pack", "folder", str(source), dest, "--json"]
        return [*command, "--shards", str(self.shards), "--workers", str(self.workers), *options]

    def drawbar(self) -> Measured:
        with self.output("drawbar") as dest:
            return run(self.drawbar_command(self.images_dir, str(dest)), self.images)

    def tar(self) -> Measured:
        with self.output("images.tar") as dest:
            return run(["tar", "cf", str(dest), "-C", str(self.images_dir), "."], self.images)

    def tensorflow_command(self, dest: Path, threads: int, source: Path | None = None) -> list[str]:
        command = [self.tensorflow, str(CONVERTER), str(source or self.images_dir), str(dest)]
        return [*command, "--shards", str(self.shards), "--threads", str(threads)]

    def convert(self, threads: int, source: Path | None = None) -> Measured:
        with self.output("tensorflow") as dest:
            measured = run(self.tensorflow_command(dest, threads, source), self.images)
        row = json.loads(measured.stdout)
        return replace(measured, images_per_s=row["images"] / row["passed_s"])

    def best_threads(self) -> int:
        """By a tenth of the images, at least 500."""
        part = self.scratch / "part"
        link_images(self.images_dir, part, max(500, self.images // 10), copies=1)
        rates = {threads: self.convert(threads, part).images_per_s for threads in sorted({self.workers, 8})}
        shutil.rmtree(part)
        words = ", ".join(f"{threads} threads {rate:.0f} images/s" for threads, rate in rates.items())
        print(f"TensorFlow converter: {words}", flush=True)
        return max(rates, key=lambda threads: rates[threads])


def link_images(source: Path, dest: Path, count: int, copies: int) -> None:
    """A folder of the first `count` files by class in turn, each under `copies` names."""
    files = sorted(source.glob("*/*.JPEG"), key=lambda path: (path.name.rpartition("_")[2], path.name))[:count]
    for folder in source.iterdir():
        if folder.is_dir():
            (dest / folder.name).mkdir(parents=True)
    for path in files:
        for copy in range(copies):
            os.link(path, dest / path.parent.name / f"{path.stem}_{copy}.JPEG")


def tensorflow_python() -> str:
    """An interpreter with TensorFlow, or empty; `scripts/peers` makes one."""
    candidates = [
        os.environ.get("DRAWBAR_PEERS_PYTHON", ""),
        str(REPOSITORY / ".venv-peers/bin/python"),
        sys.executable,
    ]
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('tensorflow') is None)"
    for python in candidates:
        if python and os.access(python, os.X_OK) and subprocess.run([python, "-c", look]).returncode == 0:
            return python
    return ""


def records(folder: Path) -> dict[str, tuple[int, str]]:
    """Label and hash of each image, by file name."""
    found: dict[str, tuple[int, str]] = {}
    for path in sorted(folder.glob("train-*-of-*")):
        splitter = RecordSplitter(path.name)
        with path.open("rb") as file:
            while chunk := file.read(8 << 20):
                for record in splitter.feed(chunk):
                    example = parse_image_example(record.payload)
                    found[example.filename] = (example.label, sha256(example.encoded).hexdigest())
        splitter.finish()
    return found


def compare_outputs(bench: Bench, threads: int) -> None:
    """Ends the program where the sets differ from each other or from the files."""
    with bench.output("one") as one, bench.output("two") as two:
        run(bench.drawbar_command(bench.images_dir, str(one)), bench.images)
        mine = records(one)
        files = sorted(bench.images_dir.glob("*/*.JPEG"))
        labels = {name: label for label, name in enumerate(sorted({path.parent.name for path in files}), start=1)}
        source = {path.name: (labels[path.parent.name], sha256(path.read_bytes()).hexdigest()) for path in files}
        if mine != source:
            sys.exit("Drawbar's records differ from the files")
        if bench.tensorflow:
            run(bench.tensorflow_command(two, threads), bench.images)
            if records(two) != mine:
                sys.exit("Drawbar's records differ from TensorFlow's")
    print(
        f"output: {len(mine)} records, labels and images equal to the files"
        + " and TensorFlow's" * bool(bench.tensorflow)
    )


def measure_s3(bench: Bench, rounds: int) -> list[float]:
    folder = bench.scratch / "s3"
    store = embedded.up(folder, num_endpoints=1)
    try:
        rates = []
        for number in range(rounds):
            options = ["--endpoint", store.endpoints[0], "--store-dir", str(folder)]
            command = bench.drawbar_command(bench.images_dir, f"s3://bench/round-{number}", *options)
            rates.append(run(command, bench.images).images_per_s)
            os.sync()
        return rates
    finally:
        embedded.down(folder)
        shutil.rmtree(folder, ignore_errors=True)


def measure_linear(bench: Bench, rounds: int) -> float:
    """Rate with twice the images over the rate with half of them."""
    sizes = {"half": (bench.images // 2, 1), "twice": (bench.images // 2, 4)}
    for name, (count, copies) in sizes.items():
        link_images(bench.images_dir, bench.scratch / name, count, copies)
    ratios = []
    for number in range(rounds):
        rates = {}
        for name in sorted(sizes, reverse=number % 2 == 0):
            count, copies = sizes[name]
            with bench.output("linear") as dest:
                rates[name] = run(bench.drawbar_command(bench.scratch / name, str(dest)), count * copies).images_per_s
        ratios.append(rates["twice"] / rates["half"])
        print(
            f"linear: {bench.images // 2} images at {rates['half']:.0f}/s, {bench.images * 2} at {rates['twice']:.0f}/s"
        )
    for name in sizes:
        shutil.rmtree(bench.scratch / name)
    return median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20_000, help="of ImageNet's shape, about 110 kB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dir", type=Path, help="keeps the images for the next time; on a file system with links")
    parser.add_argument("--no-s3", action="store_true")
    parser.add_argument("--no-linear", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drawbar-bench-", dir=options.dir) as scratch:
        images_dir = (options.dir or Path(scratch)) / f"images-{options.images}"
        print(f"making {options.images} images in {images_dir}", flush=True)
        stats = make_imagenet_like(images_dir, num_images=options.images, num_classes=min(1000, options.images))
        bench = Bench(
            images_dir=images_dir,
            scratch=Path(scratch),
            images=options.images,
            shards=options.shards,
            workers=options.workers,
            tensorflow=tensorflow_python(),
        )
        print(
            f"{options.images} images, {stats.mean_bytes / 1e3:.1f} kB on average, {options.shards} shards, "
            f"{options.workers} workers" + ("" if bench.tensorflow else "; no TensorFlow here (scripts/peers)")
        )
        measure(bench, options.rounds, s3=not options.no_s3, linear=not options.no_linear)


def measure(bench: Bench, rounds: int, *, s3: bool, linear: bool) -> None:
    bench.tar()  # brings the images into the page cache
    threads = bench.best_threads() if bench.tensorflow else 0
    contenders: dict[str, Callable[[], Measured]] = {"drawbar": bench.drawbar, "tar": bench.tar}
    if bench.tensorflow:
        contenders["tensorflow"] = lambda: bench.convert(threads)
    measured: dict[str, list[Measured]] = {name: [] for name in contenders}
    for number in range(rounds):
        names = list(contenders)
        for name in names if number % 2 == 0 else reversed(names):
            measured[name].append(contenders[name]())
        print(
            f"round {number + 1}: "
            + ", ".join(f"{name} {results[-1].images_per_s:.0f} images/s" for name, results in measured.items()),
            flush=True,
        )
    compare_outputs(bench, threads)
    rates = {name: [result.images_per_s for result in results] for name, results in measured.items()}
    s3_rates = measure_s3(bench, rounds) if s3 else []
    linear_ratio = measure_linear(bench, rounds) if linear else None

    def ratio(other: str) -> float | None:
        pairs = zip(rates["drawbar"], rates.get(other, ()), strict=False)
        values = [mine / theirs for mine, theirs in pairs]
        return median(values) if values else None

    print(
        json.dumps(
            {
                "images_per_s": median(rates["drawbar"]),
                "ratio_tensorflow": ratio("tensorflow"),
                "ratio_tar": ratio("tar"),
                "peak_mb": max(result.peak_mb for result in measured["drawbar"]),
                "s3_images_per_s": median(s3_rates) if s3_rates else None,
                "linear_ratio": linear_ratio,
                "tensorflow_images_per_s": median(rates["tensorflow"]) if bench.tensorflow else None,
                "tensorflow_threads": threads or None,
                "tensorflow_peak_mb": max((r.peak_mb for r in measured.get("tensorflow", ())), default=None),
                "tar_images_per_s": median(rates["tar"]),
                "cpu_us_per_image": {
                    name: median(result.cpu_us_per_image for result in results) for name, results in measured.items()
                },
                "images": bench.images,
                "rounds": rounds,
                "workers": bench.workers,
            }
        )
    )


if __name__ == "__main__":
    main()
