"""What the user's environment says about an S3 store: keys, addresses, TLS, time-outs.

AWS's variables and shared files, as every S3 tool has them, and the ones that TensorFlow's own S3 client reads, so that
a `tf_cnn_benchmarks` command line keeps its meaning. `docs/storage.md` lists them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from drawbar.config import Storage, check_address
from drawbar.errors import EnvironmentUnfit
from drawbar.storage.shared_files import Profile, load_profile

DEFAULT_REGION = "us-east-1"
DEFAULT_CONNECT_TIMEOUT_S = 5.0
DEFAULT_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Credentials:
    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)
    region: str = DEFAULT_REGION

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Credentials:
        """AWS's variables, else the profile's keys in AWS's shared files.

        Raises EnvironmentUnfit where there are none, naming what is missing.
        """
        if environ.get("AWS_ACCESS_KEY_ID") or environ.get("AWS_SECRET_ACCESS_KEY"):
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                if not environ.get(name):
                    raise EnvironmentUnfit(f"no S3 credentials: {name} is not set", hint="set both or neither")
            return cls(
                access_key_id=environ["AWS_ACCESS_KEY_ID"],
                secret_access_key=environ["AWS_SECRET_ACCESS_KEY"],
                session_token=environ.get("AWS_SESSION_TOKEN", ""),
                region=_region(environ) or load_profile(environ).region or DEFAULT_REGION,
            )
        profile = load_profile(environ)
        if not (profile.access_key_id and profile.secret_access_key):
            raise _no_keys(profile)
        return cls(
            access_key_id=profile.access_key_id,
            secret_access_key=profile.secret_access_key,
            session_token=profile.session_token,
            region=_region(environ) or profile.region or DEFAULT_REGION,
        )

    def added_to(self, environ: Mapping[str, str]) -> dict[str, str]:
        """How they reach the ranks: by environment, never on a command line. A token of other keys is taken out."""
        env = dict(environ) | {
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
            "AWS_REGION": self.region,
        }
        env.pop("AWS_SESSION_TOKEN", None)
        return env | ({"AWS_SESSION_TOKEN": self.session_token} if self.session_token else {})


def _no_keys(profile: Profile) -> EnvironmentUnfit:
    if profile.fetched_by:
        return EnvironmentUnfit(
            f"AWS profile {profile.name!r} fetches its keys ({profile.fetched_by}), which Drawbar does not",
            hint=f'eval "$(aws configure export-credentials --profile {profile.name} --format env)"',
        )
    missing = "secret_access_key" if profile.access_key_id else "access_key_id"
    return EnvironmentUnfit(
        f"no S3 credentials: AWS_{missing.upper()} is not set and AWS profile {profile.name!r} has no aws_{missing}",
        hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    )


def _region(environ: Mapping[str, str]) -> str:
    names = ("AWS_REGION", "AWS_DEFAULT_REGION", "S3_REGION")
    return next((environ[name] for name in names if environ.get(name)), "")


def environment_endpoint(environ: Mapping[str, str] = os.environ) -> str:
    """As `named_endpoint`; else the profile's, else AWS's own for the region."""
    if named := named_endpoint(environ):
        return named
    profile = load_profile(environ)
    if profile.endpoint_url:
        return _checked(f"endpoint_url of AWS profile {profile.name}", profile.endpoint_url.rstrip("/"))
    return f"https://s3.{_region(environ) or profile.region or DEFAULT_REGION}.amazonaws.com"


def named_endpoint(environ: Mapping[str, str] = os.environ) -> str:
    """The address that variables name, with its scheme; empty where they name none.

    Raises EnvironmentUnfit for one that is no address, and where AWS's and TensorFlow's variables contradict.
    """
    named: dict[str, str] = {}
    aws = next((name for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if environ.get(name)), "")
    if aws:
        named[aws] = _checked(aws, environ[aws].rstrip("/"))
    if environ.get("S3_ENDPOINT"):
        named["S3_ENDPOINT"] = _checked("S3_ENDPOINT", _with_scheme(environ["S3_ENDPOINT"].rstrip("/"), environ))
    if len(set(named.values())) > 1:
        said = " and ".join(f"{name} says {address}" for name, address in named.items())
        raise EnvironmentUnfit(f"two endpoints: {said}", hint="unset one of them")
    return next(iter(named.values()), "")


def _checked(name: str, address: str) -> str:
    try:
        check_address(address)
    except ValueError as error:
        raise EnvironmentUnfit(f"{name}: {error}") from None
    return address


def _with_scheme(address: str, environ: Mapping[str, str]) -> str:
    """TensorFlow's has none: S3_USE_HTTPS says which."""
    if "://" in address:
        return address
    return f"{'https' if is_on(environ, 'S3_USE_HTTPS') else 'http'}://{address}"


def is_on(environ: Mapping[str, str], name: str) -> bool:
    """As TensorFlow reads them: on, unless the value begins with 0."""
    return not environ.get(name, "").startswith("0")


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How an endpoint is talked to."""

    connect_timeout_s: float
    timeout_s: float
    """Longest silence of an endpoint."""
    verify_tls: bool = True
    ca_files: tuple[str, ...] = ()
    """PEM files of authorities to trust, all of them, beside the system's."""

    @classmethod
    def of(cls, settings: Storage, environ: Mapping[str, str] = os.environ) -> Connection:
        """The recipe's time-outs where it has some, else the environment's. Raises EnvironmentUnfit."""
        connect_s = settings.connect_timeout_s or _seconds(environ, "S3_CONNECT_TIMEOUT_MSEC")
        timeout_s = settings.timeout_s or _seconds(environ, "S3_REQUEST_TIMEOUT_MSEC")
        return cls(
            connect_timeout_s=connect_s or DEFAULT_CONNECT_TIMEOUT_S,
            timeout_s=timeout_s or DEFAULT_TIMEOUT_S,
            verify_tls=is_on(environ, "S3_VERIFY_SSL"),
            ca_files=tuple(environ[name] for name in ("AWS_CA_BUNDLE", "S3_CA_FILE") if environ.get(name)),
        )

    def ca_pem(self) -> str:
        """Raises EnvironmentUnfit where a file cannot be read or holds no certificate."""
        return "\n".join(_certificates(path) for path in self.ca_files)


def _certificates(path: str) -> str:
    hint = "AWS_CA_BUNDLE or S3_CA_FILE names it"
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise EnvironmentUnfit(f"cannot read CA file {path}: {why}", hint=hint) from None
    if "-----BEGIN CERTIFICATE-----" not in text:
        raise EnvironmentUnfit(f"CA file {path} holds no PEM certificate", hint=hint)
    return text


def _seconds(environ: Mapping[str, str], name: str) -> float:
    text = environ.get(name, "")
    if not text:
        return 0.0
    if not text.isascii() or not text.isdigit() or int(text) == 0 or int(text) > 86_400_000:
        raise EnvironmentUnfit(f"{name} is {text!r}: expected milliseconds, 1 to 86400000")
    return int(text) / 1000
