"""Certificates and keys for a federation: TLS for the SuperLink, an identity for each SuperNode."""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DAYS_VALID = 30
LOOPBACK = "127.0.0.1"


def make_certificates(folder: Path, address: str = LOOPBACK) -> None:
    """Write ca.crt, server.pem and server.key for a SuperLink at that address."""
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    root = _certificate("fedsift demo CA", authority, "fedsift demo CA", authority, None)
    leaf = _certificate("fedsift demo SuperLink", server, "fedsift demo CA", authority, address)
    _write(folder / "ca.crt", root.public_bytes(serialization.Encoding.PEM))
    _write(folder / "server.pem", leaf.public_bytes(serialization.Encoding.PEM))
    _write(folder / "server.key", _private_bytes(server, serialization.PrivateFormat.PKCS8))


def make_node_key(path: Path) -> None:
    """Write a SuperNode's private key, and its public key next to it with the suffix ``.pub``."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    _write(path, _private_bytes(key, serialization.PrivateFormat.OpenSSH))
    _write(path.with_suffix(".pub"), public + b"\n")


def make_secret(path: Path) -> None:
    """Write the secret that a SuperExec shares with its SuperLink or SuperNode."""
    _write(path, secrets.token_bytes(32))


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    signer: ec.EllipticCurvePrivateKey,
    address: str | None,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS_VALID))
        .add_extension(x509.BasicConstraints(ca=address is None, path_length=None), critical=True)
    )
    if address is not None:
        names = [x509.IPAddress(ipaddress.ip_address(address)), x509.DNSName("localhost")]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(signer, hashes.SHA384())


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])


def _private_bytes(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
