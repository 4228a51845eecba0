"""What `drawbar s3` prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from drawbar.storage import embedded
from drawbar.terminal import Terminal


def up(directory: Path | None, endpoints: int, ports: list[int] | None, json_out: bool) -> None:
    terminal = Terminal(quiet_stdout=json_out)
    try:
        store = embedded.up(
            directory or embedded.DEFAULT_DIRECTORY, num_endpoints=endpoints, ports=ports, progress=terminal.status
        )
    finally:
        terminal.close()
    if json_out:
        _print(
            {
                "directory": str(store.directory),
                "endpoints": store.endpoints,
                "metrics": store.metrics_urls,
                "credentials_file": str(store.directory / "s3.json"),
                "version": store.version,
            }
        )
        return
    for endpoint, metrics in zip(store.endpoints, store.metrics_urls, strict=True):
        print(f"{endpoint}  metrics {metrics}")
    print(f"data in {store.directory}, credentials in s3.json there")
    print(f"stop with: {embedded.command('down', store.directory)}")


def status(directory: Path | None, json_out: bool) -> None:
    found = embedded.status(directory or embedded.DEFAULT_DIRECTORY)
    if json_out:
        _print(found.to_json())
    else:
        for process in found.processes:
            state = "answers" if process.answering else "alive, does not answer" if process.alive else "not running"
            print(f"{process.role:8} {process.endpoint or f'port {process.port}':24} pid {process.pid:<8} {state}")
        print(
            f"{found.stored_bytes / 1e6:.1f} MB in {found.directory}"
            if found.processes
            else f"no store in {found.directory}"
        )
    if not found.running:
        raise typer.Exit(3)


def down(directory: Path | None, force: bool, json_out: bool) -> None:
    directory = directory or embedded.DEFAULT_DIRECTORY
    stopped = embedded.down(directory, force=force)
    if json_out:
        _print({"stopped": stopped})
    else:
        print("stopped" if stopped else f"nothing was running in {directory}")


def _print(row: Any) -> None:
    print(json.dumps(row, indent=2))
