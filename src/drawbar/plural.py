"""Counts with their nouns, for every sentence that a person reads."""

from __future__ import annotations


def plural(count: int, noun: str, nouns: str = "") -> str:
    """`1 shard`, `2,048 shards`; `nouns` is for a noun that takes more than an s."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"
