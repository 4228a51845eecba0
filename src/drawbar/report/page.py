"""One self-contained HTML page per run: opens from a folder, offline, and loads nothing.

What came from outside the program (host names, addresses, messages, paths) reaches the page only through jinja2's
escaping or as JSON in a data block that no such text can close. Only the two scripts that this module puts in may run:
the page's own policy names their hashes.
"""

from __future__ import annotations

import base64
import colorsys
import hashlib
import json
import shlex
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

import drawbar
from drawbar.analyze.facts import Facts, load_facts
from drawbar.analyze.result import finite, result_of, write_whole
from drawbar.analyze.schema import Result
from drawbar.report import words
from drawbar.report.input_figures import queues_figure
from drawbar.report.plot import Figure
from drawbar.report.quality_figures import accuracy_figure, loss_over_time_figure
from drawbar.report.step_figures import (
    data_wait_figure,
    loss_figure,
    shares_figure,
    step_time_figure,
    throughput_figure,
)
from drawbar.report.store_figures import bytes_figure, hosts_figure

PAGE_NAME = "report.html"
MAX_METRICS = 4
"""Of one evaluation, drawn."""

# Eight hues that stay apart for most colour-blind readers, in an order that keeps neighbours apart.
LIGHT = ("#2a78d6", "#d9591f", "#16946a", "#b87c00", "#cc4f86", "#2c7a12", "#4a3aa7", "#cf3736")
DARK = ("#5b9bea", "#ea7a48", "#2fb588", "#d6a02c", "#e583ad", "#62b04a", "#9d92ea", "#ee7675")


def write_page(run_dir: Path) -> Path:
    """Writes `report.html` beside the journal it was made from; returns its path."""
    facts = load_facts(run_dir)
    path = run_dir / PAGE_NAME
    write_whole(path, page(facts, result_of(facts)))
    return path


def page(facts: Facts, result: Result) -> str:
    made = figures(facts, result)
    scripts = [script_text(get_plotlyjs()), script_text(read_template("page.js"))]
    templates = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = templates.from_string(read_template("page.html"))
    return template.render(
        result=result,
        recipe=facts.run.recipe.to_toml(),
        figures=made,
        data_blocks={name: data_block({"data": made[name].data, "layout": made[name].layout}) for name in made},
        scripts=scripts,
        policy=content_policy(scripts),
        style=Markup(read_template("page.css")),
        # Metrics take ranks' colours: there must be some even where there is one rank.
        colors=Markup(color_rules(max(len(facts.run.ranks), MAX_METRICS), len(facts.run.hosts))),
        environment=environment_table(result),
        run_dir=shlex.quote(facts.run.path.name or "."),
        words=words,
        drawbar_version=drawbar.__version__,
    )


def figures(facts: Facts, result: Result) -> dict[str, Figure]:
    """By id; a figure that has nothing to show is left out."""
    made = [
        accuracy_figure(facts),
        loss_over_time_figure(facts),
        throughput_figure(facts, result),
        shares_figure(result),
        step_time_figure(facts, result),
        data_wait_figure(facts),
        loss_figure(facts),
        bytes_figure(result),
        queues_figure(facts),
        hosts_figure(facts),
    ]
    return {figure.id: figure for figure in made if figure is not None}


def read_template(name: str) -> str:
    return resources.files("drawbar.report").joinpath("templates", name).read_text(encoding="utf-8")


def data_block(tree: Any) -> Markup:
    """JSON for a <script type="application/json">: no text in it can look like the end of the element."""
    text = json.dumps(finite(tree), separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def script_text(source: str) -> Markup:
    """A script as an element's content. Line ends as the browser will see them when it checks the hash."""
    for token in ("</script", "<!--"):
        source = source.replace(token, token[0] + "\\" + token[1:])
    return Markup(source.replace("\r\n", "\n").replace("\r", "\n"))


def content_policy(scripts: list[Markup]) -> str:
    """Nothing is fetched, nothing but these scripts runs; plotly sets styles and makes images of figures."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def color_rules(num_ranks: int, num_hosts: int) -> str:
    """One colour per rank and per host for light and dark, the same in every figure and table."""
    light, dark = (
        "".join(
            f"--{kind}-{index}:{color};"
            for kind, count in (("rank", num_ranks), ("host", num_hosts))
            for index, color in enumerate(palette(kind, count, base, lightness))
        )
        for base, lightness in ((LIGHT, 0.40), (DARK, 0.64))
    )
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root:not([data-print]){{{dark}}}}}"


def palette(kind: str, count: int, base: tuple[str, ...], lightness: float) -> Iterator[str]:
    if kind == "host" and count == 1:
        yield "var(--ink)"
    elif count <= len(base):
        # Hosts take the same hues from the other end, so that host 0 does not look like rank 0.
        yield from base[:count] if kind == "rank" else base[::-1][:count]
    else:
        for index in range(count):
            rgb = colorsys.hls_to_rgb(0.58 + index / count, lightness, 0.55)
            yield "#" + "".join(f"{round(part * 255):02x}" for part in rgb)


def environment_table(result: Result) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """(nodes, rows of a setting and its value on each), nested settings with dots; one column where nodes are alike."""
    nodes = result["environment"]
    flat = [dict(flatten(environment)) for environment in nodes.values()]
    names = list(nodes)
    if len(flat) > 1 and all(environment == flat[0] for environment in flat):
        names, flat = [f"all {len(nodes)} nodes"], flat[:1]
    settings = dict.fromkeys(setting for values in flat for setting in values)
    return names, [(setting, [values.get(setting, words.UNKNOWN) for values in flat]) for setting in settings]


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", words.UNKNOWN if value in ("", None) else str(value)
