"""Text and page: their structure, that outside strings stay strings, and that the page works in a browser, offline."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from drawbar.analyze.facts import load_facts
from drawbar.analyze.result import result_of
from drawbar.config import Recipe
from drawbar.journal import Cache, Error, Event, InputTotals, Request, RunEnd, RunStart, Step, Witness
from drawbar.report.page import page, write_page
from drawbar.report.plot import MAX_POINTS
from drawbar.report.step_figures import throughput_figure
from drawbar.report.terminal import RULE, WIDTH, StepPrinter, run_text, step_lines, summary_text
from tests.quality_run import quality_run
from tests.synthetic_run import SyntheticRun, synthetic_run, with_changes

FIGURES = {"throughput", "shares", "step-time", "data-wait", "loss", "bytes", "queues", "hosts"}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{7*7}}"


def text_of(run: SyntheticRun, tmp_path: Path) -> str:
    facts = load_facts(run.write(tmp_path / "run"))
    return run_text(facts, result_of(facts))


# --- terminal ---------------------------------------------------------------------------------------------------


def test_step_lines_have_tf_cnn_benchmarks_form(tmp_path: Path) -> None:
    lines = text_of(synthetic_run(ranks=2, steps=24, step_s=0.25), tmp_path).splitlines()
    assert lines[:4] == [
        "Step\tImg/sec\ttotal_loss",
        "1\timages/sec: 64.0 +/- 0.0 (jitter = 0.0)\t6.970",
        "10\timages/sec: 64.0 +/- 0.0 (jitter = 0.0)\t6.880",
        "20\timages/sec: 64.0 +/- 0.0 (jitter = 0.0)\t6.780",
    ]
    assert lines[4:7] == [RULE, "total images/sec: 64.00", RULE]
    assert len(RULE) == 64


def test_golden_structure_of_the_summary(tmp_path: Path) -> None:
    text = text_of(synthetic_run(ranks=2), tmp_path)
    heads = [block.splitlines()[0] for block in text.strip().split("\n\n")]
    assert heads[1:] == [
        "Ranks (step time, data wait, bytes received)",
        "Endpoints (MB received and served; median latency)",
        "Input (share of each stage's time; how full the queue behind it is)",
        "data wait: 20.0 % of the step time, AU 78.0 %; bottleneck undecided (no ceilings",
        "validity: valid",
        "This many images per second were read, decoded and trained by all ranks",
    ]
    assert "cache: wanted cold, shown cold; 10" in text
    assert "49.7 MB received = 49.7 MB trained + 0.0 MB discarded" in " ".join(text.split())


def test_text_fits_80_columns_and_has_no_escapes(tmp_path: Path) -> None:
    run = synthetic_run(ranks=12, endpoints=5)
    for rank in run.ranks:
        run.change(rank, RunStart, lambda start: with_changes(start, node="a-very-long-host-name.example.com"))
    run.change(3, Request, lambda event: with_changes(event, error="x", got_bytes=0))
    text = text_of(run, tmp_path)
    assert "\x1b" not in text
    assert [line for line in text.splitlines() if len(line.expandtabs()) > WIDTH] == []
    rows = [line for line in text.splitlines() if re.match(r" *\d+  a-", line)]
    assert len(rows) == 12
    assert len({line.index("  ok") for line in rows}) == 1, "columns line up"


def test_control_characters_from_outside_are_shown_not_obeyed(tmp_path: Path) -> None:
    run = synthetic_run()
    run.change(0, RunStart, lambda start: with_changes(start, node="n\x1b[2J"))
    end(run, 0, message="line one\nline \x1b[31mtwo\x07")
    text = text_of(run, tmp_path)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\\x1b[31mtwo" in text


def end(run: SyntheticRun, rank: int, *, message: str, after_step: int = 9) -> None:
    run.kill(rank, after_step=after_step)
    error = Error(type="DataError", message=message, hint="look at it", exit_code=4, phase="step 10")
    run.ranks[rank] += [error, RunEnd(status="failed", unix_s=0)]


def test_a_failed_run_leads_with_its_cause_and_shows_no_total(tmp_path: Path) -> None:
    run = synthetic_run()
    end(run, 1, message="train-00001: bad CRC at 17")
    text = text_of(run, tmp_path)
    assert text.startswith(
        f"{RULE}\nThe run failed\n{RULE}\nDataError of rank 1 on n1 in step 10: train-00001: bad CRC"
    )
    assert "hint: look at it" in text
    assert "total images/sec" not in text
    assert "validity: invalid" in text


def test_text_without_a_measured_step(tmp_path: Path) -> None:
    run = synthetic_run()
    for rank in run.ranks:
        run.drop(rank, Step, Request, InputTotals)
    assert "total images/sec: -" in text_of(run, tmp_path)
    run.ranks, run.hosts = {}, {}
    assert "no rank wrote a journal" in text_of(run, tmp_path / "b")


def test_many_ranks_show_those_that_waited_most(tmp_path: Path) -> None:
    run = synthetic_run(ranks=40, steps=3, ranks_per_node=8)
    run.change(37, Step, lambda step: with_changes(step, data_wait_s=step.data_wait_s * 2))
    text = text_of(run, tmp_path)
    assert "… and 8 ranks that waited less" in text
    assert re.search(r"^  37  n5", text, re.MULTILINE)


def test_printer_gives_the_lines_that_analysis_gives(tmp_path: Path) -> None:
    run = synthetic_run(ranks=3, steps=30, noise=0.2, skew_s=[0, 0.05, 0.01], offset_s=[0, 99.5, -7.25])
    facts = load_facts(run.write(tmp_path))
    for order in (by_rank(run), by_turns(run)):
        printer = StepPrinter(world_size=3, warmup_steps=3, steps=30, display_every=10)
        assert printer.feed_all(order) == step_lines(facts.steps, 10)
        assert printer.steps_done == 30


def by_rank(run: SyntheticRun) -> list[tuple[int, Event]]:
    return [(rank, event) for rank, events in run.ranks.items() for event in events]


def by_turns(run: SyntheticRun) -> list[tuple[int, Event]]:
    longest = max(len(events) for events in run.ranks.values())
    return [
        (rank, events[i]) for i in range(longest) for rank, events in reversed(run.ranks.items()) if i < len(events)
    ]


def test_printer_waits_for_the_last_rank_and_reports_progress() -> None:
    run = synthetic_run(ranks=2, steps=20)
    printer = StepPrinter(world_size=2, warmup_steps=3, steps=20, display_every=10)
    assert printer.progress() == "warm-up 0/3"
    assert printer.feed_all((0, event) for event in run.ranks[0]) == []
    assert printer.steps_done == 0
    shown = []
    for event in run.ranks[1]:
        shown += printer.feed(1, event)
        if isinstance(event, Step) and event.step == 7:
            assert printer.progress() == "step 5/20  32.0 images/s  data wait 20 %  0:08 left"
    assert [line.split("\t")[0] for line in shown] == ["Step", "1", "10", "20"]


# --- page -------------------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """Start tags with attributes, and the content of scripts by their index."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


def page_of(run: SyntheticRun, tmp_path: Path) -> str:
    facts = load_facts(run.write(tmp_path / "run"))
    return page(facts, result_of(facts))


def without_plotly(text: str) -> str:
    """plotly.js has words of its own that look like addresses and tags."""
    start = text.index("<script>\n") if "<script>\n" in text else text.index("<script>")
    return text[:start] + text[text.rindex("<script>") :]


def test_page_is_one_file_under_8_mb_that_loads_nothing(tmp_path: Path) -> None:
    text = page_of(synthetic_run(ranks=4, noise=0.1), tmp_path)
    assert len(text.encode()) < 8_000_000
    elements = Elements(text)
    assert not [attrs for tag, attrs in elements.tags if tag in ("script", "img", "iframe") and attrs.get("src")]
    assert [attrs["href"] for tag, attrs in elements.tags if tag == "link"] == ["data:,"]
    assert "url(" not in without_plotly(text)
    policy = next(attrs["content"] for tag, attrs in elements.tags if attrs.get("http-equiv"))
    assert "default-src 'none'" in (policy or "")


def test_page_holds_answer_tables_and_recipe(tmp_path: Path) -> None:
    text = page_of(synthetic_run(ranks=2), tmp_path)
    for part in (
        "<h1>32.0 <small>images/s</small></h1>",
        "The result is valid: every check passed.",
        "http://10.0.0.2:8333",
        "102 % read from disk",
        "display_every = 10",
        "AMD EPYC 9654",
        "cd run; drawbar run recipe.toml --out ../again",
    ):
        assert part in text, part
    levels = [int(tag[1]) for tag, _ in Elements(text).tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_every_figure_has_words_for_those_who_do_not_see_it(tmp_path: Path) -> None:
    plots = [attrs for _, attrs in Elements(page_of(synthetic_run(), tmp_path)).tags if attrs.get("class") == "plot"]
    assert {str(attrs["id"]) for attrs in plots} == {f"figure-{name}" for name in FIGURES}
    assert all(attrs["role"] == "img" and len(str(attrs["aria-label"])) > 40 for attrs in plots)


def hostile_run() -> SyntheticRun:
    """Hostile text in every place where text from outside is kept."""
    run = synthetic_run()
    for rank in run.ranks:
        run.change(
            rank,
            RunStart,
            lambda start: with_changes(
                start, node=HOSTILE, endpoint=HOSTILE, dataset_sha256=HOSTILE, environment={HOSTILE: HOSTILE}
            ),
        )
        run.change(rank, Request, lambda event: with_changes(event, endpoint=HOSTILE, key=HOSTILE, error=HOSTILE))
    run.hosts = {"n1": [with_changes(event, node=HOSTILE) for event in run.hosts["n1"]]}
    run.recipe = run.recipe.model_copy(update={"data": run.recipe.data.model_copy(update={"url": f"/data/{HOSTILE}"})})
    end(run, 0, message=HOSTILE)
    return run


def test_outside_text_cannot_become_markup(tmp_path: Path) -> None:
    text = page_of(hostile_run(), tmp_path)
    elements = Elements(text)
    assert [attrs for tag, attrs in elements.tags if tag == "img"] == []
    assert not [name for _, attrs in elements.tags for name in attrs if name.startswith("on")]
    blocks = [attrs for tag, attrs in elements.tags if tag == "script"]
    assert [attrs.get("type") for attrs in blocks] == ["application/json"] * len(FIGURES) + [None, None]
    for attrs, content in zip(blocks, elements.scripts, strict=True):
        if attrs.get("type"):
            assert set(json.loads(content)) == {"data", "layout"}
    assert "49" not in re.findall(r"&amp;\{\{?(\d+)", text)
    assert "{{7*7}}" in text


def test_a_recipe_name_cannot_carry_markup() -> None:
    with pytest.raises(ValueError, match="pattern"):
        Recipe.model_validate({"name": HOSTILE})


def test_page_of_a_failed_run_leads_with_what_happened(tmp_path: Path) -> None:
    run = synthetic_run()
    end(run, 1, message="bad CRC")
    text = page_of(run, tmp_path)
    assert "<h1>The run failed</h1>" in text
    assert text.index("bad CRC") < text.index("Until then 2 ranks")
    assert "Why it is invalid" in text


def test_half_a_surrogate_pair_can_be_written(tmp_path: Path) -> None:
    run = synthetic_run()
    run.change(0, RunStart, lambda start: with_changes(start, node="n\ud800"))
    assert "n\\ud800" in write_page(run.write(tmp_path)).read_text()


def test_bytes_read_again_and_a_doubt_about_the_cache_are_said(tmp_path: Path) -> None:
    run = synthetic_run(overrides={"data": {"url": "/data/imagenet"}})
    run.change(1, Request, lambda event: with_changes(event, key="train/train-00000-of-01024"))
    run.change_launcher(Witness, lambda event: None)
    run.change_launcher(Cache, lambda cache: with_changes(cache, note="not a local disk: nfs4"))
    text = " ".join(text_of(run, tmp_path).split())
    assert "wanted cold, not shown cold; 0.0 % of the data in the page cache at the start; 50.0 % of the data" in text
    assert "not a local disk: nfs4" in text
    assert "server cache unknown" not in text


def test_page_without_any_rank(tmp_path: Path) -> None:
    run = synthetic_run()
    run.ranks, run.hosts = {}, {}
    assert "no rank wrote a journal" in page_of(run, tmp_path)


def test_a_long_runs_lines_are_reduced_and_keep_their_mean(tmp_path: Path) -> None:
    facts = load_facts(synthetic_run(ranks=2, steps=2000, step_s=0.1, noise=0.2).write(tmp_path))
    figure = throughput_figure(facts, result_of(facts))
    assert figure is not None
    assert max(len(trace["x"]) for trace in figure.data) <= MAX_POINTS + 3
    total = next(trace for trace in figure.data if trace.get("showlegend") and trace["name"] == "all ranks")
    assert sum(total["y"]) / len(total["y"]) == pytest.approx(result_of(facts)["images_per_s"]["mean"], rel=0.01)
    assert "mean of neighbouring steps" in figure.caption


@pytest.mark.long
def test_a_large_runs_page_is_made_in_time(tmp_path: Path) -> None:
    run_dir = synthetic_run(ranks=16, steps=10_000, noise=0.1).write(tmp_path)
    start_s = time.process_time()
    path = write_page(run_dir)
    assert time.process_time() - start_s < 20
    assert path.stat().st_size < 8_000_000


# --- in a browser -----------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def browsed(path: Path, profile: Path) -> tuple[str, list[str]]:
    """(the page's elements once its scripts ran, lines of its console)."""
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        f"--user-data-dir={profile}",
        "--virtual-time-budget=10000",
        "--enable-logging=stderr",
        "--dump-dom",
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("make", [lambda: synthetic_run(ranks=3, noise=0.1), hostile_run, quality_run])
def test_the_page_draws_every_figure_from_a_folder(tmp_path: Path, make: object) -> None:
    assert callable(make)
    run: SyntheticRun = make()
    expected = {f"figure-{name}" for name in (*FIGURES, *(["accuracy", "loss"] if run.recipe.data.eval_url else []))}
    dom, console = browsed(write_page(run.write(tmp_path / "run")), tmp_path / "profile")
    assert console == []
    assert dom.count("js-plotly-plot") >= len(expected)
    drawn = [attrs for tag, attrs in Elements(dom).tags if "js-plotly-plot" in (attrs.get("class") or "")]
    assert {str(attrs["id"]) for attrs in drawn} == expected
    assert dom.count('class="main-svg"') >= len(expected)
    assert "var(--" not in dom[dom.index('class="main-svg"') :].split("<script", 1)[0]
    assert not [attrs for tag, attrs in Elements(dom).tags if tag == "img" and "onerror" in attrs]


def test_summary_alone_has_no_step_lines(tmp_path: Path) -> None:
    facts = load_facts(synthetic_run().write(tmp_path))
    assert "total_loss" not in summary_text(result_of(facts))
