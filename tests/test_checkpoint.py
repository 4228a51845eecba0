"""The parts of a checkpoint: tensors and trees to bytes and back, places never seen in part, what is refused."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import nn

from drawbar.checkpoint.find import check_fits, find_checkpoints
from drawbar.checkpoint.manifest import MANIFEST, MODEL, TRAINING, FileEntry, Manifest, load_manifest, name_of
from drawbar.checkpoint.reader import differences
from drawbar.checkpoint.state import HostCopy, Tensors, from_tree, safetensors_pieces, to_tree
from drawbar.checkpoint.stores import BucketStore, CheckpointStore, FolderStore
from drawbar.checkpoint.writer import About
from drawbar.config import Recipe, Storage
from drawbar.errors import DataError, EnvironmentUnfit, InputError
from drawbar.models.weights import load_weights
from drawbar.storage import embedded
from drawbar.storage.environment import Credentials
from drawbar.storage.stores import open_place
from drawbar.world import World
from tests.tcp_proxy import Proxy

# Tensors and trees


def _tensors() -> Tensors:
    torch.manual_seed(3)
    return {
        "weight": torch.randn(5, 3, 3, 3).to(memory_format=torch.channels_last),
        "half": torch.randn(7).bfloat16(),
        "count": torch.tensor(12),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0, 4),
        "bytes": torch.arange(3, dtype=torch.uint8),
    }


def test_the_file_is_what_the_library_would_write() -> None:
    tensors = _tensors()
    data = b"".join(safetensors_pieces(tensors))
    loaded = load_safetensors(data)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert len(data) == len(save_safetensors({name: tensor.contiguous() for name, tensor in tensors.items()}))


def test_large_tensors_come_in_pieces_that_make_up_the_whole() -> None:
    tensors = {"big": torch.arange(700_000, dtype=torch.float32)}
    pieces = list(safetensors_pieces(tensors))
    assert len(pieces) == 4
    assert torch.equal(load_safetensors(b"".join(pieces))["big"], tensors["big"])


def test_an_optimizers_state_survives_json() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.1, betas=(0.8, 0.9))
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    tensors: Tensors = {}
    tree = json.loads(json.dumps(to_tree(optimizer.state_dict(), "optimizer", tensors)))
    back = from_tree(tree, load_safetensors(b"".join(safetensors_pieces(tensors))))
    assert back["param_groups"] == optimizer.state_dict()["param_groups"]
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, back["state"][number][name]) for name, value in state.items())


LEAVES = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@given(TREES)
def test_any_tree_comes_back_as_it_was(tree: Any) -> None:
    assert from_tree(json.loads(json.dumps(to_tree(tree, "x", {}))), {}) == tree


@pytest.mark.parametrize(
    "tree", [{"$code": "x"}, {"$tensor": "lost"}, {"a": 1, "b": 2}, {"$dict": [[[], 1]]}, {"$list": 3}]
)
def test_a_tree_of_another_make_is_damage(tree: Any) -> None:
    with pytest.raises(DataError, match="checkpoint is damaged"):
        from_tree(tree, {})


def test_what_is_no_data_is_refused_when_written_not_when_read() -> None:
    with pytest.raises(TypeError, match="x/hook is a function"):
        to_tree({"hook": lambda: None}, "x", {})


def test_the_host_copy_does_not_change_with_the_model_and_reuses_its_memory() -> None:
    copy, weight = HostCopy(), torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    first = copy.take({"w": weight})["w"]
    weight += 1
    assert torch.equal(first, torch.zeros(4, 3, 2, 2))
    assert first.stride() == weight.stride()
    second = copy.take({"w": weight})["w"]
    assert second.data_ptr() == first.data_ptr()
    assert torch.equal(second, torch.ones(4, 3, 2, 2))


# Manifest, and what it is held against


def _recipe(**sections: Any) -> Recipe:
    train = {"batch_size": 4, "warmup_steps": 0, "steps": 50}
    return Recipe.model_validate({"launch": {"ranks": 2}, "model": {"name": "trivial"}, "train": train, **sections})


def _manifest(step: int = 20, files: dict[str, bytes] | None = None, **values: Any) -> Manifest:
    recipe = _recipe()
    entries = [
        FileEntry(name=name, size_bytes=len(data), crc32c=f"{google_crc32c.value(data):08x}")
        for name, data in (files or {}).items()
    ]
    return Manifest(
        **{
            "step": step,
            "epoch": 0,
            "plan": None,
            "model": "trivial",
            "world_size": 2,
            "global_batch": 8,
            "recipe_sha256": recipe.sha256(),
            "recipe": recipe.model_dump(),
            "dataset_sha256": "d",
            "rounding": {},
            "state": {"$dict": [[1, None]]},
            "files": tuple(entries),
            **values,
        }
    )


def test_a_manifest_comes_back_and_any_change_of_it_is_seen() -> None:
    state = to_tree({0: (math.inf, -1e-300, True)}, "state", {})
    manifest = _manifest(files={MODEL: b"123"}, state=state)
    data = manifest.dumps()
    assert load_manifest(data, "here") == manifest
    assert from_tree(load_manifest(data, "here").state, {}) == {0: (math.inf, -1e-300, True)}
    changed = data.replace(b'"step": 20', b'"step": 21')
    assert changed != data
    with pytest.raises(DataError, match="checkpoint is damaged: here has another sha256 than it says"):
        load_manifest(changed, "here")
    with pytest.raises(DataError, match="checkpoint is damaged: here is no JSON"):
        load_manifest(data[:-40], "here")
    for other in (b"", b"[1]", b'{"tool": "other"}', b"\x80\x04pickle"):
        with pytest.raises(InputError, match="not a checkpoint: here"):
            load_manifest(other, "here")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"name": "resnet18"}}, "checkpoint is of another model: trivial, the recipe's is resnet18"),
        ({"launch": {"ranks": 3}}, r"cannot resume with another global batch: it was 8, now it is 12 \(3 ranks x 4\)"),
        ({"input": {"seed": 2}, "model": {"name": "trivial"}}, "another input.seed: it was 1, now it is 2"),
        ({"data": {"num_classes": 7}}, "another data.num_classes: it was 1000, now it is 7"),
        ({"train": {"batch_size": 4, "warmup_steps": 0, "steps": 20}}, "nothing is left to train.*of step 20"),
    ],
)
def test_another_training_is_refused_by_name(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_fits(_recipe(**sections), _manifest())


def test_ranks_storage_and_length_may_change() -> None:
    train = {"batch_size": 8, "warmup_steps": 3, "steps": 90, "display_every": 1}
    changed = {"launch": {"ranks": 1}, "train": train, "storage": {"retries": 1}, "input": {"decode_threads": 3}}
    check_fits(_recipe(**changed), _manifest())


def test_another_length_is_told_where_the_learning_rate_falls_over_the_whole_run() -> None:
    def told(schedule: dict[str, Any], **train: Any) -> list[str]:
        before = _recipe(schedule=schedule).model_dump()
        now = _recipe(schedule=schedule, train={"batch_size": 4, "warmup_steps": 0, **train})
        about = About(
            recipe=now,
            world=World(rank=0, world_size=2, local_rank=0, local_world_size=2, node="n"),
            dataset_sha256="d",
            rounding={},
        )
        found = differences(_manifest(recipe=before), about, nn.Identity())
        return [each for each in found if "learning rate" in each]

    words = "the learning rate falls over the whole run, whose length was 50 steps, now "
    assert told({"name": "cosine"}, steps=90) == [words + "90 steps"]
    assert told({"name": "polynomial"}, epochs=2.0) == [words + "2 epochs"]
    assert told({"name": "cosine"}, steps=50) == []
    assert told({"name": "cosine", "length": 40.0}, steps=90) == []
    assert told({"name": "constant"}, steps=90) == []


def test_event_files_may_go_elsewhere() -> None:
    check_fits(_recipe(summaries={"dir": "elsewhere", "verbosity": 1}), _manifest())


def test_steps_left_are_warm_up_first_and_one_is_measured() -> None:
    train = _recipe(train={"batch_size": 4, "warmup_steps": 5, "steps": 10}).train
    assert train.steps_from(0, 15) == (5, 10)
    assert train.steps_from(7, 15) == (5, 3)
    assert train.steps_from(12, 15) == (2, 1)
    assert train.steps_from(14, 15) == (0, 1)


# Places


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStore]:
    if request.param == "folder":
        yield FolderStore(tmp_path / "checkpoints")
    else:
        yield _bucket(request.getfixturevalue("embedded_store"), tmp_path.name)


def _bucket(running: embedded.EmbeddedStore, prefix: str, endpoint: str = "") -> BucketStore:
    embedded.ensure_bucket(running, "checkpoints")
    keys = Credentials(access_key_id=running.access_key_id, secret_access_key=running.secret_access_key)
    url = f"s3://checkpoints/{prefix}"
    return BucketStore(open_place(url, endpoint or running.endpoints[0], keys, Storage(connect_timeout_s=1)), url)


FILES = {MODEL: b"m" * 3_000_000, TRAINING: b"t" * 100}


def _write(store: CheckpointStore, step: int, files: dict[str, bytes] = FILES, *, commit: bool = True) -> None:
    writing = store.begin(name_of(step))
    for name, data in files.items():
        writing.write(name, lambda data=data: iter([data[:1000], data[1000:]]))  # type: ignore[misc]
    if commit:
        writing.commit(_manifest(step, files).dumps())


def test_a_checkpoint_is_there_once_committed_and_what_is_not_is_cleaned_away(store: CheckpointStore) -> None:
    assert store.steps() == []
    assert store.clean() == []
    _write(store, 9)
    _write(store, 100)
    _write(store, 110, commit=False)
    assert store.steps() == [9, 100]
    assert len(store.clean()) == 1
    assert store.clean() == []
    assert store.steps() == [9, 100]
    assert store.sizes(name_of(110)) == {}
    found = store.sizes(name_of(9))
    assert found.pop(MANIFEST) > 100
    assert found == {MODEL: 3_000_000, TRAINING: 100}
    store.delete(name_of(9))
    assert store.steps() == [100]
    assert load_manifest(store.manifest(name_of(100)), "x").step == 100


def test_a_second_one_of_the_same_step_replaces_the_first(store: CheckpointStore) -> None:
    _write(store, 5)
    _write(store, 5, {MODEL: b"other", TRAINING: b""})
    assert store.steps() == [5]
    assert store.sizes(name_of(5))[MODEL] == 5


def _find(url: str, resume: str = "auto", **sections: Any) -> Any:
    checkpoint = {"url": url, "resume": resume}
    return find_checkpoints(_recipe(checkpoint=checkpoint, **sections), "", None, 100)


def test_auto_takes_the_newest_whole_one_and_begins_anew_where_there_is_none(tmp_path: Path) -> None:
    url = str(tmp_path / "checkpoints")
    assert _find(url).resume is None
    assert not Path(url).exists()
    store = FolderStore(Path(url))
    _write(store, 9)
    _write(store, 12)
    _write(store, 15, commit=False)
    found = _find(url)
    assert (found.first_step, found.resume.url) == (12, f"{url}/step-00000012")
    named = _find("", f"{url}/step-00000009")
    assert named.first_step == 9


def test_a_new_training_needs_a_place_of_its_own(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    _write(store, 9)
    _write(store, 12)
    with pytest.raises(InputError, match="holds checkpoints already, the last of step 12"):
        _find(str(tmp_path), "never")
    with pytest.raises(InputError, match=r"of a training that went further: of step 12, while .* is of step 9"):
        _find(str(tmp_path), str(tmp_path / "step-00000009"))


def test_torn_ones_are_damage_and_nothing_older_is_taken_instead(tmp_path: Path) -> None:
    _write(FolderStore(tmp_path), 9)
    _write(FolderStore(tmp_path), 12)
    newest = tmp_path / "step-00000012"
    os.truncate(newest / MODEL, 1234)
    with pytest.raises(DataError, match=r"step-00000012: model.safetensors has 1,234 bytes, expected 3,000,000"):
        _find(str(tmp_path))
    (newest / MODEL).unlink()
    with pytest.raises(DataError, match=r"model.safetensors is missing"):
        _find(str(tmp_path))
    (newest / MANIFEST).unlink()
    with pytest.raises(DataError, match=r"unfinished checkpoint: .*step-00000012 has no checkpoint.json"):
        _find("", str(newest))


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "none"):
        with pytest.raises(InputError, match=r"not a checkpoint: .* has no checkpoint.json"):
            _find("", str(place))
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"Not a directory"):
        _find(str(tmp_path / "file" / "below"))


def test_epochs_that_are_not_known(tmp_path: Path) -> None:
    recipe = _recipe(checkpoint={"url": str(tmp_path), "every_epochs": 1})
    with pytest.raises(InputError, match="how many records an epoch has is not known"):
        find_checkpoints(recipe, "", None, None)


def test_a_full_disk_is_one_line_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs root: a small file system to fill")
    try:
        store = FolderStore(tmp_path)
        _write(store, 5)
        with pytest.raises(OSError, match="No space left") as caught:
            _write(store, 10)
        told = store.explain(caught.value, name_of(10))
        assert isinstance(told, EnvironmentUnfit)
        assert str(told) == f"checkpoint {tmp_path}/step-00000010: No space left on device"
        assert store.steps() == [5]
        assert store.sizes(name_of(5))[MODEL] == 3_000_000
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


KILLED = """
import os, sys
from pathlib import Path
from tests.test_checkpoint import _write
from drawbar.checkpoint.stores import FolderStore
synced = os.fsync
def fsync(descriptor):
    print("half", flush=True)
    sys.stdin.read()
_write(FolderStore(Path(sys.argv[1])), 5)
os.fsync = fsync
_write(FolderStore(Path(sys.argv[1])), 10)
"""


def test_a_writer_killed_in_the_middle_leaves_the_one_before_and_the_next_cleans_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait(30)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 2
    assert left[0].startswith(".step-00000010.")
    store = FolderStore(tmp_path)
    assert store.steps() == [5]
    assert _find(str(tmp_path)).first_step == 5
    assert store.clean() == [left[0]]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_an_endpoint_that_is_gone(embedded_store: embedded.EmbeddedStore, tmp_path: Path) -> None:
    with Proxy(embedded_store.endpoints[0]) as proxy:
        store = _bucket(embedded_store, tmp_path.name, proxy.endpoint)
        _write(store, 5)
        writing = store.begin(name_of(10))
        proxy.cut()
        with pytest.raises(Exception, match="error") as caught:
            writing.write(MODEL, lambda: iter([b"x" * 1000]))
        told = store.explain(caught.value, name_of(10))
        assert isinstance(told, EnvironmentUnfit)
        assert "endpoint does not answer: checkpoint s3://checkpoints/" in str(told)
    whole = _bucket(embedded_store, tmp_path.name)
    assert whole.steps() == [5]
    assert whole.sizes(name_of(5))[MODEL] == 3_000_000


# Weights that a user gives


class _Net(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.head = nn.Linear(4, num_classes)


@pytest.mark.parametrize("form", ["safetensors", "plain.pth", "wrapped.pth"])
def test_weights_of_a_file_are_taken_and_a_head_of_other_classes_is_left(tmp_path: Path, form: str) -> None:
    path, theirs, mine = tmp_path / f"weights.{form}", _Net(1000), _Net(10)
    state = theirs.state_dict()
    if form == "safetensors":
        path.write_bytes(save_safetensors(state | {"extra": torch.ones(1)}))
    elif form == "plain.pth":
        torch.save(state | {"extra": torch.ones(1)}, path)
    else:
        torch.save(
            {"state_dict": {f"module.{name}": v for name, v in (state | {"extra": torch.ones(1)}).items()}}, path
        )
    head = mine.head.weight.clone()
    read = load_weights(mine, path)
    assert torch.equal(mine.state_dict()["body.0.weight"], theirs.state_dict()["body.0.weight"])
    assert torch.equal(mine.head.weight, head)
    assert read.head == ["head.weight", "head.bias"]
    assert (read.loaded, read.missing, read.unexpected) == (7, [], ["extra"])


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    path, net = tmp_path / "weights.pth", _Net(10)
    state = net.state_dict()
    for changed, words in (
        ({"other.weight": torch.ones(3)}, "this one has none of its 1 tensors, such as other.weight"),
        ({k: v for k, v in state.items() if k != "body.0.bias"}, "it lacks 1 tensors, such as body.0.bias"),
        (state | {"body.0.weight": torch.ones(4, 3, 5, 5)}, r"shape of body.0.weight is \(4, 3, 5, 5\)"),
    ):
        torch.save(changed, path)
        with pytest.raises(InputError, match=words):
            load_weights(_Net(10), path)


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("EXECUTED",)


def test_code_in_a_file_of_weights_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"body.0.weight": _Evil()}, "evil.pth")
    with pytest.raises(InputError, match="holds more than tensors, and reading it would run code from it"):
        load_weights(_Net(10), Path("evil.pth"))
    assert not Path("EXECUTED").exists()


def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    for name in ("short.pth", "short.safetensors"):
        (tmp_path / name).write_bytes(b"PK\x03\x04" + b"\0" * 50)
        with pytest.raises(DataError, match=f"cannot read model.weights .*{name}"):
            load_weights(_Net(10), tmp_path / name)
