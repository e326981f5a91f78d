"""One certificate authority per cluster; every identity is a certificate that it signed."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFE = datetime.timedelta(days=30)


class Authority:
    """Signs certificates into a folder: NAME.crt and NAME.key. P-256 throughout."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        self.folder = folder
        self._key = _new_key(folder / "ca.key")
        subject = _subject("flash-msa-test-ca")
        self._certificate = (
            _builder(subject, subject, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = _write(folder / "ca.crt", self._certificate)

    def sign(self, name: str, user: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()):
        """Writes the certificate of a user (Kubernetes: CN and O) that may serve those hosts."""
        key = _new_key(self.folder / f"{name}.key")
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = _builder(_subject(user, groups), self._certificate.subject, key).add_extension(
            x509.ExtendedKeyUsage(usages), critical=False
        )
        if hosts:
            names = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        _write(self.folder / f"{name}.crt", builder.sign(self._key, hashes.SHA256()))

    def key_pair(self, name: str) -> None:
        """Writes NAME.key and NAME.pub, for service account tokens."""
        key = _new_key(self.folder / f"{name}.key")
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (self.folder / f"{name}.pub").write_bytes(public)


def kubeconfig(path: Path, folder: Path, name: str, server: str) -> Path:
    """Writes a kubeconfig by which the identity NAME reaches the server; self-contained."""
    import base64
    import json

    def data(file: str) -> str:
        return base64.b64encode((folder / file).read_bytes()).decode()

    cluster = {"server": server, "certificate-authority-data": data("ca.crt")}
    user = {
        "client-certificate-data": data(f"{name}.crt"),
        "client-key-data": data(f"{name}.key"),
    }
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "flash-msa",
        "clusters": [{"name": "flash-msa", "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": "flash-msa", "context": {"cluster": "flash-msa", "user": name}}],
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(config))
    return path


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + LIFE)
    )


def _subject(user: str, groups: Sequence[str] = ()) -> x509.Name:
    names = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*names, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _new_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = ec.generate_private_key(ec.SECP256R1())
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return key


def _write(path: Path, certificate: x509.Certificate) -> Path:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path
