"""Certificates for tests, made by the openssl program."""

import shutil
import subprocess
from pathlib import Path

import pytest

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """Vouches for certificates; all files lie in ``folder``.

    Attributes:
        certfile: its own certificate, which ends ``days`` from now; with -1, yesterday.
    """

    def __init__(self, folder: Path, name: str = "ca", days: int = 2) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("there is no openssl program to make certificates with")
        self._folder, self._name = folder, name
        self.certfile, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        _make(name, self.certfile, self._key, days, "basicConstraints=critical,CA:TRUE", "-signkey", self._key)

    def issue(
        self, name: str, *alt_names: str, days: int = 1, usage: str = "serverAuth,clientAuth"
    ) -> tuple[Path, Path]:
        """A certificate and its key.

        Args:
            alt_names: such as ``DNS:worker.quire``; by default what a process on this machine is called by.
        """
        certfile, keyfile = (self._folder / f"{self._name}-{name}.{end}" for end in ("pem", "key"))
        names = ",".join(alt_names or ("IP:127.0.0.1", "DNS:localhost"))
        extensions = f"subjectAltName={names}\nextendedKeyUsage={usage}"
        signer = ("-CA", self.certfile, "-CAkey", self._key, "-CAcreateserial")
        _make(name, certfile, keyfile, days, extensions, *signer)
        return certfile, keyfile


def _make(name: str, certfile: Path, keyfile: Path, days: int, extensions: str, *signer: object) -> None:
    request, extension_file = certfile.with_suffix(".csr"), certfile.with_suffix(".ext")
    extension_file.write_text(f"{extensions}\n")
    _openssl("req", *_KEY, "-keyout", keyfile, "-out", request, "-subj", f"/CN={name}")
    made = ("-days", days, "-extfile", extension_file, "-out", certfile)
    _openssl("x509", "-req", "-in", request, *signer, *made)


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
