"""What a rank runs on, and the variables it is started with."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import drawbar
from drawbar.config import Launch, Recipe

_PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "safetensors",
    "numpy",
    "obstore",
    "simplejpeg",
    "opencv-python-headless",
    "google-crc32c",
)

RECIPE_VARIABLE = "DRAWBAR_RECIPE"
"""How ranks on hosts that do not share the run directory learn the recipe: as JSON."""
EMBEDDED_ENDPOINTS = "DRAWBAR_EMBEDDED_ENDPOINTS"
"""How the ranks learn the addresses of the embedded store: the recipe only says `embedded`."""

# glibc gives blocks above 128 kB back to the kernel at once and takes page faults to get them again; training allocates
# the same large blocks every step. Tunables must stand in the environment before the process starts.
KEEP_LARGE_BLOCKS = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(8 * 2**30),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
    # What is kept is kept per arena, and every thread that fetches or decodes would get one: 120 MB a rank for nothing.
    "MALLOC_ARENA_MAX": "2",
}


def usable_cpus() -> int:
    """Cores this process may run on (taskset and cpusets respected)."""
    return len(os.sched_getaffinity(0))


def threads_per_rank(launch: Launch, local_world_size: int) -> int:
    return launch.threads_per_rank or max(1, usable_cpus() // local_world_size)


def decode_threads(recipe: Recipe, local_world_size: int, device: str) -> int:
    """Cores that the host's compute threads leave free, shared by its ranks; at least 1."""
    if recipe.input.decode_threads:
        return recipe.input.decode_threads
    if recipe.emulate.step_s:
        compute = 0
    else:
        compute = 1 if device == "cuda" else threads_per_rank(recipe.launch, local_world_size)
    return max(1, usable_cpus() // local_world_size - compute)


def rank_environment(recipe: Recipe, base: Mapping[str, str], local_world_size: int) -> dict[str, str]:
    """The ranks' environment: the user's, the threads, the allocator's settings. What the user has set is kept.

    `local_world_size` 0: ranks on several hosts, each of which finds out its threads itself.
    """
    env = dict(base)
    if local_world_size:
        threads = str(threads_per_rank(recipe.launch, local_world_size))
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            env[name] = threads
        # All ranks are on this host: Gloo must not pick an outside interface.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env["PYTHONUNBUFFERED"] = "1"
    # Nor may a proxy sit before a local store.
    env["NO_PROXY"] = ",".join(filter(None, [env.get("NO_PROXY", ""), "127.0.0.1,localhost"]))
    if recipe.launch.allocator == "keep_large_blocks":
        for name, value in KEEP_LARGE_BLOCKS.items():
            env.setdefault(name, value)
    return env


def describe(device: str = "", precision: str = "", threads: int = 0, decoders: int = 0) -> dict[str, Any]:
    """Hardware and software of this process, for the journal. Reads no secret."""
    memory = psutil.virtual_memory()
    return {
        "drawbar": drawbar.__version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "cpu": _cpu_model(),
        "num_cpus": usable_cpus(),
        "memory_bytes": memory.total,
        "device": device,
        "precision": precision,
        "compute_threads": threads,
        "decode_threads": decoders,
        "allocator": {name: os.environ.get(name, "") for name in KEEP_LARGE_BLOCKS},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
