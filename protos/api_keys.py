"""API keys as settings of gateway and router: a digest instead of the key, and what its owner may do.

Knows only the standard library.
"""

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

KEY_VARIABLE = "QUIRE_API_KEY"
# The key that the processes show each other: clients have no use for it.
OWN_KEY_VARIABLE = "QUIRE_ROUTER_API_KEY"
OWN_KEY_FILE_VARIABLE = f"{OWN_KEY_VARIABLE}_FILE"
# The router takes 256 for the tenant with its user.
_MAX_TENANT_CHARS = 200
_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests")


class KeyFileError(ValueError):
    """A file of keys, or a key, cannot be used; the message says where and why."""


@dataclass(frozen=True)
class OutputPolicy:
    """What outputs must not be.

    Attributes:
        banned_patterns: regular expressions that must not match in them.
        on_match: ``end`` ends the output before a match, ``redact`` puts a mark in its place.
        max_chars: the longest output. None: no limit.
    """

    banned_patterns: tuple[str, ...] = ()
    on_match: str = "end"
    max_chars: int | None = None


@dataclass(frozen=True)
class ApiKey:
    """One key.

    Attributes:
        sha256: of the key's UTF-8 bytes. It says enough of a key to know it and too little to use it.
        tenant: on whose behalf its requests wait in the router's queue; empty: each key for itself.
        priority_ceiling: the most urgent class that its requests may ask for; lower is more urgent. None: any.
        requests_per_minute, tokens_per_minute: in any minute; tokens are those of prompts and outputs. None: no limit.
        max_concurrent_requests: that wait or run. None: no limit.
        output_policy: of its outputs. None: they may be anything.
    """

    sha256: bytes = field(repr=False)
    tenant: str = ""
    priority_ceiling: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    output_policy: OutputPolicy | None = None

    @property
    def account(self) -> str:
        """In whose name its requests wait: the tenant, or what stands for the key where it has none."""
        return self.tenant or self.sha256[:8].hex()


def digest_of(key: str) -> bytes:
    """What stands for a key everywhere but in clients."""
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def add_key_arguments(group: "argparse._ArgumentGroup") -> None:
    """Adds the flags by which keys are given."""
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help=f"a key that lets clients in; may be given several times. The variable {KEY_VARIABLE} is one more, which "
        "lists of processes do not show (default: nobody needs a key)",
    )  # fmt: skip
    group.add_argument(
        "--api-keys-file", type=Path, metavar="FILE",
        help="JSON with more keys, as SHA-256, each with its tenant and limits",
    )  # fmt: skip


def keys_from_args(args: argparse.Namespace) -> tuple[ApiKey, ...]:
    """Every key of flags and environment, once. Raises KeyFileError."""
    given = [*args.api_key, *filter(None, [os.environ.get(KEY_VARIABLE)])]
    for key in given:
        _check_sendable(key, "--api-key")
    try:
        filed = read_keys(args.api_keys_file) if args.api_keys_file is not None else ()
    except KeyFileError as error:
        raise KeyFileError(f"--api-keys-file: {error}") from error
    known = {key.sha256: key for key in (*(ApiKey(digest_of(key)) for key in given), *filed)}
    return tuple(known.values())


def own_key(environ: Mapping[str, str]) -> str:
    """The key that the processes show each other, from its variable or the file that the other one names, as
    containers are given secrets; empty: there is none. Raises KeyFileError."""
    key, file = environ.get(OWN_KEY_VARIABLE, ""), environ.get(OWN_KEY_FILE_VARIABLE, "")
    if key and file:
        raise KeyFileError(f"{OWN_KEY_VARIABLE} and {OWN_KEY_FILE_VARIABLE} are both set; unset one of them")
    if key:
        _check_sendable(key, OWN_KEY_VARIABLE)
    elif file:
        try:
            key = Path(file).read_text().strip()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "it is not text"
            raise KeyFileError(f"{OWN_KEY_FILE_VARIABLE}: cannot read {file}: {why}") from error
        _check_sendable(key, f"the key in {file}, which {OWN_KEY_FILE_VARIABLE} names,")
    return key


def key_metadata(key: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call that shows a key; empty without one."""
    return (("authorization", f"Bearer {key}"),) if key else ()


def _check_sendable(key: str, where: str) -> None:
    if not (key.isascii() and key.isprintable() and key.split() == [key]):
        raise KeyFileError(
            f"{where} must be letters, digits and signs of ASCII without spaces, as it travels in a header"
        )


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a JSON file: ``{"keys": [{"sha256": "...", "tenant": "..."}]}``, further fields as in ApiKey.

    Raises:
        KeyFileError: the file cannot be read, or says something that is not understood.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise KeyFileError(f"{path} is not JSON") from error
    if not isinstance(content, dict) or content.keys() != {"keys"} or not isinstance(content["keys"], list):
        raise KeyFileError(f'{path} must be an object with one list: {{"keys": [...]}}')
    if not content["keys"]:
        raise KeyFileError(f"{path} has no keys; without the flag, none is asked for")
    keys = tuple(_key(entry, f"{path}: keys[{index}]") for index, entry in enumerate(content["keys"]))
    if len({key.sha256 for key in keys}) < len(keys):
        raise KeyFileError(f"{path} has the same sha256 twice")
    return keys


def _key(entry: Any, where: str) -> ApiKey:
    if not isinstance(entry, dict):
        raise KeyFileError(f"{where} must be an object")
    if unknown := sorted(entry.keys() - {known.name for known in fields(ApiKey)}):
        raise KeyFileError(f"{where} has the field {unknown[0]!r}, which is not known")
    values = dict(entry)
    values["sha256"] = _digest(values.get("sha256"), where)
    tenant = values.get("tenant", "")
    if not isinstance(tenant, str) or len(tenant) > _MAX_TENANT_CHARS or "/" in tenant:  # which parts it from the user
        raise KeyFileError(f"{where}.tenant must be a text of at most {_MAX_TENANT_CHARS} characters, without /")
    for name in _LIMITS:
        if name in values and not (_is_int(values[name]) and values[name] >= 1):
            raise KeyFileError(f"{where}.{name} must be a whole number of at least 1")
    ceiling = values.get("priority_ceiling", 0)
    if not (_is_int(ceiling) and -(2**31) <= ceiling < 2**31):
        raise KeyFileError(f"{where}.priority_ceiling must be a whole number of 32 bits")
    if "output_policy" in values:
        values["output_policy"] = _policy(values["output_policy"], f"{where}.output_policy")
    return ApiKey(**values)


def _policy(entry: Any, where: str) -> OutputPolicy:
    if not isinstance(entry, dict) or entry.keys() - {known.name for known in fields(OutputPolicy)}:
        raise KeyFileError(f"{where} must be an object with banned_patterns, on_match and max_chars, or some of them")
    patterns = entry.get("banned_patterns", [])
    if not (isinstance(patterns, list) and all(isinstance(pattern, str) for pattern in patterns)):
        raise KeyFileError(f"{where}.banned_patterns must be a list of texts")
    policy = OutputPolicy(**{**entry, "banned_patterns": tuple(patterns)})
    if policy.on_match not in ("end", "redact"):
        raise KeyFileError(f"{where}.on_match must be end or redact")
    if policy.max_chars is not None and not (_is_int(policy.max_chars) and policy.max_chars >= 1):
        raise KeyFileError(f"{where}.max_chars must be a whole number of at least 1")
    return policy


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _digest(text: Any, where: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except (TypeError, ValueError):
        digest = b""
    if len(digest) != sha256().digest_size:
        raise KeyFileError(f"{where}.sha256 must be 64 hexadecimal digits, as `printf %s KEY | sha256sum` writes them")
    return digest
