"""Drawbar with a constant batch against a hand-written loop of the same model, batch and settings, in turn.

    python bench/bare_loop.py [--model resnet50] [--batch-size 8] [--steps 8] [--rounds 5]

What Drawbar adds to a training step (normalising on the device, spans, journal, host counters, torchrun) must cost
next to nothing: it should keep at least 98 % of the bare loop's speed. Both run in processes of their own with the
same environment (threads, allocator), alternating, the order swapped each round. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from drawbar.config import Recipe, load_recipe
from drawbar.journal import Step, read_run
from drawbar.launch.environment import rank_environment, threads_per_rank

BARE_LOOP = """
import json, sys, time
import torch, torchvision
from torch.nn.functional import cross_entropy

name, batch_size, size, warmup, steps, threads, precision = json.loads(sys.argv[1])
torch.set_num_threads(threads)
model = getattr(torchvision.models, name)().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=1e-4)
images = torch.rand(batch_size, 3, size, size).to(memory_format=torch.channels_last)
labels = torch.randint(0, 1000, (batch_size,))
step_s = []
for step in range(warmup + steps):
    start = time.perf_counter()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        logits = model(images)
    cross_entropy(logits.float(), labels).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step >= warmup:
        step_s.append(time.perf_counter() - start)
print(json.dumps(step_s))
"""


def bare_step_s(recipe: Recipe, model: str, precision: str) -> list[float]:
    """Seconds of each measured step of the hand-written loop."""
    settings = [
        model,
        recipe.train.batch_size,
        recipe.input.image_size,
        recipe.train.warmup_steps,
        recipe.train.steps,
        threads_per_rank(recipe.launch, 1),
        precision,
    ]
    done = subprocess.run(
        [sys.executable, "-c", BARE_LOOP, json.dumps(settings)],
        env=rank_environment(recipe, os.environ, 1),
        check=True,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    step_s: list[float] = json.loads(done.stdout)
    return step_s


def drawbar_step_s(recipe_path: Path, run_dir: Path) -> tuple[list[float], str]:
    """Seconds of each measured step of `drawbar run`, from its journal, and the precision it chose."""
    subprocess.run(
        [sys.executable, "-m", "drawbar", "run", str(recipe_path), "--out", str(run_dir)],
        check=True,
        capture_output=True,
        timeout=1200,
    )
    rank = read_run(run_dir).ranks[0]
    steps = [step for step in rank.of(Step) if not step.warmup]
    start = next(event for event in rank.events if event.name == "run_start")
    return [step.end_t - step.start_t for step in steps], start.environment["precision"]  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", help="a torchvision ResNet (v1.5 on both sides)")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drawbar-bench-") as folder:
        path = Path(folder) / "recipe.toml"
        basic = options.model in ("resnet18", "resnet34")
        path.write_text(
            Recipe.model_validate(
                {
                    "name": "bare-loop",
                    "input": {"source": "constant"},
                    "model": {"name": options.model if basic else f"{options.model}_v1.5"},
                    "train": {"batch_size": options.batch_size, "warmup_steps": 2, "steps": options.steps},
                }
            ).to_toml()
        )
        recipe = load_recipe(path)
        ours: list[float] = []
        bare: list[float] = []
        ratios = []
        _, precision = drawbar_step_s(path, Path(folder) / "first")
        print(
            f"{options.model}, batch {options.batch_size}, {recipe.input.image_size} pixels, {precision}, "
            f"{threads_per_rank(recipe.launch, 1)} threads, channels_last, allocator {recipe.launch.allocator}"
        )
        for number in range(options.rounds):
            first_ours = number % 2 == 0
            if not first_ours:
                bare_s = bare_step_s(recipe, options.model, precision)
            ours_s, _ = drawbar_step_s(path, Path(folder) / f"run-{number}")
            if first_ours:
                bare_s = bare_step_s(recipe, options.model, precision)
            ours += ours_s
            bare += bare_s
            ratios.append(median(bare_s) / median(ours_s))
            print(
                f"round {number + 1}: Drawbar {options.batch_size / median(ours_s):.2f} images/s, "
                f"bare loop {options.batch_size / median(bare_s):.2f} images/s, ratio {ratios[-1]:.3f}",
                flush=True,
            )
    print(
        json.dumps(
            {
                "images_per_s": options.batch_size / median(ours),
                "bare_images_per_s": options.batch_size / median(bare),
                "ratio_bare_loop": median(ratios),
                "rounds": options.rounds,
                "precision": precision,
            }
        )
    )


if __name__ == "__main__":
    main()
