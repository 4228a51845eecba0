"""URLs mean what they say, letter by letter."""

from __future__ import annotations

import pytest

from drawbar.storage.urls import Location, Scheme, parse_url


@pytest.mark.parametrize(
    ("url", "scheme", "bucket", "path"),
    [
        ("s3://bucket/train", "s3", "bucket", "train"),
        ("s3://bucket/a/b/", "s3", "bucket", "a/b"),
        ("s3://bucket", "s3", "bucket", ""),
        ("s3://bucket/tr#ain?x;y", "s3", "bucket", "tr#ain?x;y"),
        ("gs://bucket/train", "gs", "bucket", "train"),
        ("az://container/train", "az", "container", "train"),
        ("/data/set#1", "file", "", "/data/set#1"),
        ("data?", "file", "", "data?"),
        ("file:///data/set", "file", "", "/data/set"),
    ],
)
def test_nothing_is_cut_off(url: str, scheme: Scheme, bucket: str, path: str) -> None:
    assert parse_url(url) == Location(scheme=scheme, bucket=bucket, path=path)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "empty"),
        ("ftp://bucket/x", "expected s3://bucket/prefix or a folder"),
        ("s3:///x", "expected s3://bucket/prefix or a folder"),
        ("file://host/x", "expected s3://bucket/prefix or a folder"),
        ("s3://bucket/../x", "no empty part"),
        ("s3://bucket/a//b", "no empty part"),
        ("/data/new\nline", "control character"),
    ],
)
def test_what_is_no_place_is_refused(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_url(url)


def test_a_secret_in_the_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="credentials belong in") as caught:
        parse_url("s3://key:geheim@bucket/x")
    assert "geheim" not in str(caught.value)
