"""Install a wheel into a root without a compiler, ask a model there, and print the seconds and the sizes.

    python scripts/checks/bare_root.py dist/tokenloom-….whl MODEL.gguf [--root FOLDER] [--bind PATH …]

Runs as root. FOLDER is the root of a Linux with Python and its venv; without the option debootstrap makes a minimal one
of this machine's Debian. The packages are downloaded first, by the pip of the root, with torch from TORCH_INDEX_URL (as
in Dockerfile.cpu), since a network's seconds say nothing about the engine. pip sees the variables that begin with PIP_,
the files and folders that these name, its configuration in /etc, and each PATH. Then three commands run in the root,
without a network: a new venv, the wheel in it, an answer. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PIP_CONFIGURATION = ("/etc/pip.conf", "/etc/xdg/pip")
PACKAGES = "python3,python3-venv"
_NAME = re.compile(r"([\w-]+-)?(cc|gcc|clang|c99|c89|tcc|icx|g\+\+|c\+\+|clang\+\+)(-[\d.]+)?")  # of a compiler
BINARIES = ("usr/bin", "usr/local/bin", "bin", "opt/bin")
MODEL = "/srv/models/model.gguf"
TIMEOUT_S = 1800
PROMPT, EXPECTED = "The capital of France is", "Paris"
# The loopback is brought up, since a new network namespace has it down; mounts end with the namespace.
ENTER = """
root=$1 wheels=$2 model=$3 binds=$4
shift 4
mkdir -p "$root/proc" "$root/dev" "$root/wheels" "$root/srv/models"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --bind "$wheels" "$root/wheels"
touch "$root/srv/models/model.gguf"
mount --bind "$model" "$root/srv/models/model.gguf"
for path in $binds; do
    if [ -d "$path" ]; then mkdir -p "$root$path"; else mkdir -p "$root${path%/*}"; touch "$root$path"; fi
    mount --bind "$path" "$root$path"
done
if command -v ip > /dev/null; then ip link set lo up; fi
exec chroot "$root" "$@"
"""
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
KERNELS = "from tokenloom import LLM\nwith LLM(device='cpu') as llm: print(llm.info().kernels)"


class Row(NamedTuple):
    """A command, its seconds, and the bytes that it added to the root."""

    command: str
    seconds: float
    num_bytes: int


def compilers_in(root: Path) -> list[str]:
    """Return the paths of C compilers in a root, also those with a version or a platform in their names."""
    found = [path for folder in BINARIES for path in sorted((root / folder).glob("*"))]
    return [str(path.relative_to(root)) for path in found if _NAME.fullmatch(path.name)]


def size_of(folder: Path) -> int:
    """Return the bytes of the files in a folder, each counted once."""
    statuses = {
        (status.st_dev, status.st_ino): status.st_blocks * 512
        for path in folder.rglob("*")
        if not path.is_symlink() and (status := path.stat())
    }
    return sum(statuses.values())


def make_root(folder: Path) -> None:
    """Have debootstrap make a minimal Debian. SystemExit if it is not installed."""
    if shutil.which("debootstrap") is None:
        raise SystemExit("debootstrap is not installed: apt install debootstrap, or give --root")
    names = platform.freedesktop_os_release()
    suite = names.get("VERSION_CODENAME", "stable") if names["ID"] == "debian" else "stable"
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(folder)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)


class Inside(NamedTuple):
    """The root, and what it sees of this machine."""

    root: Path
    wheels: Path  # at /wheels
    model: Path  # at MODEL
    binds: Sequence[str] = ()  # while packages are downloaded

    def run(self, *words: str, has_network: bool = False) -> str:
        """Run a command in the root and return its output. SystemExit with both outputs if it fails."""
        namespaces = ["unshare", "--mount", *([] if has_network else ["--net"])]
        binds = " ".join([*self.binds, "/etc/resolv.conf"]) if has_network else ""
        command = [*namespaces, "sh", "-euc", ENTER, "sh", *map(str, self[:3]), binds, *words]
        more = {name: value for name, value in os.environ.items() if name.startswith("PIP_") and has_network}
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=TIMEOUT_S, check=False, env=ENVIRONMENT | more
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout


def pip_paths() -> list[str]:
    """Return the files and folders of this machine that pip's variables name, and its configuration in /etc."""
    named = [word for name, value in os.environ.items() if name.startswith("PIP_") for word in value.split()]
    return sorted({path for path in [*named, *PIP_CONFIGURATION] if os.path.isabs(path) and os.path.exists(path)})


def download(inside: Inside, wheel: Path) -> None:
    """Download what the wheel needs to /wheels, with torch for CPUs, by a pip of the root, which is removed again."""
    shutil.copy(wheel, inside.wheels)
    shutil.copy(ROOT / "constraints.txt", inside.wheels)
    inside.run("python3", "-m", "venv", "/tmp/download")
    pip = ["/tmp/download/bin/pip", "download", "--quiet", "-c", "/wheels/constraints.txt", "-d", "/wheels"]
    index = os.environ.get("TORCH_INDEX_URL", TORCH_INDEX)
    inside.run(*pip, "--no-deps", *(["--index-url", index] if index else []), "torch", has_network=True)
    inside.run(*pip, "--find-links", "/wheels", f"/wheels/{wheel.name}", has_network=True)
    inside.run("rm", "-r", "/tmp/download", "/wheels/constraints.txt")


def measure(inside: Inside, wheel: Path) -> tuple[list[Row], str, str]:
    """Return the rows of the three commands, the answer, and the name of the kernels that computed it."""
    commands = {
        "python3 -m venv /opt/tokenloom": ["python3", "-m", "venv", "/opt/tokenloom"],
        f"pip install {wheel.name}": [
            *("/opt/tokenloom/bin/pip", "install", "--quiet", "--no-index", "--find-links", "/wheels"),
            f"/wheels/{wheel.name}",
        ],
        "engine-launch complete --model MODEL.gguf": [
            *("/opt/tokenloom/bin/engine-launch", "complete", "--model", MODEL),
            *("--temperature", "0", "--max-tokens", "8", PROMPT),
        ],
    }
    rows, answer, before = list[Row](), "", size_of(inside.root)
    for name, words in commands.items():
        began = time.monotonic()
        answer = inside.run(*words)
        seconds, after = time.monotonic() - began, size_of(inside.root)
        rows.append(Row(name, seconds, after - before))
        before = after
    kernels = inside.run("/opt/tokenloom/bin/python", "-c", KERNELS)
    return rows, answer, kernels.strip()


def show(rows: Sequence[Row], root_bytes: int, wheel: Path, wheels: Path, model: Path) -> str:
    """Return the table of a measurement."""
    lines = [f"{'':44} {'seconds':>8} {'MB':>8}"]
    lines += [f"{row.command:44} {row.seconds:8.1f} {row.num_bytes / 1e6:8.1f}" for row in rows]
    lines += [
        f"{name:44} {'':8} {size / 1e6:8.1f}"
        for name, size in {
            "the root before": root_bytes,
            f"the wheel, {wheel.name}": wheel.stat().st_size,
            "all wheels that are downloaded": sum(path.stat().st_size for path in wheels.iterdir()),
            f"the model, {model.name}": model.stat().st_size,
        }.items()
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--root", type=Path, help="a root with Python and venv; it is copied, and left as it is")
    parser.add_argument("--bind", nargs="+", default=[], help="paths of this machine that pip needs, without spaces")
    options = parser.parse_args()
    wheel, model = options.wheel.resolve(strict=True), options.model.resolve(strict=True)
    if os.getuid() != 0:
        raise SystemExit("a new root needs root: run it with sudo")
    with tempfile.TemporaryDirectory(prefix="bare-root-") as name:
        root, wheels = Path(name, "root"), Path(name, "wheels")
        wheels.mkdir()
        if options.root is None:
            make_root(root)
        else:
            subprocess.run(["cp", "-a", str(options.root), str(root)], check=True, timeout=TIMEOUT_S)
        if found := compilers_in(root):
            raise SystemExit(f"the root has a compiler: {', '.join(found)}")
        root_bytes, inside = size_of(root), Inside(root, wheels, model, [*pip_paths(), *options.bind])
        version = inside.run("python3", "--version").strip()
        download(inside, wheel)
        rows, answer, kernels = measure(inside, wheel)
        print(show(rows, root_bytes, wheel, wheels, model))
        print(f"\n{version}, {kernels}, no compiler\n{PROMPT}{answer}")
        if EXPECTED not in answer or not kernels.endswith("prebuilt"):
            raise SystemExit("the answer or the kernels are wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
