"""What recipes can say: looked up in the recipe's own types, so that a flag is refused by name while it has no key."""

from __future__ import annotations

import typing
from typing import Any

from drawbar.config import Recipe


def has_counterpart(key: str, value: Any) -> bool:
    """Whether recipes have the key and, where it takes one of several words, this one."""
    section, _, name = key.partition(".")
    fields = _keys_of(section)
    if name not in fields:
        return False
    annotation = fields[name].annotation
    return typing.get_origin(annotation) is not typing.Literal or value in typing.get_args(annotation)


def _keys_of(section: str) -> dict[str, Any]:
    field = Recipe.model_fields.get(section)
    return dict(getattr(field.annotation, "model_fields", {})) if field else {}
