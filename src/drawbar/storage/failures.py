"""What went wrong with a request, told apart as far as obstore lets us: by the exception's type, then by its words."""

from __future__ import annotations

import re
from typing import Literal

from obstore.exceptions import PermissionDeniedError, PreconditionError, UnauthenticatedError

from drawbar.errors import DataError, DrawbarError, EnvironmentUnfit, InputError, RunFailed

Kind = Literal["missing", "refused", "expired", "replaced", "untrusted", "unreachable", "silent", "busy", "broken"]
"""`missing` to `untrusted` (its certificate) do not pass by themselves and are never tried again. `unreachable`: no
connection (refused, no route, the name does not resolve). `silent`: connected, no answer in time. `busy`: the store
asks for less (503 SlowDown, 429). `broken`: everything else, such as a body cut short."""

PERMANENT: frozenset[Kind] = frozenset(("missing", "refused", "expired", "replaced", "untrusted"))

_STATUS = re.compile(r"status code: (\d{3})")
"""obstore gives the HTTP status of an error only in its words."""
_EXPIRED = re.compile(r"<Code>(ExpiredToken|TokenRefreshRequired|RequestExpired)</Code>")
_SKEWED = "RequestTimeTooSkewed"


class ShortBody(Exception):
    """The server closed the body early, or sent another range than asked, without an HTTP error."""


class Replaced(Exception):
    """The object is not the version that was listed, and the store answered all the same."""


def status_of(error: Exception) -> int:
    """The HTTP status of a refused request; 0 where there was none."""
    status = _STATUS.search(str(error))
    return int(status.group(1)) if status else 0


def kind_of(error: Exception) -> Kind:
    text, status = str(error), status_of(error)
    if isinstance(error, FileNotFoundError) or status == 404:
        return "missing"
    if _EXPIRED.search(text):  # S3 says 400, STS and others 403
        return "expired"
    if isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError) or status in (401, 403):
        return "refused"
    if isinstance(error, PreconditionError | Replaced) or status == 412:
        return "replaced"
    if status in (429, 503):
        return "busy"
    if "InvalidCertificate" in text:
        return "untrusted"
    if "kind: Connect" in text or "error trying to connect" in text:
        return "unreachable"
    if "kind: Timeout" in text or "operation timed out" in text:
        return "silent"
    return "broken"


def explain(error: Exception, where: str) -> DrawbarError:
    """A store's exception in one line. `where` names object and endpoint."""
    text = str(error).strip() or type(error).__name__
    match kind_of(error):
        case "missing":
            what = "bucket" if "NoSuchBucket" in text else "object or bucket"
            return InputError(f"no such {what}: {where}")
        case "expired":
            return EnvironmentUnfit(f"credentials have expired: {where}", hint="get new ones that outlast the run")
        case "refused" if _SKEWED in text:
            return EnvironmentUnfit(f"access refused, as this host's clock is off: {where}", hint="set the clock")
        case "refused":
            return EnvironmentUnfit(
                f"access refused: {where}",
                hint="check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the bucket's policy",
            )
        case "replaced":
            return DataError(f"object was replaced during the run: {where}")
        case "unreachable":
            why = " (its name does not resolve)" if "dns error" in text else ""
            return EnvironmentUnfit(
                f"endpoint does not answer{why}: {where}",
                hint="is the store up (`drawbar s3 status`), the address right?",
            )
        case "silent":
            return EnvironmentUnfit(f"endpoint accepted but did not answer in time: {where}")
        case "busy":
            return RunFailed(f"the store stayed too busy ({status_of(error)}): {where}")
        case "untrusted":
            return EnvironmentUnfit(
                f"the endpoint's certificate is not trusted: {where}", hint="set AWS_CA_BUNDLE or S3_CA_FILE to its CA"
            )
        case "broken":
            return RunFailed(f"read failed: {where}: {text.splitlines()[0][:300]}")
