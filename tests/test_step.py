"""One step on one rank: parts of a batch, number formats, too little memory, an accelerator that is not there."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drawbar.config import Emulate, Exchange
from drawbar.errors import EnvironmentUnfit, RunFailed
from drawbar.models.build import build_model
from drawbar.train.emulated import EmulatedStep, bucket_sizes, buckets_of
from drawbar.train.objective import Classification
from drawbar.train.precision import choose_precision
from tests.one_step import CPU, batch, convolution, losses, train_step


def test_a_batch_in_parts_gives_the_losses_and_weights_of_the_whole() -> None:
    whole, parts = convolution(), convolution()
    expected = losses(train_step(whole))
    assert losses(train_step(parts, accumulate=4)) == pytest.approx(expected, rel=1e-5)
    assert expected[3] < expected[0]
    for mine, other in zip(parts.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)


def test_smoothed_labels_have_the_textbook_loss() -> None:
    model = convolution()
    step = train_step(model, smoothing=0.1)
    one = batch()
    images, labels = Classification(device=CPU, dtype=torch.float32, channels_last=False).to_device(one)
    with torch.no_grad():
        log_p = model(images).log_softmax(1)
    target = 0.9 * nn.functional.one_hot(labels, 10) + 0.1 / 10
    expected = -(target * log_p).sum(1).mean()
    assert step.run(one).loss == pytest.approx(float(expected), rel=1e-5)


def test_marks_of_a_step_follow_each_other() -> None:
    marks = train_step(convolution()).run(batch()).marks
    times = [marks.start, marks.copied, marks.computed, marks.exchanged, marks.updated]
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_an_overflow_in_fp16_skips_the_update_and_is_told() -> None:
    """The loss scaler's own rule, on a model whose arithmetic a CPU has in fp16 too."""
    model = build_model("trivial", 10)
    step = train_step(model, "fp16", loss_scale=2.0**24)
    before = [parameter.clone() for parameter in model.parameters()]
    assert step.run(batch()).tags == ("update_skipped",)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    while step.run(batch()).tags:
        assert step.scaler.get_scale() > 1
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_scaled_losses_in_fp16_train_as_fp32_does() -> None:
    torch.manual_seed(1)
    half, single = build_model("trivial", 10), build_model("trivial", 10)
    single.load_state_dict(half.state_dict())
    mixed = losses(train_step(half, "fp16", loss_scale=128.0))
    assert mixed == pytest.approx(losses(train_step(single)), rel=1e-2)
    assert mixed[3] < mixed[0]


@pytest.mark.parametrize("wanted", ["tf32", "fp16"])
def test_what_only_gpus_have_is_refused_on_a_cpu(wanted: str) -> None:
    with pytest.raises(EnvironmentUnfit, match=f"{wanted} needs a GPU; this rank trains on the CPU"):
        choose_precision(wanted, CPU)


def test_steps_in_which_torch_compile_worked_are_told() -> None:
    """Its tracing is the same whatever makes code of the graph; another batch size takes another graph."""
    model = torch.compile(convolution(), backend="eager", dynamic=False)
    step = train_step(model)  # type: ignore[arg-type]
    assert step.run(batch()).tags == ("compiled",)
    assert step.run(batch()).tags == ()
    assert step.run(batch(4)).tags == ("compiled",)


class Hungry(nn.Module):
    """Takes no more than four images; for a fifth it asks the allocator for more than any machine has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = convolution()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if len(images) > 4:
            torch.empty(2**50, dtype=torch.uint8)
        logits: torch.Tensor = self.inner(images)
        return logits


def test_a_batch_too_large_for_the_memory_is_told_with_what_fits() -> None:
    with pytest.raises(RunFailed) as caught:
        train_step(Hungry()).run(batch(24))
    assert caught.value.message == "a batch of 24 does not fit into the memory of cpu; of its halves, 3 fit"
    assert "train.batch_size = 3" in (caught.value.hint or "")


def test_errors_of_another_kind_are_not_taken_for_it() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train_step(nn.Sequential(nn.Flatten(), nn.Linear(3, 10))).run(batch())


# The emulated step


class SleepyTime:
    """A clock that only sleeping moves, and whose sleeper wakes up late."""

    late_s = 0.0007

    def __init__(self) -> None:
        self.now_t = 100.0

    def perf_counter(self) -> float:
        return self.now_t

    def sleep(self, seconds: float) -> None:
        self.now_t += seconds + self.late_s


def emulated(step_s: float) -> EmulatedStep:
    objective = Classification(device=CPU, dtype=torch.float32, channels_last=True)
    return EmulatedStep(Emulate(step_s=step_s), [], objective, CPU)


def test_waking_up_late_does_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SleepyTime()
    monkeypatch.setattr("drawbar.train.emulated.time", clock)
    step = emulated(0.1)
    ends = []
    for _ in range(1000):
        ends.append(step.run(batch(1)).marks.updated)
        clock.now_t += 0.0005  # the loop's own work
    assert ends[0] == pytest.approx(100.1 + clock.late_s)
    assert ends[-1] == pytest.approx(200.0 + clock.late_s)


def test_a_batch_that_comes_late_moves_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SleepyTime()
    monkeypatch.setattr("drawbar.train.emulated.time", clock)
    step = emulated(0.1)
    before_t = step.run(batch(1)).marks.updated
    clock.now_t += 0.25
    assert step.run(batch(1)).marks.updated == pytest.approx(before_t + 0.35 + clock.late_s)


def test_a_host_that_stood_still_is_not_caught_up_by_more_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SleepyTime()
    monkeypatch.setattr("drawbar.train.emulated.time", clock)
    step = emulated(0.1)
    step.run(batch(1))
    clock.late_s = 1.0
    stopped_t = step.run(batch(1)).marks.updated
    clock.late_s = 0.0
    later = [step.run(batch(1)).marks.updated - stopped_t for _ in range(3)]
    assert later == pytest.approx([0.0, 0.1, 0.2])


def test_an_emulated_step_keeps_no_core_busy() -> None:
    step = emulated(0.05)
    begin_t, begin_cpu = time.perf_counter(), time.thread_time()
    trained = [step.run(batch(1)) for _ in range(8)]
    assert time.perf_counter() - begin_t >= 8 * 0.05
    assert time.thread_time() - begin_cpu < 0.1
    assert all(row.loss is None and row.learning_rate is None for row in trained)


@pytest.mark.parametrize("bucket_mib", [0.0, 1.0, 7.5, 400.0])
def test_emulated_buckets_are_those_of_pytorchs_own_rule(bucket_mib: float) -> None:
    with torch.device("meta"):
        model = build_model("resnet50", 1000)
    backwards: list[torch.Tensor] = list(reversed(list(model.parameters())))
    limits = [int(bucket_mib * 2**20)] if bucket_mib else [2**20, 25 * 2**20]
    assign = torch.distributed._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    places, _ = assign(backwards, limits, [False] * len(backwards))
    expected = [sum(backwards[i].numel() for i in bucket) for bucket in places]
    assert bucket_sizes(model, bucket_mib) == expected
    assert sum(expected) == 25_557_032


def test_gradients_become_ready_in_proportion_and_are_as_wide_as_they_are_sent() -> None:
    model: Any = SimpleNamespace(parameters=lambda: [torch.empty(2**20, requires_grad=True) for _ in range(4)])
    buckets = buckets_of(model, Exchange(bucket_mib=4.0, compression="bf16"), CPU)
    assert [bucket.ready for bucket in buckets] == [0.25, 0.5, 0.75, 1.0]
    assert [bucket.gradients.nbytes for bucket in buckets] == [2 * 2**20] * 4
    assert {bucket.ready for bucket in buckets_of(model, Exchange(bucket_mib=4.0, delayed=True), CPU)} == {1.0}
