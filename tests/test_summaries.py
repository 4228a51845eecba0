"""TensorBoard's event files, read back by TensorBoard itself and set beside the journal."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from drawbar.config import Recipe, Summaries, load_recipe
from drawbar.errors import EnvironmentUnfit, InputError
from drawbar.journal import Event, JournalWriter, RunJournal, Step, Summary, read_run
from drawbar.launch.train_dir import check_train_dir, with_start_time
from drawbar.train.summaries import Summaries as Writer
from tests.drawbar_process import Finished, drawbar, result_of


def events_in(folder: Path) -> Any:
    """TensorBoard's own reader, with everything that the folder's files hold."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    accumulator.Reload()
    return accumulator


def settings(**keys: Any) -> Recipe:
    return Recipe.model_validate({"summaries": keys})


# A run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    folder = tmp_path_factory.mktemp("summaries")
    (folder / "recipe.toml").write_text(
        """
        [data]
        num_classes = 10
        [input]
        source = "constant"
        image_size = 32
        [model]
        name = "resnet18"
        [train]
        batch_size = 4
        warmup_steps = 2
        steps = 10
        [summaries]
        verbosity = 3
        every_steps = 4
        [launch]
        ranks = 2
        device = "cpu"
        stall_timeout_s = 60
        """
    )
    return folder / "run", drawbar("run", folder / "recipe.toml", "--out", folder / "run")


@pytest.fixture(scope="module")
def journal(run: tuple[Path, Finished]) -> RunJournal:
    assert run[1].code == 0, run[1].stderr
    return read_run(run[0])


@pytest.mark.run
def test_scalars_are_those_of_the_journal(run: tuple[Path, Finished], journal: RunJournal) -> None:
    events = events_in(run[0] / "train")
    assert set(events.Tags()["scalars"]) == {"loss", "learning_rate", "images_per_s_rank_0"}
    steps = journal.ranks[0].of(Step)
    for number, scalar in enumerate(events.Scalars("loss")):
        assert scalar.step == 4 * (number + 1)
        assert scalar.value == pytest.approx(steps[scalar.step - 1].loss)
    assert len(events.Scalars("loss")) == 3
    assert [scalar.value for scalar in events.Scalars("learning_rate")] == [pytest.approx(0.01)] * 3
    for scalar in events.Scalars("images_per_s_rank_0"):
        since = steps[scalar.step - 4 : scalar.step]
        assert scalar.value == pytest.approx(16 / sum(step.end_t - step.start_t for step in since), rel=1e-5)


@pytest.mark.run
def test_rank_0_alone_writes(run: tuple[Path, Finished], journal: RunJournal) -> None:
    assert len(list((run[0] / "train").iterdir())) == 1
    assert [len(rank.of(Summary)) for rank in journal.ranks] == [3, 0]


@pytest.mark.run
def test_writing_is_outside_of_every_step_and_its_cost_is_told(run: tuple[Path, Finished], journal: RunJournal) -> None:
    steps = journal.ranks[0].of(Step)
    summaries = journal.ranks[0].of(Summary)
    for summary in summaries:
        before, after = steps[summary.step], steps[summary.step + 1] if summary.step + 1 < len(steps) else None
        assert summary.t >= before.end_t
        if after is not None:
            assert before.end_t + summary.write_s <= after.start_t
            assert "after_summary" in after.tags
    result = result_of(run[0])
    assert not [reason for reason in result["validity"]["reasons"] if reason["severity"] == "invalid"]
    assert result["summaries"]["written"] == 3
    assert result["summaries"]["write_s"] == pytest.approx(sum(summary.write_s for summary in summaries))
    assert "summaries: written 3 times between steps" in " ".join(run[1].stdout.split())


@pytest.mark.run
def test_histograms_count_every_weight(run: tuple[Path, Finished]) -> None:
    events = events_in(run[0] / "train")
    tags = set(events.Tags()["histograms"])
    assert {"log_gradients", "conv1.weight", "conv1.weight/gradients", "fc.bias"} <= tags
    histogram = events.Histograms("conv1.weight")[0].histogram_value
    assert sum(histogram.bucket) == histogram.num == 64 * 3 * 49
    everything = events.Histograms("log_gradients")[0].histogram_value
    # Of 11,181,642. Where maps are one pixel, all but the centre of a 3x3 sees padding only, and has no gradient.
    assert 3_000_000 < everything.num < 5_000_000
    assert sum(everything.bucket) == pytest.approx(everything.num, rel=1e-4)


# One writer


class Kept:
    """Gradients as an optimizer's own hook sees them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.gradients: list[Any] = []
        self._model = model
        optimizer.register_step_pre_hook(self._keep)

    def _keep(self, *_: Any) -> None:
        each = [weight.grad.flatten() for weight in self._model.parameters() if weight.grad is not None]
        self.gradients.append(torch.cat(each).double().numpy())


def train(folder: Path, verbosity: int, *, loss: float | None = 1.5) -> Kept:
    """Four steps of a small model, every second of them due."""
    torch.manual_seed(1)
    model = nn.Linear(40, 30)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept = Kept(model, optimizer)
    journal = JournalWriter(folder / "journal.jsonl")
    writer = Writer(folder / "train", Summaries(verbosity=verbosity, every_steps=2), model, optimizer, journal)
    for number in range(4):
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        event: Event = Step(
            step=number,
            warmup=False,
            start_t=number,
            end_t=number + 0.5,
            data_wait_s=0.0,
            copy_s=0.0,
            compute_s=0.5,
            optimizer_s=0.0,
            samples=8,
            loss=loss,
        )
        writer.write(event)
        pause = writer.after(number)
        assert (pause is not None) == (number % 2 == 1)
    writer.close()
    journal.close()
    return kept


def test_gradients_of_the_step_that_was_due_are_counted(tmp_path: Path) -> None:
    kept = train(tmp_path, 2)
    histograms = events_in(tmp_path / "train").Histograms("log_gradients")
    assert [event.step for event in histograms] == [2, 4]
    for event, gradients in zip(histograms, kept.gradients[1::2], strict=True):
        values = np.log(np.abs(gradients[gradients != 0]))
        shown = event.histogram_value
        assert shown.num == values.size
        assert shown.sum == pytest.approx(values.sum(), rel=1e-4)
        assert shown.sum_squares == pytest.approx((values**2).sum(), rel=1e-4)
        assert (shown.min, shown.max) == (pytest.approx(values.min()), pytest.approx(values.max()))
        expected, _ = np.histogram(values.astype(np.float32), len(shown.bucket), (shown.min, shown.max))
        assert np.abs(np.array(shown.bucket) - expected).sum() <= 2


@pytest.mark.parametrize(("verbosity", "histograms"), [(1, 0), (2, 1), (3, 5)])
def test_verbosity_says_how_much(tmp_path: Path, verbosity: int, histograms: int) -> None:
    train(tmp_path, verbosity)
    tags = events_in(tmp_path / "train").Tags()
    assert len(tags["scalars"]) == 3
    assert len(tags["histograms"]) == histograms


def test_images_per_s_is_over_the_steps_since_the_last_one(tmp_path: Path) -> None:
    train(tmp_path, 1)
    assert [scalar.value for scalar in events_in(tmp_path / "train").Scalars("images_per_s_rank_0")] == [16.0, 16.0]


def test_a_loss_that_is_no_number_is_written_and_one_that_is_not_known_is_not(tmp_path: Path) -> None:
    train(tmp_path / "nan", 1, loss=math.nan)
    assert math.isnan(events_in(tmp_path / "nan" / "train").Scalars("loss")[0].value)
    train(tmp_path / "none", 1, loss=None)
    assert "loss" not in events_in(tmp_path / "none" / "train").Tags()["scalars"]


def test_equal_values_are_all_counted(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(5)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    journal = JournalWriter(tmp_path / "journal.jsonl")
    writer = Writer(tmp_path / "train", Summaries(verbosity=3, every_steps=1), model, optimizer, journal)
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    assert writer.after(0) is not None
    writer.close()
    histogram = events_in(tmp_path / "train").Histograms("weight")[0].histogram_value
    assert (histogram.min, histogram.max, sum(histogram.bucket)) == (1.0, 1.0, 5)


# Where they go


def test_the_start_time_gets_into_the_name_and_is_no_part_of_the_job() -> None:
    recipe = settings(dir="train_dir/{time}-resnet50")
    stamped = with_start_time(recipe)
    stamp = stamped.summaries.dir.removeprefix("train_dir/").removesuffix("-resnet50")
    assert [len(part) for part in stamp.split("-")] == [4, 2, 2, 2, 2, 2]
    assert stamped.sha256() == recipe.sha256()
    assert with_start_time(stamped) is stamped


def test_a_folder_with_another_runs_events_is_refused(tmp_path: Path) -> None:
    recipe = settings(verbosity=1, dir=str(tmp_path / "train"))
    check_train_dir(recipe)
    assert (tmp_path / "train").is_dir()
    (tmp_path / "train" / "notes.txt").write_text("")
    check_train_dir(recipe)
    (tmp_path / "train" / "events.out.tfevents.1.host").write_bytes(b"")
    with pytest.raises(InputError, match="holds another run's event files"):
        check_train_dir(recipe)
    check_train_dir(settings(verbosity=0, dir=str(tmp_path / "train")))
    check_train_dir(settings(verbosity=1, every_steps=0, dir=str(tmp_path / "train")))


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("")
    for name in ("train", "train/below"):
        with pytest.raises(InputError, match="is a file"):
            check_train_dir(settings(verbosity=1, dir=str(tmp_path / name)))


def test_without_tensorboard_a_run_that_wants_summaries_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentUnfit, match="TensorBoard, which is not installed") as caught:
        check_train_dir(settings(verbosity=1))
    assert caught.value.hint == "pip install 'drawbar[tensorboard]'"
    check_train_dir(settings(verbosity=0))


def test_a_recipe_without_the_section_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("")
    assert not load_recipe(tmp_path / "recipe.toml").summaries.wanted
