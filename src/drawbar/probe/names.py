"""The stages that can run alone. Apart from `alone`, which needs torch."""

from __future__ import annotations

from typing import Literal, get_args

StageName = Literal["read", "crc", "decode", "batch", "copy"]
STAGE_NAMES: tuple[StageName, ...] = get_args(StageName)
