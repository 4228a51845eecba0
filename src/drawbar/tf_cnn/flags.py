"""A command line in absl's spelling, taken apart: `--flag=value`, `--flag value`, `--flag`, `--noflag`, `-flag`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from drawbar.errors import InputError

Kind = Literal["bool", "int", "float", "str"]
Value = bool | int | float | str

_TRUE, _FALSE = ("true", "t", "1"), ("false", "f", "0")
_EXPECTED = {"bool": "True or False", "int": "a whole number", "float": "a number"}
_PROGRAM = "tf_cnn_benchmarks.py"


@dataclass(frozen=True, slots=True)
class Given:
    """One flag as it was given."""

    name: str
    value: Value | None
    """None: of a flag that nobody here knows, without a value."""
    text: str
    """As it was spelled."""


def parse(arguments: Sequence[str], kinds: Mapping[str, Kind]) -> list[Given]:
    """In the order given. `kinds` are the flags whose type is known; any other takes the word that follows as its
    value, unless that is a flag too. What stands before `…/tf_cnn_benchmarks.py` (an interpreter, a wrapper) is left
    out.

    Raises InputError for a word that is no flag, for a flag without its value, and for a value of the wrong type.
    """
    words = list(arguments)
    for number, word in enumerate(words):
        if word.rpartition("/")[2] == _PROGRAM:
            words = words[number + 1 :]
            break
    found: list[Given] = []
    while words:
        word = words.pop(0)
        name, equals, text = word.lstrip("-").partition("=")
        if not word.startswith("-") or not name:
            raise InputError(f"{word!r} is no flag", hint="--flag=value, --flag value, --flag or --noflag")
        spelled = word
        value: Value | None
        if equals:
            value = _converted(name, text, kinds.get(name, "str"))
        elif kinds.get(name) == "bool":
            value = True
        elif name.startswith("no") and kinds.get(name[2:]) == "bool":
            name, value = name[2:], False
        elif words and not _looks_like_flag(words[0]):
            text = words.pop(0)
            spelled = f"{word} {text}"
            value = _converted(name, text, kinds.get(name, "str"))
        elif name in kinds:
            raise InputError(f"--{name} has no value")
        else:
            value = None
        found.append(Given(name, value, spelled))
    return found


def _looks_like_flag(word: str) -> bool:
    """`-5` is a value."""
    return word.startswith("-") and word[1:2] not in "0123456789."


def _converted(name: str, text: str, kind: Kind) -> Value:
    try:
        if kind == "bool":
            lowered = text.lower()
            if lowered not in (*_TRUE, *_FALSE):
                raise ValueError
            return lowered in _TRUE
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
    except ValueError:
        raise InputError(f"--{name} is {text!r}: expected {_EXPECTED[kind]}") from None
    return text
