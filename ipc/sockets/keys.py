"""CURVE keys for tcp endpoints: one file with the server's key pair and the only accepted client key pair.

CURVE alone accepts any client that has the server's public key; ZapHandler (client_auth.py)
accepts only the client key of the file. Engine and clients use the same file: JSON with Z85 texts, mode 0600.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import zmq

from ..errors import ConfigError


def read_private(path: str | Path, name: str) -> bytes:
    """Return the content of a file of secrets. ConfigError, about `name`, if others can read it; OSError if this user
    cannot."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise ConfigError(f"{name} can be read by others: chmod 600 {path}")
        return file.read()


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key pairs, Z85 texts of 40 characters each."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    @classmethod
    def generate(cls) -> Keys:
        """Generate new key pairs."""
        server, client = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(*(key.decode() for key in (*server, *client)))

    def save(self, path: Path) -> None:
        """Write a new file that only this user can read; ConfigError if it exists or cannot be written."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ConfigError(f"{path} exists already: remove it first, or choose another name") from None
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self)) + b"\n")

    @classmethod
    def load(cls, path: str | Path) -> Keys:
        """Read a file written by `engine-launch keygen`; ConfigError if it cannot be read, is invalid or is open to
        others."""
        try:
            keys = msgspec.json.decode(read_private(path, str(path)), type=cls)
        except OSError as error:
            raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} is not a key file of `engine-launch keygen`: {error}") from None
        if any(len(text) != 40 for text in msgspec.structs.astuple(keys)):
            raise ConfigError(f"{path}: each key must have 40 characters")
        return keys

    def secure_server(self, socket: zmq.Socket[bytes], zap_domain: bytes) -> None:
        """Configure a server socket before bind: CURVE only, and a ZAP request for every client."""
        socket.setsockopt(zmq.ZAP_DOMAIN, zap_domain)
        socket.curve_server = True
        socket.curve_publickey = self.server_public.encode()
        socket.curve_secretkey = self.server_secret.encode()

    def listen(self, socket: zmq.Socket[bytes], zap_domain: bytes, address: str) -> str:
        """Secure a socket and bind it to a tcp address, in addition to addresses that it is bound to already. Return
        `address` with the port that was bound. ZMQError if it cannot be bound."""
        self.secure_server(socket, zap_domain)
        socket.bind(address)
        port = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode().rpartition(":")[2]
        return f"{address.rpartition(':')[0]}:{port}"

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Configure a client socket before connect: CURVE, with the server's public key and the client's pair."""
        socket.curve_serverkey = self.server_public.encode()
        socket.curve_publickey = self.client_public.encode()
        socket.curve_secretkey = self.client_secret.encode()
