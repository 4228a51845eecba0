"""Where data lies, taken apart: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, or a folder.

Not `urllib.parse`: in a folder or a key `#`, `?` and `;` are letters like any other.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Scheme = Literal["file", "s3", "gs", "az"]
_EXPECTED = "expected s3://bucket/prefix or a folder (gs:// and az:// can be read too)"


@dataclass(frozen=True, kw_only=True)
class Location:
    scheme: Scheme
    bucket: str
    """Azure calls it container. Empty for a folder."""
    path: str
    """Key prefix without slashes at its ends, or the folder."""

    @property
    def on_s3(self) -> bool:
        return self.scheme == "s3"

    @property
    def is_folder(self) -> bool:
        return self.scheme == "file"

    @property
    def folder(self) -> Path:
        return Path(self.path)


_SCHEMES: dict[str, Scheme] = {"s3": "s3", "gs": "gs", "az": "az"}


def parse_url(url: str) -> Location:
    """Raises ValueError that says what would be right."""
    if any(unicodedata.category(letter) == "Cc" for letter in url):
        raise ValueError(f"{url!r} holds a control character")
    scheme, mark, rest = url.partition("://")
    if not mark:
        if not url:
            raise ValueError("empty: expected s3://bucket/prefix or a folder")
        return Location(scheme="file", bucket="", path=url)
    if scheme == "file" and rest.startswith("/"):
        return Location(scheme="file", bucket="", path=rest)
    bucket, _, prefix = rest.partition("/")
    if scheme not in _SCHEMES or not bucket:
        raise ValueError(f"{url!r}: {_EXPECTED}")
    if "@" in bucket or ":" in bucket:
        raise ValueError(
            f"{bucket.rpartition('@')[2]!r} after {scheme}:// is no bucket: credentials belong in the environment, "
            "such as AWS_ACCESS_KEY_ID"
        )
    prefix = prefix.strip("/")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise ValueError(f"{url!r}: a prefix has no empty part, '.' or '..'")
    return Location(scheme=_SCHEMES[scheme], bucket=bucket, path=prefix)
