"""Write stand-ins of llama.cpp's programs: they answer at once with fixed figures and record how they were called."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

PROMPT_RATE, DECODE_RATE = 80.0, 20.0  # tokens/s
CALLS = "calls"
PROGRAM = """#!{python}
import http.server, json, pathlib, sys
words = sys.argv[1:]
given = dict(zip(words[::2], words[1::2]))
with (pathlib.Path(__file__).parent / {calls!r}).open("a") as calls:
    print(pathlib.Path(__file__).name, *words, file=calls)
{body}
"""
BENCH = """
print(json.dumps([{{"n_prompt": int(given["-p"]), "avg_ts": {prompt} if given["-n"] == "0" else {decode}}}]))
"""
BATCHED = """
count, into, out = (int(given[flag]) for flag in ("-npl", "-npp", "-ntg"))
print("a line of its log")
print(json.dumps({{"pl": count, "t_pp": count * into / {prompt}, "t_tg": out / {decode}}}))
"""
SERVER = """
class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        answer = {"tokens_predicted": 1, "tokens": [7] * asked.get("n_predict", 0)}
        answer["timings"] = {"prompt_n": len(asked.get("prompt", ""))}
        body = json.dumps(answer).encode()
        if asked.get("stream"):
            body = b'data: {"choices": [{"text": "a"}]}\\n\\n' * asked["max_tokens"] + b"data: [DONE]\\n\\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_GET = do_POST = reply
http.server.HTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
"""
LIBRARY = """
void llama_backend_init(void) {{}}
const char *llama_print_system_info(void) {{ return "{line}"; }}
"""


def write_llama_cpp(folder: Path, system_line: str) -> Path:
    """Write the programs, and a library that prints this system line; return the folder."""
    figures = {"prompt": PROMPT_RATE, "decode": DECODE_RATE}
    bodies = {"bench": BENCH.format(**figures), "batched-bench": BATCHED.format(**figures), "server": SERVER}
    for name, body in bodies.items():
        file = folder / f"llama-{name}"
        file.write_text(PROGRAM.format(python=sys.executable, calls=CALLS, body=body), encoding="utf-8")
        file.chmod(0o755)
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / "libllama.so")]
    subprocess.run(command, input=LIBRARY.format(line=system_line), check=True, encoding="utf-8", timeout=60)
    return folder


def calls_of(folder: Path) -> list[list[str]]:
    """Return the words of each call of a program so far."""
    return [shlex.split(line) for line in (folder / CALLS).read_text(encoding="utf-8").splitlines()]
