"""`drawbar probe`: every stage alone, on real data, on one rank and on several; and what it says when it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import obstore
import pytest

from drawbar.config import Storage
from drawbar.probe.names import STAGE_NAMES
from drawbar.storage import embedded
from drawbar.storage.environment import Credentials
from drawbar.storage.stores import open_place
from tests.drawbar_process import drawbar, processes_of
from tests.small_set import example, write_set

pytestmark = pytest.mark.run


def write_recipe(folder: Path, url: str, *, ranks: int = 1, more: str = "") -> Path:
    path = folder / "recipe.toml"
    path.write_text(
        f"""
        name = "alone"
        [data]
        url = "{url}"
        num_classes = 10
        [input]
        image_size = 32
        [train]
        batch_size = 8
        [launch]
        ranks = {ranks}
        device = "cpu"
        stall_timeout_s = 60
        {more}
        """
    )
    return path


def rates(*arguments: str | Path) -> dict[str, dict[str, Any]]:
    finished = drawbar("probe", *arguments, "--json")
    assert finished.code == 0, finished.stderr
    return {stage["stage"]: stage for stage in json.loads(finished.stdout)["stages"]}


@pytest.mark.timeout(240)  # starts five rank processes one after another
def test_every_stage_alone_from_a_folder(tmp_path: Path) -> None:
    paths = write_set(tmp_path / "set")
    framed = sum(path.stat().st_size for path in paths) / (4 * 24)
    found = rates(write_recipe(tmp_path, str(tmp_path / "set")), "--seconds", "0.5")
    assert list(found) == list(STAGE_NAMES)
    for name, stage in found.items():
        (rank,) = stage["ranks"]
        assert rank["images"] > 0
        assert stage["images_per_s"] == pytest.approx(rank["images"] / rank["seconds"])
        assert stage["mb_per_s"] == pytest.approx(rank["bytes"] / 1e6 / rank["seconds"])
        assert stage["cpu_s_per_gb"] > 0
        # What passed is what was counted, image by image.
        image_bytes = 32 * 32 * 3 if name == "copy" else framed
        assert rank["bytes"] / rank["images"] == pytest.approx(image_bytes, rel=0.05)
        assert (len(stage["request_bytes"]) == 1) == (name in ("read", "crc"))


@pytest.mark.timeout(240)
def test_several_ranks_read_at_once_through_the_embedded_stores_endpoints(
    embedded_store: embedded.EmbeddedStore, tmp_path: Path
) -> None:
    embedded.ensure_bucket(embedded_store, "probe")
    credentials = Credentials(
        access_key_id=embedded_store.access_key_id, secret_access_key=embedded_store.secret_access_key
    )
    store = open_place("s3://probe", embedded_store.endpoints[0], credentials, Storage()).store
    write_set(tmp_path / "set")
    for path in (tmp_path / "set").glob("*"):
        obstore.put(store, f"train/{path.name}", path.read_bytes())
    more = f'[storage]\nembedded_dir = "{embedded_store.directory}"'
    recipe = write_recipe(tmp_path, "s3://probe/train", ranks=2, more=more)
    before = embedded_store.sent_bytes()
    stage = rates(recipe, "--only", "read", "--seconds", "0.5")["read"]
    assert [rank["rank"] for rank in stage["ranks"]] == [0, 1]
    assert stage["mb_per_s"] == pytest.approx(sum(rank["mb_per_s"] for rank in stage["ranks"]))
    after = embedded_store.sent_bytes()
    grown = [after[endpoint] - before[endpoint] for endpoint in embedded_store.endpoints]
    # A rank reads through its own endpoint; the manifest is read through one of them as well.
    assert all(sent >= rank["bytes"] > 0 for sent, rank in zip(grown, stage["ranks"], strict=False))
    table = drawbar("probe", recipe, "--only", "crc", "--seconds", "0.5")
    assert table.code == 0, table.stderr
    assert "Each stage alone on 2 ranks" in table.stdout
    assert [line.split()[0] for line in table.stdout.splitlines()[1:]] == ["stage", "crc"]


def test_a_damaged_record_ends_a_probe_with_its_place(tmp_path: Path) -> None:
    write_set(tmp_path / "set", payloads={5: example(5, 1, b"this is no image")})
    finished = drawbar("probe", write_recipe(tmp_path, str(tmp_path / "set")), "--only", "decode", "--seconds", "5")
    assert finished.code == 4
    assert "cannot decode image" in finished.error_line
    assert "train-00000-of-00004 at byte" in finished.error_line
    assert processes_of(tmp_path / "set") == []


def test_bad_input_is_refused_in_one_line(tmp_path: Path) -> None:
    finished = drawbar("probe", write_recipe(tmp_path, str(tmp_path / "nothing")), "--only", "read")
    assert (finished.code, "no such folder" in finished.error_line) == (2, True)
    write_set(tmp_path / "set")
    recipe = write_recipe(tmp_path, str(tmp_path / "set"))
    finished = drawbar("probe", recipe, "--only", "read", "--set", "input.source=constant")
    assert (finished.code, "there is nothing to read" in finished.error_line) == (2, True)
    assert drawbar("probe", recipe, "--only", "everything").code == 2
