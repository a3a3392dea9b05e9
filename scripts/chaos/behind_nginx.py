"""Streams behind nginx with a short read timeout, while their prompts take long: none is cut, unless comments are off.

    python scripts/chaos/behind_nginx.py --wait-s 30 --read-timeout-s 5

Needs Debian's nginx. A null worker takes --wait-s for its first step. Streams of chats, completions, responses and
messages run at once through nginx: first with the engine's own --sse-keep-alive-s, then with 0. Exit code 1 if a stream
is cut with comments, or if one is not without them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.scripts.bench.cases.sse import our_server
from tokenloom.scripts.bench.http_server import HOST, POLL_S, START_TIMEOUT_S, free_port

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
ASKS = {  # path: body, and the last thing of its stream
    "/v1/chat/completions": (CHAT, b"data: [DONE]"),
    "/v1/completions": ({"prompt": "hi", "max_tokens": 1}, b"data: [DONE]"),
    "/v1/responses": ({"input": "hi", "max_output_tokens": 1}, b"response.incomplete"),
    "/v1/messages": (CHAT, b"message_stop"),
}
NGINX = """
daemon off; master_process off; error_log {folder}/error.log; pid {folder}/pid;
events {{}}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen {host}:{port};
    location / {{ proxy_pass http://{host}:{engine}; proxy_http_version 1.1; proxy_read_timeout {timeout}s; }}
  }}
}}
"""


@contextmanager
def nginx(engine: int, read_timeout_s: int) -> Iterator[int]:
    """Run nginx in front of the engine's port; the context's value is its own port."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "nginx.conf")
        file.write_text(
            NGINX.format(folder=folder, host=HOST, port=port, engine=engine, timeout=read_timeout_s), encoding="utf-8"
        )
        process = subprocess.Popen(["nginx", "-c", str(file), "-e", f"{folder}/error.log"])
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not listens(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"nginx does not listen (exit code {process.returncode})")
                time.sleep(POLL_S)
            yield port
        finally:
            process.terminate()
            process.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def is_whole(port: int, path: str) -> bool:
    """Read a stream; return whether it came to its end."""
    fields, last = ASKS[path]
    connection = http.client.HTTPConnection(HOST, port, timeout=300)
    try:
        connection.request("POST", path, json.dumps({**fields, "stream": True}), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status == 200 and last in answer.read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def count_cut(arguments: argparse.Namespace, options: dict[str, object]) -> int:
    """Return how many of the streams are cut by nginx in front of an engine with these options."""
    with ExitStack() as stack:
        server = our_server("tokenloom", DEMO_FOLDER, options, 1000 * arguments.wait_s)
        stack.callback(server.stop)
        server.wait_ready()
        port = stack.enter_context(nginx(server.port, arguments.read_timeout_s))
        found: list[bool] = []
        paths = [path for path in ASKS for _ in range(arguments.streams)]
        threads = [
            threading.Thread(target=lambda path: found.append(is_whole(port, path)), args=[each]) for each in paths
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    return len(paths) - sum(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wait-s", type=int, default=30, help="time of the first step")
    parser.add_argument("--read-timeout-s", type=int, default=5, help="of nginx")
    parser.add_argument("--streams", type=int, default=4, help="of each of the four endpoints")
    arguments = parser.parse_args()
    num_streams = len(ASKS) * arguments.streams
    num_cut = count_cut(arguments, {})
    num_cut_without = count_cut(arguments, {"sse_keep_alive_s": 0})
    print(
        f"{num_streams} streams with a first token after {arguments.wait_s} s, nginx waits {arguments.read_timeout_s} s"
    )
    print(f"with comments: {num_cut} cut; without: {num_cut_without} cut")
    return int(num_cut > 0 or num_cut_without < num_streams)


if __name__ == "__main__":
    sys.exit(main())
