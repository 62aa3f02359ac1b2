"""A certificate authority, a server's certificate, and the keys that identify nodes."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

VALID = timedelta(days=30)


@dataclass(frozen=True)
class ServerFiles:
    """What a SuperLink needs for TLS. Nodes need `ca` to trust it."""

    ca: Path
    certificate: Path
    key: Path


def write_server_files(directory: Path, hosts: Sequence[str]) -> ServerFiles:
    """Write a new CA and a certificate for these names and addresses. The CA's own key is not kept."""
    files = ServerFiles(*(directory / name for name in ("ca.crt", "server.pem", "server.key")))
    ca_key, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca_name = _name("fsl-sage CA")
    ca = _certificate(ca_name, ca_name, ca_key.public_key()).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    server = (
        _certificate(_name(hosts[0]), ca_name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
    )
    files.ca.write_bytes(_pem(ca, ca_key))
    files.certificate.write_bytes(_pem(server, ca_key))
    _write_private(files.key, key, serialization.PrivateFormat.PKCS8)
    return files


def write_node_key(path: Path) -> Path:
    """Write a node's private key to `path`; returns the path of its public key."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write_private(path, key, serialization.PrivateFormat.OpenSSH)
    public = path.with_name(path.name + ".pub")
    encoding, form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    public.write_bytes(key.public_key().public_bytes(encoding, form))
    return public


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    path.touch(mode=0o600)
    path.chmod(0o600)  # also where there was a file
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + VALID)
    )


def _pem(builder: x509.CertificateBuilder, ca_key: ec.EllipticCurvePrivateKey) -> bytes:
    return builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
