"""What the launchers are told, without starting them."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from drawbar.config import Launch
from drawbar.errors import EnvironmentUnfit, InputError
from drawbar.launch import command_lines
from drawbar.launch.command_lines import HostSlots, Job, parse_hosts, placement
from drawbar.launch.launchers import kind_of
from drawbar.launch.rendezvous import Rendezvous, first_host, rendezvous
from drawbar.world import World
from tests.drawbar_process import drawbar

ECS_HOSTS = [f"dl-worker-{number:02d}:2" for number in range(1, 9)]
ENV = {
    "AWS_ACCESS_KEY_ID": "imagenet",
    "AWS_SECRET_ACCESS_KEY": "mysecretkey",
    "S3_USE_HTTPS": "0",
    "HOME": "/root",
    "MASTER_ADDR": "dl-worker-01",
}


def job(**launch: object) -> Job:
    return Job(launch=Launch.model_validate(launch), run_dir=Path("/runs/a"), env=ENV, program=("rank",))


@pytest.mark.parametrize(
    ("ranks", "map_by", "expected"),
    [
        (16, "slot", [2] * 8),
        (3, "slot", [2, 1]),
        (1, "slot", [1]),
        (3, "node", [1, 1, 1]),
        (9, "node", [2, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_ranks_fill_slots_or_go_round_the_hosts(ranks: int, map_by: str, expected: list[int]) -> None:
    placed = placement(Launch.model_validate({"ranks": ranks, "hosts": ECS_HOSTS, "map_by": map_by}))
    assert [host.slots for host in placed] == expected
    assert [host.host for host in placed] == [f"dl-worker-{n:02d}" for n in range(1, len(expected) + 1)]


@given(slots=st.lists(st.integers(1, 5), min_size=1, max_size=8), data=st.data())
def test_every_rank_has_a_place_and_no_host_more_than_its_slots(slots: list[int], data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, sum(slots)))
    map_by = data.draw(st.sampled_from(["slot", "node"]))
    hosts = [f"h{i}:{count}" for i, count in enumerate(slots)]
    placed = placement(Launch.model_validate({"ranks": ranks, "hosts": hosts, "map_by": map_by}))
    assert sum(host.slots for host in placed) == ranks
    assert all(host.slots <= slots[int(host.host[1:])] for host in placed)


def test_a_host_file_in_both_notations(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the cluster\nnode1 slots=4\n\nnode2:2\nnode3  # spare\n")
    launch = Launch(host_file=str(path))
    assert parse_hosts(launch) == [HostSlots("node1", 4), HostSlots("node2", 2), HostSlots("node3", 1)]


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"ranks": 17, "hosts": ECS_HOSTS}, "launch.ranks is 17, but the hosts have 16 slots"),
        ({"hosts": ["a:2", "a:1"]}, "host a stands there twice"),
        ({"hosts": ["a:two"]}, "host 'a:two' is none"),
        ({"hosts": ["a:0"]}, "host 'a:0' is none"),
        ({"hosts": ["--oversubscribe"]}, "host '--oversubscribe' is none"),
        ({"host_file": "/nowhere"}, "cannot read launch.host_file /nowhere"),
    ],
)
def test_hosts_that_do_not_fit_are_refused(launch: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        placement(Launch.model_validate(launch))
    assert message in caught.value.message


def test_two_lists_of_hosts_or_none_for_mpirun_are_refused() -> None:
    with pytest.raises(ValidationError, match="both hosts and host_file"):
        Launch(hosts=["a"], host_file="f")
    with pytest.raises(ValidationError, match="neither hosts nor a host_file"):
        Launch(launcher="mpirun")


def test_the_ecs_studys_mpirun() -> None:
    command = command_lines.mpirun(
        job(ranks=16, hosts=ECS_HOSTS, report_bindings=True), program="mpirun", major_version=4, is_root=True
    )
    assert shlex.join(command) == (
        "mpirun -n 16 --allow-run-as-root --host "
        + ",".join(ECS_HOSTS)
        + " -map-by slot -bind-to none -report-bindings"
        " -x AWS_ACCESS_KEY_ID -x AWS_SECRET_ACCESS_KEY -x MASTER_ADDR -x S3_USE_HTTPS rank"
    )


def test_open_mpi_5_has_two_dashes_and_no_secret_is_on_any_line() -> None:
    asked = job(ranks=4, hosts=ECS_HOSTS, report_bindings=True, flags=["--tag-output"])
    five = command_lines.mpirun(asked, program="mpirun", major_version=5, is_root=False)
    assert [word for word in five if word.startswith("-") and not word.startswith("--")] == ["-n"] + ["-x"] * 4
    assert "--allow-run-as-root" not in five
    assert "--tag-output" in five
    for command in (five, command_lines.srun(asked), command_lines.local(asked)):
        assert not any("mysecretkey" in word for word in command)


def test_what_is_forwarded_by_name_must_be_there() -> None:
    assert "HOME" in command_lines.forwarded(job(hosts=["a"], forward=["HOME"]))
    with pytest.raises(InputError, match=r"launch\.forward names WANDB_KEY"):
        command_lines.forwarded(job(hosts=["a"], forward=["WANDB_KEY"]))


def test_srun_keeps_to_the_hosts_it_is_given() -> None:
    free = command_lines.srun(job(ranks=3))
    assert free[:2] == ["srun", "--ntasks=3"]
    assert not any(word.startswith("--nodelist") for word in free)
    named = command_lines.srun(job(ranks=4, hosts=["n1:2", "n2:2"]))
    assert {"--nodes=2", "--nodelist=n1,n2", "--ntasks-per-node=2", "--distribution=block"} <= set(named)


def test_torchrun_gets_a_line_for_each_host() -> None:
    lines = command_lines.torchrun_lines(job(ranks=4, hosts=["n1:2", "n2:2"]), 29500)
    assert list(lines) == ["n1", "n2"]
    for number, line in enumerate(lines.values()):
        text = shlex.join(line)
        assert f"--nnodes 2 --node-rank {number} --nproc-per-node 2 --master-addr n1 --master-port 29500" in text
    with pytest.raises(InputError, match="equally many ranks on every host, not 2 on n1, 1 on n2"):
        command_lines.torchrun_lines(job(ranks=3, hosts=["n1:2", "n2:2"]), 29500)


def test_the_launcher_follows_from_hosts_and_allocation() -> None:
    assert kind_of(Launch(), {}) == "local"
    assert kind_of(Launch(hosts=["a"]), {}) == "mpirun"
    assert kind_of(Launch(), {"SLURM_JOB_NUM_NODES": "2"}) == "srun"
    assert kind_of(Launch(), {"SLURM_JOB_NUM_NODES": "1"}) == "local"
    assert kind_of(Launch(launcher="local", hosts=["a"]), {}) == "local"


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node3", "node3"),
        ("node3,node4", "node3"),
        ("node[3-5,8],other", "node3"),
        ("node[03,05]", "node03"),
        ("rack1-[7-9]-gpu,x", "rack1-7-gpu"),
        ("a,node[1-2]", "a"),
    ],
)
def test_the_first_of_slurms_hosts(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first


def test_ranks_meet_where_their_launcher_says() -> None:
    world = World(rank=1, world_size=2, local_rank=0, local_world_size=1, node="n2", launcher="srun")
    assert rendezvous(world, {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}) == Rendezvous("n1", 29500)
    slurm = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "70", "SLURM_STEP_ID": "1"}
    address, port = rendezvous(world, slurm)
    assert address == "n1"
    assert 20_000 <= port < 32_000
    assert rendezvous(world, {**slurm, "SLURM_STEP_ID": "2"}).port != port
    with pytest.raises(EnvironmentUnfit, match="MASTER_PORT is 'x'"):
        rendezvous(world, {"MASTER_ADDR": "n1", "MASTER_PORT": "x"})


def test_a_dry_run_prints_a_line_to_type_and_no_secret(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[input]\nsource = "constant"\n[launch]\nranks = 4\nhosts = ["n1:2", "n2:2"]\nlauncher = "srun"\n'
    )
    env = {"AWS_SECRET_ACCESS_KEY": "very-secret", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    (tmp_path / "srun").touch(mode=0o755)
    done = drawbar("run", recipe, "--dry-run", "--out", tmp_path / "run", env=env)
    assert done.code == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("srun --ntasks=4 ")
    assert "export AWS_SECRET_ACCESS_KEY=***" in done.stdout
    assert "export MASTER_ADDR=n1" in done.stdout
    assert "very-secret" not in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()
    lines = drawbar("run", recipe, "--print-torchrun", "--out", tmp_path / "run").stdout
    assert lines.count("torch.distributed.run --nnodes 2") == 2
    alone = drawbar("run", recipe, "--print-torchrun", "--set", "launch.hosts=[]", "--set", "launch.launcher=local")
    assert alone.code == 2
    assert "launch.hosts is empty" in alone.error_line
