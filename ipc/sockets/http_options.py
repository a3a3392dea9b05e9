"""Checks of the options that say where and how HTTP is served."""

from __future__ import annotations

import re
from typing import Protocol

from ..errors import ConfigError
from .endpoints import http_endpoint


class HttpOptions(Protocol):
    """The options of EngineConfig about the HTTP server."""

    @property
    def http_address(self) -> str | None: ...
    @property
    def uds(self) -> str | None: ...
    @property
    def uds_mode(self) -> str: ...
    @property
    def listen_mode(self) -> str: ...
    @property
    def root_path(self) -> str: ...
    @property
    def ssl_certfile(self) -> str | None: ...
    @property
    def ssl_keyfile(self) -> str | None: ...
    @property
    def ssl_ca_certs(self) -> str | None: ...
    @property
    def ssl_cert_reqs(self) -> int: ...
    @property
    def state_dir(self) -> str | None: ...


def check_http(options: HttpOptions) -> None:
    """Raise ConfigError for an invalid address, mode, path or TLS file, and for options of HTTP without HTTP."""
    if options.http_address is not None:
        http_endpoint(options.http_address)
    elif options.uds is None and options.state_dir is not None:
        raise ConfigError(f"--state-dir {options.state_dir} is for the HTTP server: give --http or --uds too")
    for option, mode in (("--uds-mode", options.uds_mode), ("--listen-mode", options.listen_mode)):
        if not re.fullmatch("[0-7]{3,4}", mode):
            raise ConfigError(f"{option} {mode} must be 3 or 4 octal digits, such as 660")
    if not re.fullmatch(r"(/[\w.~-]+)*", options.root_path, re.ASCII):
        raise ConfigError(f"--root-path {options.root_path} must begin with / and not end with it, such as /llm")
    if options.ssl_certfile is None and (options.ssl_keyfile or options.ssl_ca_certs or options.ssl_cert_reqs):
        raise ConfigError("--ssl-keyfile, --ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile")
    if options.ssl_certfile is not None and options.http_address is None:
        raise ConfigError("--ssl-certfile is for --http, which is not given: give both, or neither")
    if options.ssl_cert_reqs and options.ssl_ca_certs is None:
        raise ConfigError(f"--ssl-cert-reqs {options.ssl_cert_reqs} needs --ssl-ca-certs, the CAs to trust")
