"""A certificate authority for tests, and what it signs."""

from __future__ import annotations

import datetime
from ipaddress import ip_address
from typing import TYPE_CHECKING

from attrs import frozen
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from pathlib import Path

DAY = datetime.timedelta(days=1)


@frozen
class Files:
    """A broker's certificate and key, and the authority that it trusts, as PEM files."""

    cert: Path
    key: Path
    ca: Path

    def environment(self) -> dict[str, str]:
        return {
            "QUEEN_MESH_TLS_CERT": str(self.cert),
            "QUEEN_MESH_TLS_KEY": str(self.key),
            "QUEEN_MESH_TLS_CA": str(self.ca),
        }


class Authority:
    """Signs certificates into a folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self._sign(self._name, self._key, ca=True))

    def issue(self, name: str, address: str = "127.0.0.1", password: bytes | None = None) -> Files:
        """A certificate for an IP address; with a password its key is locked."""
        key = ec.generate_private_key(ec.SECP256R1())
        files = Files(self._folder / f"{name}.crt", self._folder / f"{name}.key", self.file)
        files.cert.write_bytes(self._sign(_named(name), key, address=address))
        lock = NoEncryption() if password is None else BestAvailableEncryption(password)
        files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock))
        return files

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        *,
        address: str | None = None,
        ca: bool = False,
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if address is not None:
            names = x509.SubjectAlternativeName([x509.IPAddress(ip_address(address))])
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        pem: bytes = certificate.public_bytes(Encoding.PEM)
        return pem


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
