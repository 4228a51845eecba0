"""Counters of one host, once a second, by its local rank 0."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import psutil

from drawbar.journal import Host, JournalWriter

INTERVAL_S = 1.0


class HostSampler:
    """A daemon thread that samples until `stop`. `rank_pids`: local rank -> process id."""

    def __init__(self, journal: JournalWriter, node: str, rank_pids: Mapping[int, int]) -> None:
        self._journal, self._node = journal, node
        self._ranks = {str(rank): psutil.Process(pid) for rank, pid in rank_pids.items()}
        self._gpus = _Gpus()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-counters", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Takes a last sample, so that the counters span the whole run."""
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        self._journal.write(self._sample())
        while not self._stop.wait(INTERVAL_S):
            self._journal.write(self._sample())
        self._journal.write(self._sample())

    def _sample(self) -> Host:
        cpu, memory = psutil.cpu_times(), psutil.virtual_memory()
        disk = psutil.disk_io_counters()
        nics = psutil.net_io_counters(pernic=True)
        return Host(
            node=self._node,
            cpu_user_s=cpu.user + cpu.nice,
            cpu_system_s=cpu.system + cpu.irq + cpu.softirq,
            cpu_idle_s=cpu.idle,
            cpu_iowait_s=cpu.iowait,
            cpu_steal_s=cpu.steal,
            num_cpus=psutil.cpu_count() or 0,
            memory_used_bytes=memory.used,
            memory_available_bytes=memory.available,
            page_cache_bytes=memory.cached,
            disk_read_bytes=disk.read_bytes if disk else 0,
            disk_write_bytes=disk.write_bytes if disk else 0,
            nic_received_bytes={name: nic.bytes_recv for name, nic in nics.items()},
            nic_sent_bytes={name: nic.bytes_sent for name, nic in nics.items()},
            rank_rss_bytes={rank: rss for rank, process in self._ranks.items() if (rss := _rss(process)) is not None},
            gpus=self._gpus.sample(),
        )


def _rss(process: psutil.Process) -> int | None:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return None


class _Gpus:
    """NVIDIA's counters where the library and a driver are there; else nothing. Not verified on a GPU yet."""

    def __init__(self) -> None:
        self._handles: list[object] = []
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except Exception:
            # ImportError without the extra, NVMLError without a driver: both mean that there is nothing to sample.
            self._handles = []

    def sample(self) -> list[dict[str, float]]:
        rows = []
        for handle in self._handles:
            use = self._nvml.nvmlDeviceGetUtilizationRates(handle)
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            rows.append({"busy_percent": float(use.gpu), "memory_used_bytes": float(memory.used)})
        return rows
