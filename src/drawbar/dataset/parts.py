"""What a packing has done so far, kept under `_parts` at the destination until the manifest is written.

`_parts/set.json` says which set is being packed and is there before its first shard; `_parts/SHARD.json` says that the
shard is complete, and what the manifest will say of it. So a packing that was killed goes on, and ranks that share no
memory know of each other's work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from drawbar.dataset.destination import Destination
from drawbar.dataset.manifest import CLAIM_NAME, PARTS, BadFile, ShardEntry, bad_file, digest_of, shard_entry
from drawbar.errors import DataError

_READERS = 8


@dataclass(frozen=True, kw_only=True)
class PackedShard:
    """One shard as written."""

    entry: ShardEntry
    label_counts: Mapping[int, int]
    bad: tuple[BadFile, ...]
    on_bad: str
    """The policy that it was packed under; means nothing while `bad` is empty."""
    set_sha256: str

    def dumps(self) -> bytes:
        tree = asdict(self) | {"label_counts": [list(item) for item in sorted(self.label_counts.items())]}
        return json.dumps(tree | {"sha256": digest_of(tree)}, separators=(",", ":")).encode()

    @classmethod
    def loads(cls, text: bytes) -> PackedShard:
        """Raises DataError for what is no entry."""
        try:
            tree = json.loads(text)
            if tree["sha256"] != digest_of(tree):
                raise ValueError("its sha256 is not that of its content")
            return cls(
                entry=shard_entry(tree["entry"]),
                label_counts={int(label): int(count) for label, count in tree["label_counts"]},
                bad=tuple(bad_file(item) for item in tree["bad"]),
                on_bad=str(tree["on_bad"]),
                set_sha256=str(tree["set_sha256"]),
            )
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise DataError(f"no entry of a shard: {error}") from None

    def fits(self, set_sha256: str, on_bad: str, size_bytes: int | None) -> bool:
        """Whether packing the shard anew would give the same."""
        same_policy = self.on_bad == on_bad or all(item.action == "kept" for item in self.bad)
        return self.set_sha256 == set_sha256 and same_policy and self.entry.size_bytes == size_bytes


def part_name(shard: str) -> str:
    return f"{PARTS}/{shard}.json"


def claim(dest: Destination, description: Mapping[str, Any]) -> None:
    """Says whose shards will be here; `description` has `set_sha256` and what a person wants to know."""
    dest.put(f"{PARTS}/{CLAIM_NAME}", json.dumps(dict(description), indent=1).encode())


def claimed(dest: Destination) -> Mapping[str, Any] | None:
    """What `claim` wrote, `{}` where it is damaged, None where nothing is."""
    if CLAIM_NAME not in dest.sizes(PARTS):
        return None
    try:
        tree = json.loads(dest.get(f"{PARTS}/{CLAIM_NAME}"))
    except (RecursionError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def finished(
    dest: Destination, shards: Sequence[str], set_sha256: str, on_bad: str, *, look_inside: bool = False
) -> dict[str, PackedShard]:
    """Of these shards, those that need no packing any more. `look_inside` also reads those whose destination does not
    vouch for their content: files, of which a power failure leaves the size and not always the bytes."""
    # Entries first: a shard listed after its entry is the one that the entry tells of.
    there = dest.sizes(PARTS)
    sizes = dest.sizes()
    wanted = [name for name in shards if f"{name}.json" in there and name in sizes]
    with ThreadPoolExecutor(_READERS) as pool:
        texts = pool.map(lambda name: dest.get(part_name(name)), wanted)
        found = {}
        for name, text in zip(wanted, texts, strict=True):
            try:
                packed = PackedShard.loads(text)
            except DataError:
                continue
            if packed.entry.name != name or not packed.fits(set_sha256, on_bad, sizes.get(name)):
                continue
            if not look_inside or dest.holds(name, packed.entry.crc32c):
                found[name] = packed
    return found


def clear(dest: Destination) -> None:
    """Removes all of `_parts`; the claim last, as without it the shards would belong to nobody."""
    names = sorted(dest.sizes(PARTS), key=lambda name: (name == CLAIM_NAME, name))
    for name in names:
        dest.delete(f"{PARTS}/{name}")
