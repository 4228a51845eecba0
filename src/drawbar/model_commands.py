"""`drawbar models`: what each model costs, row by row as it is counted."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from drawbar.errors import InputError
from drawbar.models.names import MODEL_NAMES, find_model
from drawbar.terminal import write_line

if TYPE_CHECKING:
    from drawbar.models.figures import ModelFigures

_HEADINGS = ("model", "pixels", "parameters", "forward", "with backward", "fp32", "fp16", "network")
_CONVENTION = (
    "forward, with backward: GFLOP per image, a multiplication and an addition counted as two; "
    "fp32, fp16: MB of gradients per rank and step"
)


def complete_name(incomplete: str) -> list[str]:
    return [name for name in MODEL_NAMES if name.startswith(incomplete)]


def show(names: Sequence[str], json_out: bool) -> None:
    """Raises InputError for a name that nobody knows, before anything is counted."""
    for name in names:
        try:
            find_model(name)
        except ValueError as error:
            raise InputError(str(error)) from None
    counted = _figures(names or MODEL_NAMES)
    if json_out:
        write_line(json.dumps([dataclasses.asdict(figures) for figures in counted], indent=2), sys.stdout)
        return
    for line in lines(counted, max(len(name) for name in names or MODEL_NAMES)):
        write_line(line, sys.stdout)


def lines(counted: Iterator[ModelFigures], name_width: int) -> Iterator[str]:
    """The table, each line as soon as its model is counted."""
    name_width = max(name_width, len(_HEADINGS[0]))
    layout = f"{{:{name_width}}}  {{:>6}}  {{:>11}}  {{:>7}}  {{:>13}}  {{:>6}}  {{:>6}}  {{}}"
    yield layout.format(*_HEADINGS)
    for figures in counted:
        yield layout.format(
            figures.name,
            figures.image_size,
            f"{figures.parameters:,}",
            f"{figures.forward_flops / 1e9:.2f}",
            f"{figures.forward_backward_flops / 1e9:.2f}",
            f"{figures.gradient_bytes_fp32 / 1e6:.1f}",
            f"{figures.gradient_bytes_fp16 / 1e6:.1f}",
            "; ".join(filter(None, [figures.library, figures.note])),
        )
    yield ""
    yield _CONVENTION


def _figures(names: Sequence[str]) -> Iterator[ModelFigures]:
    # Not at the top: it takes seconds, and a wrong name should be refused at once.
    from drawbar.models.figures import figures_of

    return (figures_of(name) for name in names)
