"""Loading of the HTTP server's TLS context from PEM files, with one-line errors."""

from __future__ import annotations

import ssl
from typing import NoReturn

from ...ipc.errors import ConfigError
from ...ipc.spec.config.engine_config import EngineConfig


def new_ssl_context(config: EngineConfig) -> ssl.SSLContext | None:
    """Load the TLS context and return it; None without --ssl-certfile. ConfigError if a file is unreadable or not in
    PEM form, if the key has a passphrase, or if it does not belong to the certificate."""
    if config.ssl_certfile is None:
        return None
    keyfile = config.ssl_keyfile or config.ssl_certfile
    for option, path in (
        ("--ssl-certfile", config.ssl_certfile),
        ("--ssl-keyfile", keyfile),
        ("--ssl-ca-certs", config.ssl_ca_certs),
    ):
        if path is not None:
            try:
                open(path, "rb").close()
            except OSError as error:
                raise ConfigError(f"{option} {path} cannot be read: {error.strerror}") from None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, keyfile, _refuse_passphrase)
    except ssl.SSLError as error:
        raise ConfigError(f"--ssl-certfile {config.ssl_certfile}: {_reason(error, keyfile)}") from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except ssl.SSLError:
            raise ConfigError(f"--ssl-ca-certs {config.ssl_ca_certs} holds no certificate in PEM form") from None
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    return context


def _refuse_passphrase() -> NoReturn:
    raise ConfigError("the private key of --ssl-certfile has a passphrase: give --ssl-keyfile one without")


def _reason(error: ssl.SSLError, keyfile: str) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"the private key in {keyfile} does not belong to this certificate"
    return f"it and {keyfile} must hold a certificate and its private key in PEM form ({error.reason or error})"
