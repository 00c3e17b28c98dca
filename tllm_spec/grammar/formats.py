"""The formats of JSON schemas as regular expressions for the whole text."""

from __future__ import annotations

from collections.abc import Mapping

_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])"
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY_OF_MONTH = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY_OF_MONTH}|{_LEAP_YEAR}-02-29)"
_HOUR = r"(?:[01]\d|2[0-3])"
_TIME = rf"{_HOUR}:[0-5]\d:[0-5]\d(?:\.\d{{1,9}})?(?:Z|[+-]{_HOUR}:[0-5]\d)"
_CLOCK = r"T(?:\d{1,6}H(?:\d{1,6}M(?:\d{1,6}S)?)?|\d{1,6}M(?:\d{1,6}S)?|\d{1,6}S)"
_DAYS = r"(?:\d{1,6}Y(?:\d{1,6}M(?:\d{1,6}D)?)?|\d{1,6}M(?:\d{1,6}D)?|\d{1,6}D)"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_NAME = "[A-Za-z0-9](?:[.-]?[A-Za-z0-9])*"  # of a host, without rare forms
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_HEX = "[0-9A-Fa-f]"
_IPV6 = "|".join(
    [
        f"(?:{_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}",
        f"(?:{_HEX}{{1,4}}:){{1,7}}:",
        *(f"(?:{_HEX}{{1,4}}:){{1,{7 - n}}}(?::{_HEX}{{1,4}}){{1,{n}}}" for n in range(1, 7)),
        f":(?::{_HEX}{{1,4}}){{1,7}}",
        "::",
    ]
)
_PATH_CHARACTER = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%{_HEX}{{2}})"
_REST = f"(?:[/?](?:{_PATH_CHARACTER}|[/?])*)?(?:#{_PATH_CHARACTER}*)?"
_AUTHORITY = rf"//{_NAME}(?::\d{{1,4}})?"
_PATH = f"{_PATH_CHARACTER}(?:{_PATH_CHARACTER}|/)*"
_URI = f"[A-Za-z][A-Za-z0-9+.-]{{0,9}}:(?:{_AUTHORITY}{_REST}|{_PATH})"
_VARIABLE = r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*(?::[1-9]\d{0,3}|\*)?"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"

FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|\\d{{1,6}}W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_NAME}\.[A-Za-z]{{2,}}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": _IPV6,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d?)(?:#|{_POINTER})",
    "time": _TIME,
    "uri": _URI,
    "uri-reference": f"{_URI}|(?:{_AUTHORITY})?{_REST}",
    "uri-template": (
        rf"(?:[A-Za-z0-9._~:/?#\[\]@!$&()*+,;=-]|%{_HEX}{{2}}"
        rf"|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
    ),
    "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
}
# Other formats of the standard, which are refused. Unknown names constrain nothing.
NOT_SERVED = frozenset({"idn-email", "idn-hostname", "iri", "iri-reference", "regex"})
