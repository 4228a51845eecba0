"""Every error a user can cause, and the exit code each maps to.

    DrawbarError                4  the run failed
    |-- InputError              2  the user's input is wrong: a setting, a path, a URL
    |   `-- RecipeError         2  ... in the recipe; names the key
    |-- EnvironmentUnfit        3  a host, endpoint, permission or library is not as needed
    |-- DataError               4  a shard or record is damaged; names shard and offset
    |-- RunFailed               4  a rank died or a stage broke; names the rank
    |-- ResultInvalid           5  the run ended but its number must not be used
    |-- QualityMissed           6  the run ended and its quality target was not met
    `-- Interrupted           130  Ctrl-C or SIGTERM

Each carries one line that says what was wrong with the value seen, and optionally a hint that says what would be
right. The CLI prints them without a traceback; anything else that escapes is our bug and keeps its traceback.
"""

from __future__ import annotations

from typing import ClassVar


class DrawbarError(Exception):
    exit_code: ClassVar[int] = 4

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class InputError(DrawbarError):
    exit_code = 2


class RecipeError(InputError):
    pass


class EnvironmentUnfit(DrawbarError):
    exit_code = 3


class DataError(DrawbarError):
    exit_code = 4


class RunFailed(DrawbarError):
    exit_code = 4


class ResultInvalid(DrawbarError):
    exit_code = 5


class QualityMissed(DrawbarError):
    exit_code = 6


class Interrupted(DrawbarError):
    exit_code = 130
