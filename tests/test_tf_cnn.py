"""`drawbar tf-cnn`: the ECS study's command line as it stands, absl's spellings, what is refused, and a real run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from drawbar.config import Model, Storage, load_recipe
from drawbar.dataset.destination import StoreDestination
from drawbar.dataset.pack import pack
from drawbar.dataset.shard_writer import PackSettings
from drawbar.dataset.synthetic import ImagenetLikeSet, SyntheticSource
from drawbar.errors import InputError, RecipeError
from drawbar.storage import embedded
from drawbar.storage.environment import Credentials
from drawbar.storage.stores import open_place
from drawbar.tf_cnn.command import to_toml
from drawbar.tf_cnn.keys import has_counterpart
from drawbar.tf_cnn.translate import Translation, translate
from tests.drawbar_process import drawbar, result_of

HTTP = {"S3_USE_HTTPS": "0"}

ECS_STUDY = """
python3
-u
/tensorflow-benchmarks/scripts/tf_cnn_benchmarks/tf_cnn_benchmarks.py
--model=resnet50
--batch_size=1280
--num_batches=500
--nodistortions
--num_gpus=1
--device=gpu
--data_format=NCHW
--use_fp16=True
--data_name=imagenet
--use_datasets=True
--datasets_num_private_threads=32
--train_dir=/imagenet-scratch/train_dir/2021-01-02-03-04-05-resnet50
--sync_on_finish=True
--summary_verbosity=1
--variable_update=horovod
--horovod_device=gpu
--data_dir=s3://imagenet/train
--ecs_node=10.1.2.1
--ecs_node=10.1.2.2
--ecs_node=10.1.2.3
--ecs_node=10.1.2.4
--ecs_node=10.1.2.5
"""
"""As the ECS study prints it, from `round_robin_ecs.py` on; its time stamp is filled in."""


def read(line: str, environ: dict[str, str] = HTTP, **options: Any) -> Translation:
    return translate(shlex.split(line), environ, **options)


# The study's command line


@pytest.fixture
def study_line() -> str:
    return ECS_STUDY


def test_the_ecs_studys_command_line_becomes_its_recipe(study_line: str) -> None:
    recipe = read(study_line).recipe
    assert recipe.name == "tf-cnn-resnet50"
    assert (recipe.model.name, recipe.input.image_size, recipe.model.channels_last) == ("resnet50", 224, False)
    assert (recipe.train.batch_size, recipe.train.steps, recipe.train.warmup_steps) == (1280, 500, 10)
    assert (recipe.input.distortions, recipe.input.crop_boxes, recipe.input.decode_threads) == (False, "objects", 32)
    assert (recipe.launch.device, recipe.launch.ranks) == ("cuda", 1)
    assert recipe.data.url == "s3://imagenet/train/train-*-of-*"
    assert recipe.storage.endpoints == [f"http://10.1.2.{number}:9020" for number in range(1, 6)]
    assert recipe.storage.policy == "rank"
    assert recipe.summaries.dir == "/imagenet-scratch/train_dir/2021-01-02-03-04-05-resnet50"
    assert (recipe.summaries.verbosity, recipe.summaries.every_steps) == (1, 0)
    assert (recipe.optimizer.momentum, recipe.optimizer.weight_decay) == (0.0, 4e-5)
    assert recipe.model.precision == "fp16"


def test_a_format_that_recipes_lack_is_refused_and_never_ignored() -> None:
    """fp32 figures under the name of fp16 would be wrong silently."""
    assert read("--use_fp16", ignore_unknown=True).recipe.model.precision == "fp16"


def test_every_flag_of_the_study_is_accounted_for(study_line: str) -> None:
    translation = read(study_line)
    assert translation.ignored == []
    said = " ".join(line.flag for line in translation.lines)
    flags = [line for line in study_line.split() if line.startswith("--")]
    assert len(flags) >= 21
    assert [flag for flag in flags if flag not in said] == []


def test_dry_run_prints_a_recipe_file(tmp_path: Path, study_line: str) -> None:
    finished = drawbar("tf-cnn", "--dry-run", "--", *shlex.split(study_line), env=HTTP)
    assert finished.code == 0, finished.stderr
    path = tmp_path / "recipe.toml"
    path.write_text(finished.stdout)
    assert load_recipe(path) == read(study_line).recipe
    assert "# --batch_size=1280 " in finished.stdout
    assert "train.batch_size = 1280" in finished.stdout


def test_a_value_cannot_end_a_comment(tmp_path: Path) -> None:
    translation = translate(["--note=x\n[train]\nsteps = 7\r", "--model=resnet18"], {}, ignore_unknown=True)
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(translation))
    assert load_recipe(path) == translation.recipe


def test_dry_run_prints_json(study_line: str) -> None:
    finished = drawbar(
        "tf-cnn", "--dry-run", "--json", "--ignore-unknown", "--", *study_line.split(), "--mkl", env=HTTP
    )
    tree = json.loads(finished.stdout)
    assert tree["ignored"] == ["--mkl"]
    assert tree["recipe"] == read(study_line).recipe.model_dump()
    assert {"flag": "--num_batches=500", "key": "train.steps", "value": 500, "note": ""} in tree["flags"]


# absl's spellings


@pytest.mark.parametrize(
    "line",
    ["--batch_size=8 --distortions", "--batch_size 8 -distortions", "-batch_size=8 --distortions=True",
     "-batch_size 8 --distortions=t", "--batch_size=4 --nodistortions --batch_size=8 --distortions=1"],
)  # fmt: skip
def test_spellings_mean_the_same(line: str) -> None:
    recipe = read(line).recipe
    assert (recipe.train.batch_size, recipe.input.distortions) == (8, True)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--batch_size=many", "--batch_size is 'many': expected a whole number"),
        ("--batch_size=1.5", "--batch_size is '1.5': expected a whole number"),
        ("--momentum=x", "--momentum is 'x': expected a number"),
        ("--distortions=maybe", "--distortions is 'maybe': expected True or False"),
        ("--distortions True", "'True' is no flag"),
        ("--batch_size", "--batch_size has no value"),
        ("--batch_size --distortions", "--batch_size has no value"),
        ("resnet50", "'resnet50' is no flag"),
        ("--", "'--' is no flag"),
        ("--num_batches=5 --num_epochs=1", "--num_batches and --num_epochs cannot both be given"),
        ("--ecs_node=a", "--ecs_node needs a --data_dir"),
    ],
)
def test_what_is_no_command_line_is_refused(line: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        read(line)
    assert words in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--model=resnet51", "unknown model 'resnet51'"),
        ("--batch_size=-1", "train.batch_size is -1"),
        ("--data_dir=s3://b/p --ecs_node=http://key:secret@a", "credentials belong in AWS_ACCESS_KEY_ID"),
        ("--train_dir=s3://b/p", "'s3://b/p' is no folder"),
    ],
)
def test_what_no_recipe_may_have_is_refused_by_its_key(line: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(line)
    assert words in caught.value.message


# What has no counterpart


def test_flags_without_a_counterpart_are_refused_all_in_one_line() -> None:
    with pytest.raises(InputError) as caught:
        read("--winograd_nonfused --model=trivial --kmp_blocktime 0 --nouse_tf_layers --gradient_repacking=2")
    for flag in ("--winograd_nonfused", "--kmp_blocktime 0", "--nouse_tf_layers", "--gradient_repacking=2"):
        assert flag in caught.value.message
    assert "--model" not in caught.value.message
    assert "--ignore-unknown" in (caught.value.hint or "")


def test_they_are_listed_where_they_are_to_be_ignored() -> None:
    translation = read("--winograd_nonfused --model=resnet18 --kmp_blocktime 0", ignore_unknown=True)
    assert translation.ignored == ["--winograd_nonfused", "--kmp_blocktime 0"]
    assert translation.recipe.model.name == "resnet18"
    assert "# --kmp_blocktime 0 " in to_toml(translation)


@pytest.mark.parametrize(
    "flag",
    ["--forward_only", "--eval", "--optimizer=adam", "--data_name=cifar10", "--variable_update=distributed_replicated",
     "--nouse_datasets", "--resize_method=crop", "--ml_perf", "--data_format=NC", "--nocross_replica_sync",
     "--device=gpu --horovod_device=cpu", "--num_gpus=2 --variable_update=parameter_server"],
)  # fmt: skip
def test_another_job_is_refused_even_then(flag: str) -> None:
    with pytest.raises(InputError, match="Drawbar does not do --"):
        read(flag, ignore_unknown=True)


# Defaults and meanings


def test_what_is_left_out_is_as_tf_cnn_benchmarks_has_it() -> None:
    recipe = read("").recipe
    assert (recipe.model.name, recipe.train.batch_size, recipe.input.source) == ("trivial", 32, "constant")
    assert (recipe.model.precision, recipe.model.channels_last) == ("fp32", False)
    assert (recipe.train.steps, recipe.train.warmup_steps, recipe.optimizer.learning_rate) == (100, 10, 0.005)
    assert read("--nodatasets_repeat_cached_sample").recipe.input.source == "constant"
    assert read("--datasets_repeat_cached_sample --data_dir=/d").recipe.input.source == "memory"


@pytest.mark.parametrize(
    ("model", "batch_size"), [("alexnet", 512), ("vgg16", 64), ("resnet50", 64), ("inception3", 32)]
)
def test_a_model_has_its_own_batch_size(model: str, batch_size: int) -> None:
    assert read(f"--model={model}").recipe.train.batch_size == batch_size
    assert read(f"--model={model} --batch_size=0").recipe.train.batch_size == batch_size


def test_compiling_is_asked_for_or_not() -> None:
    for flag in ("--noxla", "--xla=False", "--noxla_compile"):
        assert not read(flag).recipe.model.compile
    for flag in ("--xla", "--xla_compile"):
        assert read(flag).recipe.model.compile


def test_sgd_is_without_momentum() -> None:
    assert read("--optimizer=sgd --momentum=0.5").recipe.optimizer.momentum == 0.0
    assert read("--optimizer=momentum").recipe.optimizer.momentum == 0.9
    assert read("--optimizer=momentum --momentum=0.5").recipe.optimizer.momentum == 0.5


@pytest.mark.parametrize(
    ("node", "environ", "address"),
    [
        ("10.1.2.1", {"S3_USE_HTTPS": "0"}, "http://10.1.2.1:9020"),
        ("10.1.2.1", {}, "https://10.1.2.1:9021"),
        ("10.1.2.1", {"S3_USE_HTTPS": "1"}, "https://10.1.2.1:9021"),
        ("ecs-1.lab:80", {"S3_USE_HTTPS": "0"}, "http://ecs-1.lab:80"),
        ("http://ecs-1:9020", {}, "http://ecs-1:9020"),
        ("[fd00::1]", {"S3_USE_HTTPS": "0"}, "http://[fd00::1]:9020"),
        ("[fd00::1]:80", {"S3_USE_HTTPS": "0"}, "http://[fd00::1]:80"),
    ],
)
def test_an_ecs_node_without_a_port_gets_ecs_s3_port(node: str, environ: dict[str, str], address: str) -> None:
    recipe = read(f"--data_dir=s3://b/p --ecs_node={node}", environ).recipe
    assert recipe.storage.endpoints == [address]


def test_devices_are_ranks_and_overrides_have_the_last_word() -> None:
    line = "--num_gpus=4 --variable_update=replicated --batch_size=16"
    recipe = read(line, overrides=["launch.ranks=2", "train.steps=3"]).recipe
    assert (recipe.launch.ranks, recipe.train.batch_size, recipe.train.steps) == (2, 16, 3)
    assert read(line).recipe.launch.ranks == 4


def test_counterparts_are_looked_up_in_the_recipe_itself() -> None:
    assert has_counterpart("train.steps", 5)
    assert has_counterpart("model.precision", "fp32")
    assert not has_counterpart("model.precision", "fp4")
    assert not has_counterpart("train.nothing", 5)
    assert not has_counterpart("nothing.steps", 5)
    assert "precision" in Model.model_fields


# Runs


@pytest.mark.parametrize(
    ("launcher", "environ"),
    [
        ("mpirun", {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}),
        ("srun", {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}),
    ],
)
def test_a_rank_of_another_launcher_is_told_that_it_cannot_be_one_yet(
    tmp_path: Path, launcher: str, environ: dict[str, str]
) -> None:
    finished = drawbar("tf-cnn", "--out", tmp_path / "run", "--", "--model=trivial", env=environ)
    assert finished.code == 3
    assert f"rank 1 of 4 of {launcher}" in finished.error_line
    assert "not supported yet" in finished.error_line
    assert not (tmp_path / "run").exists()


@pytest.mark.run
def test_the_command_line_runs_from_nodes_by_rank(tmp_path: Path, embedded_store: embedded.EmbeddedStore) -> None:
    """Three ranks over the store's endpoints as ECS nodes; the result's own counts say who asked whom."""
    embedded.ensure_bucket(embedded_store, "tf-cnn-tests")
    keys = Credentials(access_key_id=embedded_store.access_key_id, secret_access_key=embedded_store.secret_access_key)
    place = open_place("s3://tf-cnn-tests/train", embedded_store.endpoints[0], keys, Storage())
    images = ImagenetLikeSet(num_images=96, num_classes=10, seed=1, size=100)
    pack(SyntheticSource(images), StoreDestination(place.store, place.prefix), PackSettings(num_shards=3, seed=1))
    nodes = [f"--ecs_node={endpoint.removeprefix('http://')}" for endpoint in embedded_store.endpoints]
    line = """--model=trivial --batch_size=4 --num_batches=8 --num_warmup_batches=2 --nodistortions --num_gpus=3
        --device=cpu --data_name=imagenet --use_datasets=True --sync_on_finish=True --summary_verbosity=1
        --save_summaries_steps=5 --variable_update=replicated --data_dir=s3://tf-cnn-tests/train --mkl"""
    train_dir = tmp_path / "train_dir" / "{time}-trivial"
    finished = drawbar(
        *("tf-cnn", "--ignore-unknown", "--set", "input.image_size=64", "--out", tmp_path / "run", "--"),
        *(*line.split(), f"--train_dir={train_dir}", *nodes),
        env=keys.added_to(HTTP),
    )
    assert finished.code == 0, finished.stderr
    assert "ignored, as it has no counterpart: --mkl" in finished.stderr
    result = result_of(tmp_path / "run")
    assert result["status"] == "ok"
    assert (result["world_size"], result["steps"], result["warmup_steps"]) == (3, 8, 2)
    asked = {endpoint["url"] for endpoint in result["endpoints"] if endpoint["data_requests"]}
    assert asked == set(embedded_store.endpoints[:3])
    (folder,) = (tmp_path / "train_dir").iterdir()
    assert folder.name.endswith("-trivial")
    assert "{" not in folder.name
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    assert result["summaries"]["written"] == 2
    dumped = load_recipe(tmp_path / "run" / "recipe.toml")
    assert dumped.summaries.dir == str(folder)
    assert "# --mkl" in (tmp_path / "run" / "tf-cnn.toml").read_text()
