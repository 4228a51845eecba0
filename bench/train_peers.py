"""Drawbar's training step against a bare PyTorch loop and a Keras loop of the same model, in turn, on the CPU.

    python bench/train_peers.py [--batch-size 16] [--steps 6] [--rounds 3] [--only fp32|bf16]

ResNet-50, 224 pixels, one constant batch. Against the bare loop it is v1.5 in the precision that Drawbar chooses;
against Keras v1.0 (its ResNet50 has the stride in the first 1x1 too), in fp32 and, where the CPU has it, in bf16
against Keras's `mixed_bfloat16`, each with and without XLA: the faster of the two counts. Every program has a process
of its own and the same number of threads; rounds alternate, the order turned each time; ratios are medians over rounds
of median step times. Keras runs in the environment that `scripts/peers` makes (or DRAWBAR_PEERS_PYTHON). The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from bare_loop import bare_step_s, drawbar_step_s

from drawbar.config import Recipe
from drawbar.launch.environment import threads_per_rank
from drawbar.train.precision import cpu_has_bf16

REPOSITORY = Path(__file__).resolve().parents[1]
PEERS_PYTHON = Path(os.environ.get("DRAWBAR_PEERS_PYTHON", REPOSITORY / ".venv-peers" / "bin" / "python"))
UNTIMED_STEPS = 2
KERAS_LOOP = """
import json, os, sys, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
batch_size, size, warmup, steps, threads, precision, xla = json.loads(sys.argv[1])
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(threads)
tf.config.threading.set_inter_op_parallelism_threads(1)
import keras
if precision == "bf16":
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
model = keras.applications.ResNet50(weights=None, classifier_activation=None)
optimizer = keras.optimizers.SGD(0.01, 0.9, weight_decay=1e-4)
optimizer.build(model.trainable_variables)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
images = tf.random.uniform((batch_size, size, size, 3))
labels = tf.random.uniform((batch_size,), 0, 1000, tf.int32)

@tf.function(jit_compile=xla)
def step():
    with tf.GradientTape() as tape:
        loss = loss_of(labels, tf.cast(model(images, training=True), tf.float32))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss

step_s = []
for number in range(warmup + steps):
    start = time.perf_counter()
    float(step())
    if number >= warmup:
        step_s.append(time.perf_counter() - start)
print(json.dumps(step_s))
"""


def keras_step_s(recipe: Recipe, precision: str, *, xla: bool) -> list[float]:
    """Seconds of each measured step. Its allocator is its own: TensorFlow keeps blocks itself."""
    train = recipe.train
    threads = threads_per_rank(recipe.launch, 1)
    settings = [train.batch_size, recipe.input.image_size, train.warmup_steps, train.steps, threads, precision, xla]
    done = subprocess.run(
        [str(PEERS_PYTHON), "-c", KERAS_LOOP, json.dumps(settings)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""},
        check=True,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    step_s: list[float] = json.loads(done.stdout.splitlines()[-1])
    return step_s


class Bench:
    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder, self._options = folder, options
        self._runs = 0

    def recipe(self, model: str, precision: str) -> Recipe:
        return Recipe.model_validate(
            {
                "name": "train-peers",
                "input": {"source": "constant"},
                "model": {"name": model, "precision": precision},
                "train": {
                    "batch_size": self._options.batch_size,
                    "warmup_steps": UNTIMED_STEPS,
                    "steps": self._options.steps,
                },
            }
        )

    def drawbar(self, model: str, precision: str) -> float:
        self._runs += 1
        path = self._folder / f"recipe-{self._runs}.toml"
        path.write_text(self.recipe(model, precision).to_toml())
        step_s, _ = drawbar_step_s(path, self._folder / f"run-{self._runs}")
        return median(step_s)

    def bare(self, precision: str) -> float:
        return median(bare_step_s(self.recipe("resnet50_v1.5", precision), "resnet50", precision))

    def keras(self, precision: str, *, xla: bool) -> float:
        return median(keras_step_s(self.recipe("resnet50", precision), precision, xla=xla))


def alternate(rounds: int, contenders: dict[str, Callable[[], float]]) -> list[dict[str, float]]:
    """Median step seconds of each contender in each round; the order is turned every other time."""
    rows = []
    for number in range(rounds):
        names = list(contenders) if number % 2 == 0 else list(reversed(contenders))
        rows.append({name: contenders[name]() for name in names})
        print(
            f"  round {number + 1}: " + ", ".join(f"{name} {s * 1e3:.0f} ms" for name, s in rows[-1].items()),
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["bare", "fp32", "bf16"])
    options = parser.parse_args()
    has_bf16 = cpu_has_bf16()
    ratios: dict[str, float | None] = {
        "ratio_bare_loop": None,
        "ratio_tensorflow_fp32": None,
        "ratio_tensorflow_best": None,
    }
    with tempfile.TemporaryDirectory(prefix="drawbar-bench-") as folder:
        bench = Bench(Path(folder), options)
        if options.only in (None, "bare"):
            precision = "bf16" if has_bf16 else "fp32"
            print(f"ResNet-50 v1.5, {precision}, batch {options.batch_size}: Drawbar and the bare loop")
            rows = alternate(
                options.rounds,
                {
                    "Drawbar": lambda: bench.drawbar("resnet50_v1.5", precision),
                    "bare loop": lambda: bench.bare(precision),
                },
            )
            ratios["ratio_bare_loop"] = median(row["bare loop"] / row["Drawbar"] for row in rows)
        for key, wanted in (("ratio_tensorflow_fp32", "fp32"), ("ratio_tensorflow_best", "bf16")):
            if options.only not in (None, wanted) or (wanted == "bf16" and not has_bf16):
                continue
            if not PEERS_PYTHON.exists():
                print(f"no TensorFlow: {PEERS_PYTHON} is not there (scripts/peers makes it)")
                continue
            print(f"ResNet-50 v1.0, {wanted}, batch {options.batch_size}: Drawbar and Keras")
            rows = alternate(
                options.rounds,
                {
                    "Drawbar": lambda wanted=wanted: bench.drawbar("resnet50", wanted),  # type: ignore[misc]
                    "Keras": lambda wanted=wanted: bench.keras(wanted, xla=False),  # type: ignore[misc]
                    "Keras XLA": lambda wanted=wanted: bench.keras(wanted, xla=True),  # type: ignore[misc]
                },
            )
            ratios[key] = median(min(row["Keras"], row["Keras XLA"]) / row["Drawbar"] for row in rows)
    print(json.dumps({name: None if ratio is None else round(ratio, 3) for name, ratio in ratios.items()}))


if __name__ == "__main__":
    main()
