"""Where data lies, taken apart: `s3://bucket/prefix`, or a folder.

Not `urllib.parse`: in a folder or a key `#`, `?` and `;` are letters like any other.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Location:
    bucket: str
    """Empty for a folder."""
    path: str
    """Key prefix without slashes at its ends, or the folder."""

    @property
    def on_s3(self) -> bool:
        return bool(self.bucket)

    @property
    def folder(self) -> Path:
        return Path(self.path)


def parse_url(url: str) -> Location:
    """Raises ValueError that says what would be right."""
    if any(unicodedata.category(letter) == "Cc" for letter in url):
        raise ValueError(f"{url!r} holds a control character")
    scheme, mark, rest = url.partition("://")
    if not mark:
        if not url:
            raise ValueError("empty: expected s3://bucket/prefix or a folder")
        return Location(bucket="", path=url)
    if scheme == "file" and rest.startswith("/"):
        return Location(bucket="", path=rest)
    bucket, _, prefix = rest.partition("/")
    if scheme != "s3" or not bucket:
        raise ValueError(f"{url!r}: expected s3://bucket/prefix or a folder")
    if "@" in bucket or ":" in bucket:
        raise ValueError(
            f"{bucket.rpartition('@')[2]!r} after s3:// is no bucket: credentials belong in AWS_ACCESS_KEY_ID"
        )
    prefix = prefix.strip("/")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise ValueError(f"{url!r}: a prefix has no empty part, '.' or '..'")
    return Location(bucket=bucket, path=prefix)
