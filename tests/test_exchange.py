"""The exchange of gradients between real ranks: what it does to losses, and what of its time is seen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from drawbar.config import Emulate
from drawbar.config import Exchange as Settings
from drawbar.journal import ModelBuilt, RunJournal, Step, read_run
from drawbar.models.build import build_model
from drawbar.train.clock import HostClock
from drawbar.train.emulated import EmulatedStep, buckets_of
from drawbar.train.exchange import Exchange
from drawbar.train.objective import Classification
from tests.drawbar_process import drawbar, result_of
from tests.one_step import batch, convolution, losses, train_step
from tests.small_set import NUM_CLASSES, write_set


def recipe(folder: Path, *, source: str = "constant", steps: int = 5) -> Path:
    path = folder / "recipe.toml"
    path.write_text(
        f"""
        [data]
        url = "{folder / "data"}"
        num_classes = {NUM_CLASSES}
        [input]
        source = "{source}"
        image_size = 32
        shuffle_buffer = 16
        [model]
        name = "trivial"
        precision = "fp32"
        [train]
        batch_size = 4
        warmup_steps = 2
        steps = {steps}
        [optimizer]
        learning_rate = 0.2
        [launch]
        ranks = 2
        stall_timeout_s = 60
        [cache]
        start = "any"
        """
    )
    return path


def ran(path: Path, out: Path, *settings: str) -> RunJournal:
    finished = drawbar("run", path, "--out", out, *(part for setting in settings for part in ("--set", setting)))
    assert finished.code == 0, finished.stderr
    return read_run(out)


def losses_of(journal: RunJournal) -> list[float]:
    """Mean over the ranks, for each step."""
    rows = [[step.loss for step in rank.of(Step)] for rank in journal.ranks]
    return [sum(row) / len(row) for row in zip(*rows, strict=True)]


@pytest.mark.run
def test_one_and_two_ranks_have_one_loss_curve(tmp_path: Path) -> None:
    """The same global batches of the same records by the reading plan, on a model without batch norm."""
    write_set(tmp_path / "data")
    path = recipe(tmp_path, source="data", steps=22)
    decay = ("schedule.name=cosine", "schedule.unit=epochs", "schedule.warmup=0.25", "schedule.length=2.0")
    both = ran(path, tmp_path / "two", *decay, "train.batch_size=4")
    two = losses_of(both)
    one = losses_of(ran(path, tmp_path / "one", *decay, "train.batch_size=8", "launch.ranks=1"))
    in_parts = (*decay, "train.batch_size=8", "launch.ranks=1", "train.accumulate=2")
    parts = losses_of(ran(path, tmp_path / "parts", *in_parts))
    assert len(two) == 24
    assert one == pytest.approx(two, rel=1e-4)
    assert parts == pytest.approx(two, rel=1e-4)
    # 96 records make 12 steps an epoch: 3 of warm-up, the half of the fall at step 3 + 21 / 2.
    for rank in both.ranks:
        rates = [step.learning_rate for step in rank.of(Step)]
        assert rates[:4] == pytest.approx([0.0, 0.2 / 3, 0.4 / 3, 0.2])
        assert rates[13] + rates[14] == pytest.approx(0.2)
        assert sorted(rates[3:], reverse=True) == rates[3:]
    # Batches differ by far more than the tolerance: another order would show.
    assert len({round(loss, 3) for loss in two}) > 15


@pytest.mark.run
def test_every_way_of_exchanging_gives_the_same_gradients(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    settings = ("model.name=resnet18", "train.steps=3", "optimizer.learning_rate=0.01")
    plain = losses_of(ran(path, tmp_path / "plain", *settings))
    delayed = losses_of(ran(path, tmp_path / "delayed", *settings, "exchange.delayed=true", "exchange.bucket_mib=2.0"))
    assert delayed == pytest.approx(plain, rel=1e-4)
    assert plain[-1] != pytest.approx(plain[0], rel=1e-2)
    for compression in ("bf16", "fp16"):
        out = tmp_path / compression
        journal = ran(path, out, *settings, f"exchange.compression={compression}", "exchange.delayed=true")
        found = losses_of(journal)
        # The first update is all but the same; then so small a model leaps.
        assert found[:2] == pytest.approx(plain[:2], rel=1e-2)
        assert found[1:] != plain[1:], "rounded gradients were sent"
        built = journal.ranks[1].first(ModelBuilt)
        assert built is not None
        assert built.gradient_bytes == 2 * built.parameters == 2 * result_of(out)["model"]["parameters"]


@pytest.mark.run
def test_waiting_for_a_slow_rank_is_time_of_the_exchange(tmp_path: Path) -> None:
    journal = ran(recipe(tmp_path), tmp_path / "slow", "faults.slow_rank=1", "faults.slow_step_s=0.25")
    fast, slow = ([step for step in rank.of(Step) if not step.warmup] for rank in journal.ranks)
    for mine, other in zip(fast, slow, strict=True):
        assert mine.exchange_s > 0.15
        assert mine.exchange_s > other.exchange_s + 0.1
        assert mine.compute_s < 0.15
        parts = mine.data_wait_s + mine.copy_s + mine.compute_s + mine.exchange_s + mine.optimizer_s
        assert parts <= (mine.end_t - mine.start_t) * 1.001
    shares = result_of(tmp_path / "slow")["ranks"][0]["shares"]
    assert shares["exchange"] > 0.5
    assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.run
def test_an_emulated_step_is_said_to_be_one_everywhere(tmp_path: Path) -> None:
    out = tmp_path / "emulated"
    settings = ("emulate.step_s=0.1", "model.name=resnet50", "launch.ranks=2", "train.steps=10")
    finished = drawbar("run", recipe(tmp_path), "--out", out, *(p for s in settings for p in ("--set", s)))
    assert finished.code == 0, finished.stderr
    result = result_of(out)
    parameters = result["model"]["parameters"]
    assert result["model"] == {
        "name": "resnet50",
        "parameters": parameters,
        "gradient_bytes": 4 * parameters,
        "emulated_step_s": 0.1,
        "skipped_updates": 0,
        "compiled_s": None,
    }
    assert "training" in {reason["rule"] for reason in result["validity"]["reasons"]}
    assert "compute threads" not in {reason["rule"] for reason in result["validity"]["reasons"]}
    assert "emulated, nothing was trained: each step takes 0.1 s by the recipe" in " ".join(finished.stdout.split())
    assert "images/s, emulated" in (out / "report.html").read_text()
    steps = [step for rank in read_run(out).ranks for step in rank.of(Step)]
    assert all(step.loss is None and step.end_t - step.start_t >= 0.09 for step in steps)
    # 100 MB cannot be added up in no time: what sticks out of the step is seen.
    assert sum(step.exchange_s for step in steps) > 0


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one rank, in this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradients(settings: Settings) -> list[torch.Tensor]:
    """Of the third of three backward passes: the first two are those in which DDP finds its buckets."""
    torch.manual_seed(2)
    exchange = Exchange(settings, HostClock(), torch.device("cpu"))
    layers = [layer for _ in range(4) for layer in (nn.Linear(300, 300), nn.Tanh())]
    model = exchange.wrap(nn.Sequential(*layers))
    inputs = torch.randn(8, 300)
    for _ in range(3):
        model.zero_grad()
        begin_t = time.perf_counter()
        model(inputs).square().sum().backward()
        ready_t = exchange.take_ready()
        assert begin_t < ready_t < time.perf_counter()
    assert exchange.gradient_bytes == 4 * (300 * 300 + 300) * (4 if settings.compression == "none" else 2)
    found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("delayed", [False, True])
def test_gradients_pass_the_exchange_whole_or_rounded_as_asked(delayed: bool) -> None:
    plain = gradients(Settings())
    for mine, other in zip(gradients(Settings(delayed=delayed, bucket_mib=0.3)), plain, strict=True):
        assert torch.equal(mine, other)
    rounded: list[tuple[Literal["bf16", "fp16"], torch.dtype]] = [("bf16", torch.bfloat16), ("fp16", torch.float16)]
    for compression, dtype in rounded:
        sent = gradients(Settings(delayed=delayed, bucket_mib=0.3, compression=compression))
        for mine, other in zip(sent, plain, strict=True):
            assert torch.equal(mine, other.to(dtype).float())
        assert not all(torch.equal(mine, other) for mine, other in zip(sent, plain, strict=True))


@pytest.mark.usefixtures("alone")
def test_parts_of_a_batch_are_exchanged_once() -> None:
    whole, parts = convolution(), convolution()
    expected = losses(train_step(whole))
    exchange = Exchange(Settings(), HostClock(), torch.device("cpu"))
    sent: list[bool] = []
    send = exchange._send

    def counted(state: Any, bucket: Any) -> Future[torch.Tensor]:
        sent.append(bucket.is_last())
        return send(state, bucket)

    exchange._send = counted
    step = train_step(exchange.wrap(parts), exchange=exchange, accumulate=4)
    assert losses(step) == pytest.approx(expected, rel=1e-5)
    assert sent.count(True) == 4, "one exchange for each of four steps"


@pytest.mark.usefixtures("alone")
def test_an_emulated_step_waits_for_its_exchange_to_end() -> None:
    with torch.device("meta"):
        model = build_model("resnet18", 10)
    buckets = buckets_of(model, Settings(), torch.device("cpu"))
    objective = Classification(device=torch.device("cpu"), dtype=torch.float32, channels_last=True)
    step = EmulatedStep(Emulate(step_s=0.02), buckets, objective, torch.device("cpu"))
    for _ in range(3):
        marks = step.run(batch()).marks
        times = [marks.start, marks.copied, marks.computed, marks.exchanged, marks.updated]
        assert times == sorted(times)
    assert sum(bucket.gradients.numel() for bucket in buckets) == 11_181_642


class StubBucket:
    def __init__(self, number: int, last: bool) -> None:
        self.number, self._last = number, last

    def is_last(self) -> bool:
        return self._last


def test_a_delayed_exchange_sends_nothing_before_the_last_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, Future[torch.Tensor]]] = []

    def send(state: Any, bucket: Any) -> Future[torch.Tensor]:
        future: Future[torch.Tensor] = Future()
        sent.append((bucket.number, future))
        return future

    exchange = Exchange(Settings(delayed=True), HostClock(), torch.device("cpu"))
    monkeypatch.setattr(exchange, "_send", send)
    promises = [exchange._take(StubBucket(number, number == 2)) for number in range(3)]  # type: ignore[arg-type]
    assert [number for number, _ in sent] == [0, 1, 2]
    assert exchange.take_ready() is not None
    assert exchange.take_ready() is None
    sent[0][1].set_result(torch.ones(1))
    assert promises[0].wait() == torch.ones(1)
    sent[1][1].set_exception(RuntimeError("connection closed by peer"))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="closed by peer"):
        promises[1].wait()
