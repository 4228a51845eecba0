"""Variables and shared files as users have them: AWS's, and those of TensorFlow's own S3 client."""

from __future__ import annotations

from pathlib import Path

import pytest

from drawbar.config import Storage
from drawbar.errors import EnvironmentUnfit
from drawbar.storage.environment import Connection, Credentials, environment_endpoint

KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "geheim"}


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """A home with two profiles, and one that fetches its keys."""
    folder = tmp_path / ".aws"
    folder.mkdir()
    (folder / "credentials").write_text(
        "[default]\naws_access_key_id = default-id\naws_secret_access_key = default%secret\n"
        "[lab]\naws_access_key_id=lab-id\naws_secret_access_key=lab-secret\naws_session_token=lab-token\n"
    )
    (folder / "config").write_text(
        "[default]\nregion = eu-west-1\n[profile lab]\nregion = us-gov-1\nendpoint_url = http://lab:9020/\n"
        "s3 =\n    addressing_style = path\n[profile sso]\nsso_session = x\nregion = eu-north-1\n"
    )
    return {"HOME": str(tmp_path)}


def test_keys_come_from_the_variables_first(home: dict[str, str]) -> None:
    found = Credentials.from_environment({**home, **KEYS, "AWS_SESSION_TOKEN": "token", "AWS_REGION": "ap-1"})
    assert (found.access_key_id, found.secret_access_key, found.session_token) == ("id", "geheim", "token")
    assert found.region == "ap-1"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("default-id", "default%secret", "", "eu-west-1")),
        ({"AWS_PROFILE": "lab"}, ("lab-id", "lab-secret", "lab-token", "us-gov-1")),
        ({"AWS_PROFILE": "lab", "AWS_DEFAULT_REGION": "ap-2"}, ("lab-id", "lab-secret", "lab-token", "ap-2")),
        ({"AWS_SESSION_TOKEN": "of other keys"}, ("default-id", "default%secret", "", "eu-west-1")),
    ],
)
def test_then_from_the_shared_files(home: dict[str, str], environ: dict[str, str], expected: tuple[str, ...]) -> None:
    found = Credentials.from_environment({**home, **environ})
    assert (found.access_key_id, found.secret_access_key, found.session_token, found.region) == expected


def test_the_shared_files_may_lie_elsewhere(home: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    found = Credentials.from_environment({**home, "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "keys")})
    assert (found.access_key_id, found.region) == ("a", "eu-west-1")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"AWS_ACCESS_KEY_ID": "id"}, "AWS_SECRET_ACCESS_KEY is not set"),
        ({"AWS_SECRET_ACCESS_KEY": "geheim"}, "AWS_ACCESS_KEY_ID is not set"),
        ({"AWS_PROFILE": "none"}, "no AWS profile 'none' in "),
        ({"AWS_PROFILE": "sso"}, r"profile 'sso' fetches its keys \(sso_session\)"),
        ({"HOME": "/no/such/home"}, "AWS_ACCESS_KEY_ID is not set and AWS profile 'default' has no aws_access_key_id"),
    ],
)
def test_what_is_missing_is_named(home: dict[str, str], environ: dict[str, str], words: str) -> None:
    with pytest.raises(EnvironmentUnfit, match=words) as caught:
        Credentials.from_environment({**home, **environ})
    assert "geheim" not in f"{caught.value} {caught.value.hint}"


def test_a_damaged_file_is_named_without_its_lines(home: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / ".aws" / "credentials").write_text("aws_secret_access_key = geheim\n")
    with pytest.raises(EnvironmentUnfit, match=r"credentials is not in AWS's format") as caught:
        Credentials.from_environment(home)
    assert "geheim" not in str(caught.value)


def test_secrets_do_not_show_and_a_token_of_other_keys_is_taken_out() -> None:
    found = Credentials.from_environment(KEYS)
    assert "geheim" not in repr(found)
    env = found.added_to({"AWS_SESSION_TOKEN": "stale", "PATH": "/bin"})
    assert env == {**KEYS, "AWS_REGION": "us-east-1", "PATH": "/bin"}


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({"AWS_ENDPOINT_URL": "http://a:9020/"}, "http://a:9020"),
        ({"AWS_ENDPOINT_URL": "http://a:9020", "AWS_ENDPOINT_URL_S3": "https://b"}, "https://b"),
        ({"S3_ENDPOINT": "c:9021", "S3_USE_HTTPS": "0"}, "http://c:9021"),
        ({"S3_ENDPOINT": "c:9021", "S3_USE_HTTPS": "00 no"}, "http://c:9021"),
        ({"S3_ENDPOINT": "c:9021", "S3_USE_HTTPS": "1"}, "https://c:9021"),
        ({"S3_ENDPOINT": "c:9021"}, "https://c:9021"),
        ({"S3_ENDPOINT": "http://c:9021"}, "http://c:9021"),
        ({"S3_ENDPOINT": "a:9020", "S3_USE_HTTPS": "0", "AWS_ENDPOINT_URL": "http://a:9020"}, "http://a:9020"),
        ({"AWS_PROFILE": "lab"}, "http://lab:9020"),
        ({"AWS_PROFILE": "lab", "AWS_ENDPOINT_URL": "http://a"}, "http://a"),
        ({}, "https://s3.eu-west-1.amazonaws.com"),
        ({"AWS_REGION": "ap-1"}, "https://s3.ap-1.amazonaws.com"),
    ],
)
def test_the_address_follows_from_the_environment(home: dict[str, str], environ: dict[str, str], address: str) -> None:
    assert environment_endpoint({**home, **environ}) == address


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"AWS_ENDPOINT_URL": "a:9020"}, "AWS_ENDPOINT_URL: 'a:9020' is no address"),
        ({"S3_ENDPOINT": "c:x"}, "S3_ENDPOINT: 'https://c:x' is no address"),
        ({"AWS_ENDPOINT_URL": "http://id:geheim@a"}, "AWS_ENDPOINT_URL: credentials belong in"),
        (
            {"S3_ENDPOINT": "c:1", "AWS_ENDPOINT_URL": "http://a"},
            "two endpoints: AWS_ENDPOINT_URL says http://a and S3",
        ),
    ],
)
def test_a_wrong_address_names_its_variable(home: dict[str, str], environ: dict[str, str], words: str) -> None:
    with pytest.raises(EnvironmentUnfit, match=words) as caught:
        environment_endpoint({**home, **environ})
    assert "geheim" not in str(caught.value)


def test_time_outs_come_from_the_recipe_then_tensorflow_then_the_defaults() -> None:
    tf = {"S3_CONNECT_TIMEOUT_MSEC": "1500", "S3_REQUEST_TIMEOUT_MSEC": "300000"}
    found = [
        Connection.of(Storage(connect_timeout_s=2.0, timeout_s=3.0), tf),
        Connection.of(Storage(), tf),
        Connection.of(Storage(), {}),
    ]
    assert [(one.connect_timeout_s, one.timeout_s) for one in found] == [(2.0, 3.0), (1.5, 300.0), (5.0, 30.0)]


@pytest.mark.parametrize("text", ["0", "-5", "1.5", "soon", "٣", "99999999999"])
def test_a_time_out_that_is_none_is_named(text: str) -> None:
    with pytest.raises(EnvironmentUnfit, match="S3_REQUEST_TIMEOUT_MSEC is "):
        Connection.of(Storage(), {"S3_REQUEST_TIMEOUT_MSEC": text})


def test_certificates_are_checked_unless_tensorflow_is_told_not_to() -> None:
    assert Connection.of(Storage(), {}).verify_tls
    assert Connection.of(Storage(), {"S3_VERIFY_SSL": "1"}).verify_tls
    assert not Connection.of(Storage(), {"S3_VERIFY_SSL": "0"}).verify_tls


def test_a_ca_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("nothing\n")
    for name, words in (("none.pem", "No such file"), ("empty.pem", "holds no PEM certificate")):
        connection = Connection.of(Storage(), {"S3_CA_FILE": str(tmp_path / name)})
        with pytest.raises(EnvironmentUnfit, match=words):
            connection.ca_pem()
