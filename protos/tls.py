"""Settings of TLS: which files a process shows and trusts where it serves, and where it calls. No I/O but ``check``.

One set of flags is for what a process serves (``--ssl-certfile`` and so on, vLLM's names), one for each kind of
process that it calls (``--router-ssl-ca-certs`` ...). Knows only the standard library.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl

# OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED.
_NOT_YET_VALID, _EXPIRED = 9, 10


class TlsError(ValueError):
    """A setting cannot be used; the message names flag and file, and says what to do."""


@dataclass(frozen=True)
class ServerTls:
    """What a server shows and demands.

    Attributes:
        certfile, keyfile: PEM; the certificate with those between it and its authority.
        ca_certs: PEM; only clients with a certificate that these vouch for are let in. None: all are.
        client_names: of which a client's certificate must have one (DNS or IP, in subjectAltName). None: any name.
    """

    certfile: Path
    keyfile: Path
    ca_certs: Path | None = None
    client_names: tuple[str, ...] = ()

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "ServerTls | None":
        """What the flags of ``add_server_arguments`` say; None: no TLS. Raises TlsError."""
        names = tuple(getattr(args, "ssl_client_names", None) or ())
        if args.ssl_certfile is None or args.ssl_keyfile is None:
            if args.ssl_certfile or args.ssl_keyfile or args.ssl_ca_certs or names:
                raise TlsError("TLS needs both --ssl-certfile and --ssl-keyfile; give the one that is missing")
            return None
        if names and args.ssl_ca_certs is None:
            raise TlsError("--ssl-client-names needs --ssl-ca-certs: a name says nothing without who vouches for it")
        tls = cls(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs, names)
        _check_pair(tls.certfile, tls.keyfile, "--ssl-", serves=True)
        if tls.ca_certs is not None:
            _check_authorities(tls.ca_certs, "--ssl-ca-certs")
        return tls


@dataclass(frozen=True)
class ClientTls:
    """What a client trusts and shows.

    Attributes:
        ca_certs: PEM; the server's certificate must be one that these vouch for, or one of them.
        certfile, keyfile: PEM; for servers that want to know who calls.
        name: that the server's certificate must have. None: the host that is called.
    """

    ca_certs: Path
    certfile: Path | None = None
    keyfile: Path | None = None
    name: str | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace, peer: str) -> "ClientTls | None":
        """What the flags of ``add_client_arguments`` for this kind of peer say; None: no TLS. Raises TlsError."""
        flag = f"--{peer}-ssl-"
        ca_certs, certfile, keyfile, name = (
            getattr(args, f"{peer}_ssl_{part}") for part in ("ca_certs", "certfile", "keyfile", "name")
        )
        if ca_certs is None:
            if certfile or keyfile or name:
                raise TlsError(f"{flag}ca-certs is missing: it says whom to trust, and turns TLS on")
            return None
        if (certfile is None) != (keyfile is None):
            raise TlsError(f"{flag}certfile and {flag}keyfile go together; give the one that is missing")
        _check_authorities(ca_certs, f"{flag}ca-certs")
        if certfile is not None:
            _check_pair(certfile, keyfile, flag, serves=False)
        return cls(ca_certs, certfile, keyfile, name)


def add_server_arguments(parser: argparse.ArgumentParser, *, names: bool = True) -> None:
    """Adds the flags of what a process serves; ``names=False`` leaves out ``--ssl-client-names``."""
    group = parser.add_argument_group("TLS of what it serves")
    group.add_argument("--ssl-certfile", type=Path, metavar="FILE", help="certificate to show, PEM (default: no TLS)")
    group.add_argument("--ssl-keyfile", type=Path, metavar="FILE", help="its private key, PEM, not encrypted")
    group.add_argument(
        "--ssl-ca-certs", type=Path, metavar="FILE",
        help="authorities, PEM; only clients with a certificate of theirs are let in (default: all are)",
    )  # fmt: skip
    if names:
        group.add_argument(
            "--ssl-client-names", nargs="+", metavar="NAME",
            help="of which a client's certificate must have one, in subjectAltName (default: any)",
        )  # fmt: skip


def add_client_arguments(parser: argparse.ArgumentParser, peer: str) -> None:
    """Adds the flags of calls to one kind of process, ``router`` or ``worker``."""
    group = parser.add_argument_group(f"TLS of calls to the {peer}")
    group.add_argument(
        f"--{peer}-ssl-ca-certs", type=Path, metavar="FILE",
        help=f"authorities, PEM, of which one must vouch for the {peer} (default: no TLS)",
    )  # fmt: skip
    group.add_argument(
        f"--{peer}-ssl-certfile", type=Path, metavar="FILE", help=f"certificate to show to the {peer}, PEM"
    )
    group.add_argument(f"--{peer}-ssl-keyfile", type=Path, metavar="FILE", help="its private key, PEM, not encrypted")
    group.add_argument(
        f"--{peer}-ssl-name", metavar="NAME",
        help=f"that the {peer}'s certificate must have (default: the host that is called)",
    )  # fmt: skip


def explain_failure(details: str, tls: ClientTls | None) -> str:
    """What gRPC says of a call that reached nobody, and in front of it, where that is about TLS, what it means.

    A server that ends a handshake gives no reason to its client; then this names what it may want.
    """
    if tls is not None and "WRONG_VERSION_NUMBER" in details:
        return f"it does not speak TLS ({details})"
    if tls is not None and "certificate has expired" in details:
        return f"its certificate is expired ({details})"
    if tls is not None and "CERTIFICATE_VERIFY_FAILED" in details:
        return f"{tls.ca_certs} does not vouch for its certificate ({details})"
    if tls is not None and "Hostname Verification" in details:
        return f"its certificate is not for {tls.name or 'the host that was called'} ({details})"
    if "failed to connect" in details and "Socket closed" in details:
        if tls is None:
            return f"it closed the connection: it may want TLS ({details})"
        wanted = "want a client's certificate" if tls.certfile is None else f"not accept the certificate {tls.certfile}"
        return f"it closed the connection: it may {wanted} ({details})"
    return details


def _check_authorities(path: Path, flag: str) -> None:
    """Raises TlsError unless the file has certificates and all of them are valid today."""
    import ssl
    import time

    _check_readable(path, flag)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, ValueError):
        raise TlsError(f"{flag} is {path}: it has no certificate in PEM form") from None
    ends = [str(certificate["notAfter"]) for certificate in context.get_ca_certs()]
    if ends and max(map(ssl.cert_time_to_seconds, ends)) < time.time():
        raise TlsError(f"{flag} is {path}: expired on {ends[0]}; nothing that it vouches for would be trusted")


def _check_pair(certfile: Path, keyfile: Path, flag: str, *, serves: bool) -> None:
    """Raises TlsError unless the key fits the certificate, and the certificate is good today for what it is for.

    Shown to itself as the only one that is trusted, in memory, a certificate says by OpenSSL's own judgement whether
    it is expired or meant for something else.
    """
    import ssl

    _check_readable(certfile, f"{flag}certfile")
    _check_readable(keyfile, f"{flag}keyfile")
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    for context in (server, client):
        try:
            # Without a password for it, OpenSSL would ask the terminal.
            context.load_cert_chain(certfile, keyfile, password="")
        except (ssl.SSLError, ValueError) as error:
            raise TlsError(_why_no_pair(certfile, keyfile, flag, error)) from None
    judge = client if serves else server
    judge.load_verify_locations(certfile)
    judge.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    judge.verify_mode = ssl.CERT_REQUIRED
    try:
        _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        what = {_NOT_YET_VALID: "it is not valid yet", _EXPIRED: "it is expired"}.get(
            error.verify_code, f"it cannot be used here ({error.verify_message})"
        )
        raise TlsError(f"{flag}certfile is {certfile}: {what}; give another") from None


def _why_no_pair(certfile: Path, keyfile: Path, flag: str, error: Exception) -> str:
    reason = getattr(error, "reason", None)
    if reason == "KEY_VALUES_MISMATCH":
        return f"{flag}keyfile is {keyfile}: it does not fit the certificate {certfile}"
    if "CERTIFICATE" not in certfile.read_text(errors="replace"):
        return f"{flag}certfile is {certfile}: it has no certificate in PEM form"
    if "ENCRYPTED" in keyfile.read_text(errors="replace"):
        return f"{flag}keyfile is {keyfile}: it is encrypted; give it as it is, readable by this user alone"
    return (
        f"{flag}keyfile is {keyfile}: no private key in PEM form that can be used with {certfile} ({reason or error})"
    )


def _check_readable(path: Path, flag: str) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise TlsError(f"{flag} is {path}: {error.strerror}") from None


def _shake_hands(server: "ssl.SSLContext", client: "ssl.SSLContext") -> None:
    """A handshake in memory. Raises ssl.SSLError."""
    import ssl

    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends: Sequence[ssl.SSLObject] = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(4):  # each has at most two turns
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
