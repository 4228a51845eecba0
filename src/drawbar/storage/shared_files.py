"""AWS's shared files: the profile's keys, region and endpoint, from `~/.aws/credentials` and `~/.aws/config`.

Only keys that stand there are taken. Profiles that fetch them (single sign-on, roles, a credential process) are named
as such, with the command that turns them into variables.
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from drawbar.errors import EnvironmentUnfit

_FETCHED = ("sso_session", "sso_start_url", "role_arn", "credential_process", "web_identity_token_file")


@dataclass(frozen=True, kw_only=True)
class Profile:
    name: str
    access_key_id: str = ""
    secret_access_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    region: str = ""
    endpoint_url: str = ""
    fetched_by: str = ""
    """The setting that says where else keys come from; empty where they stand in the files or nowhere."""


def load_profile(environ: Mapping[str, str]) -> Profile:
    """The profile that AWS_PROFILE names, else `default`, which may be nowhere.

    Raises EnvironmentUnfit where the named one is in neither file, or a file cannot be read.
    """
    name = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE") or "default"
    config = _path(environ, "AWS_CONFIG_FILE", "config")
    credentials = _path(environ, "AWS_SHARED_CREDENTIALS_FILE", "credentials")
    # In the config file all but the default have a prefix; the credentials file wins where both have a value.
    in_config = "default" if name == "default" else f"profile {name}"
    found = [_section(config, in_config), _section(credentials, name)]
    if name != "default" and not any(found):
        raise EnvironmentUnfit(f"no AWS profile {name!r} in {credentials} or {config}", hint="AWS_PROFILE names it")
    values = {key: value for section in found for key, value in section.items() if value}
    return Profile(
        name=name,
        access_key_id=values.get("aws_access_key_id", ""),
        secret_access_key=values.get("aws_secret_access_key", ""),
        session_token=values.get("aws_session_token", ""),
        region=values.get("region", ""),
        endpoint_url=values.get("endpoint_url", ""),
        fetched_by=next((key for key in _FETCHED if key in values), ""),
    )


def _path(environ: Mapping[str, str], variable: str, name: str) -> Path:
    if environ.get(variable):
        return Path(environ[variable]).expanduser()
    home = environ.get("HOME")
    return (Path(home) if home else Path.home()) / ".aws" / name


def _section(path: Path, name: str) -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=False, default_section="")
    try:
        parser.read_string(path.read_text(), source=str(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise EnvironmentUnfit(f"cannot read {path}: {error.strerror}") from None
    except (configparser.Error, UnicodeDecodeError):
        # The parser's own words repeat the line, which may be a secret.
        raise EnvironmentUnfit(f"{path} is not in AWS's format", hint="[profile name], then key = value") from None
    return dict(parser.items(name)) if parser.has_section(name) else {}
