"""The kernels come prebuilt or are compiled once, on torch's own threads; where they cannot be, the reference serves.

No folder and no compiler that is missing or broken keeps them away as long as another will do.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tokenloom.kernels.cpu import library_store
from tokenloom.kernels.cpu.compiler import FOR_ANY_MACHINE, LEVELS, Unavailable, library_digest
from tokenloom.kernels.cpu.cpu_ops import CpuOps
from tokenloom.kernels.cpu.library_store import cached_library, prebuilt_library, prebuilt_name, user_cache_folder
from tokenloom.kernels.cpu.loader import load_kernels, load_level
from tokenloom.kernels.cpu.processor import instruction_levels
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.kernels.select import select_ops
from tokenloom.tests.support.waiting import wait_until

CPU = torch.device("cpu")
HERE = instruction_levels()
LOCKS = Path("/proc/locks")  # "->" marks those that wait
needs_kernels = pytest.mark.skipif(not HERE, reason="the processor has no AVX2")


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    """Clear the cache of loaded libraries before and after each test."""
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


@pytest.fixture(scope="module")
def compiled() -> Path:
    """Compile the library of the best level for bfloat16."""
    root = user_cache_folder()
    assert root is not None
    return cached_library(HERE[0], True, root)


@pytest.fixture
def prebuilt(compiled: Path, tmp_path: Path) -> Path:
    """Make a folder like a wheel's, with the library of the best level for bfloat16."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    name = prebuilt_name(HERE[0], True)
    shutil.copy(compiled, folder / name)
    digest = library_digest(HERE[0], True, FOR_ANY_MACHINE)
    (folder / library_store.DIGESTS_NAME).write_text(json.dumps({name: digest}))
    return folder


def fake_compiler(folder: Path, script: str) -> None:
    for name in ("cc", "gcc"):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Make a folder with the smallest library."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.c").write_text("int one(void) { return 1; }\n")
    return folder


def test_every_processor_with_avx2_has_kernels() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    assert ("AVX2" in HERE) == ("avx2" in flags and "fma" in flags)
    assert [level for level in LEVELS if level in HERE] == HERE  # the same names in the same order


@needs_kernels
def test_a_library_is_compiled_once(sources: Path, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    first = cached_library(HERE[-1], True, root, sources)
    written = first.stat().st_mtime_ns
    assert first.read_bytes()[:4] == b"\x7fELF"
    assert cached_library(HERE[-1], True, root, sources) == first
    assert first.stat().st_mtime_ns == written
    assert [path.name for path in root.iterdir()] == [first.parent.name]  # no other files


def test_several_that_lack_a_library_compile_it_once(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here two threads: a lock belongs to an open file."""
    root, calls, gate = tmp_path / "cache", tmp_path / "calls", tmp_path / "gate"
    os.mkfifo(gate)
    fake_compiler(tmp_path, f'for last; do :; done\necho call >> {calls}\nread line < {gate}\necho ours > "$last"')
    monkeypatch.setenv("PATH", str(tmp_path))

    def is_contended() -> bool:
        """Whether one waits for the other, or both compile."""
        started = len(calls.read_text().splitlines()) if calls.exists() else 0
        waits = any("->" in line and f":{root.stat().st_ino} " in line for line in LOCKS.read_text().splitlines())
        return started == 2 or (started == 1 and waits)

    with gate.open("r+b", buffering=0) as lines, ThreadPoolExecutor() as pool:
        made = [pool.submit(cached_library, "AVX2", True, root, sources) for _ in range(2)]
        wait_until(is_contended)
        lines.write(b"go\n" * 4)  # one for each run of the compiler
    assert made[0].result() == made[1].result()
    assert len(calls.read_text().splitlines()) == 2, "a source and the library of it"


@pytest.mark.parametrize("harm", ["mode", "owner", "folder"])
def test_a_library_that_others_could_have_written_is_compiled_again(sources: Path, tmp_path: Path, harm: str) -> None:
    if harm == "owner" and os.getuid() != 0:
        pytest.skip("a file can be given away by root alone")
    root, before = tmp_path / "cache", os.umask(0)
    try:
        library = cached_library("AVX2", True, root, sources)
    finally:
        os.umask(before)
    for path in (root, library.parent, library):
        assert not path.stat().st_mode & 0o077, "the umask does not open it"
    library.write_bytes(b"theirs")
    if harm == "owner":
        os.chown(library, 12345, 12345)
    else:
        (library if harm == "mode" else library.parent).chmod(0o777)
    assert cached_library("AVX2", True, root, sources).read_bytes() != b"theirs"
    library.write_bytes(b"kept")
    assert cached_library("AVX2", True, root, sources).read_bytes() == b"kept"


@pytest.mark.parametrize("jump_s", [0, 366 * 86400, -366 * 86400])
def test_a_library_just_made_stays_wherever_the_clock_was_before(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    fake_compiler(tmp_path, 'for last; do :; done\necho ours > "$last"')
    monkeypatch.setenv("PATH", str(tmp_path))
    root, now = tmp_path / "cache", int(time.time())
    for number in range(library_store.MAX_LIBRARIES + 1):
        (sources / "one.h").write_text(f"{number}")
        os.utime(cached_library("AVX2", True, root, sources), (now - jump_s,) * 2)
    (root / ".build-old").mkdir()
    os.utime(root / ".build-old", (now - jump_s,) * 2)
    (sources / "one.h").write_text("the last")
    assert cached_library("AVX2", True, root, sources).exists()
    assert len(list(root.glob("*/*"))) == library_store.MAX_LIBRARIES
    assert (root / ".build-old").exists() == (jump_s == 0)


@pytest.mark.skipif(os.getuid() != 0, reason="a file can be given away by root alone")
def test_a_cache_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to the user with number 12345"):
        cached_library("AVX2", True, tmp_path)


@needs_kernels
def test_only_torchs_openmp_is_loaded() -> None:
    load_level(HERE[0], True)
    maps = Path("/proc/self/maps").read_text().splitlines()
    copies = {line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line}
    assert len(copies) == 1
    assert "torch" in copies.pop()


@needs_kernels
def test_a_failing_compiler_is_reported_with_its_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path, "echo no such flag >&2; exit 3")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(Unavailable, match="exit code 3: no such flag"):
        cached_library(HERE[0], True, tmp_path / "cache")


# ── prebuilt ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@needs_kernels
def test_a_prebuilt_library_needs_neither_compiler_nor_cache(
    prebuilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded = load_level(HERE[0], True, prebuilt_folder=prebuilt)
    assert str(loaded) == f"C kernels, {HERE[0]}, prebuilt"
    assert loaded.library.op_line() == 32  # elements of 64 bytes
    assert not (tmp_path / "cache").exists()


@needs_kernels
@pytest.mark.parametrize("harm", ["sources", "missing", "digests", "nonsense"])
def test_an_unsuitable_prebuilt_library_is_compiled_again(prebuilt: Path, harm: str) -> None:
    digests, library = prebuilt / library_store.DIGESTS_NAME, prebuilt / prebuilt_name(HERE[0], True)
    if harm == "sources":  # were others: so their digest was another
        digests.write_text(json.dumps({library.name: "0" * 32}))
    elif harm == "missing":
        library.unlink()
    elif harm == "digests":
        digests.unlink()
    else:
        library.unlink()
        library.write_bytes(b"made for another machine")
    loaded = load_level(HERE[0], True, prebuilt_folder=prebuilt)
    assert str(loaded) == f"C kernels, {HERE[0]}, compiled here"
    assert prebuilt_library(HERE[-1], False, prebuilt) is None


def test_the_digest_depends_on_sources_and_flags(sources: Path) -> None:
    forms = [
        ("AVX2", True, FOR_ANY_MACHINE),
        ("AVX2", False, FOR_ANY_MACHINE),
        ("AVX-512", True, FOR_ANY_MACHINE),
        ("AVX2", True, ()),
        ("AVX2", True, FOR_ANY_MACHINE, "/bin/sh"),
    ]
    digests = {library_digest(*form, folder=sources) for form in forms}
    (sources / "one.h").write_text("\n")
    digests.add(library_digest(*forms[0], folder=sources))
    assert len(digests) == len(forms) + 1


# ── where compiled ones are kept ─────────────────────────────────────────────────────────────────────────────────────


def test_the_cache_folder_follows_xdg_cache_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache_folder() == Path("/home/somebody/.cache/tokenloom")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard ignores relative paths
    assert user_cache_folder() == Path("/home/somebody/.cache/tokenloom")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/x")
    assert user_cache_folder() == Path("/var/cache/x/tokenloom")


@needs_kernels
@pytest.mark.parametrize("harm", ["no folder", "full"])
def test_without_a_cache_folder_the_run_directory_or_a_temporary_folder_is_used(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    cache, spare, temporary = tmp_path / "cache", tmp_path / "spare", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    full = "echo 'error writing to -: No space left on device' >&2; exit 1"
    fake_compiler(tmp_path, f'for last; do :; done\ncase "$last" in {cache}/*) {full};; esac\ncp {compiled} "$last"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if harm == "no folder":
        cache.write_text("")
    assert select_ops(CPU, torch.bfloat16, spare_folder=spare).kernels == f"C kernels, {HERE[0]}, compiled here"
    assert len(list(spare.glob("*/kernels.so"))) == 1
    load_kernels.cache_clear()
    (tmp_path / "file").write_text("")
    assert type(select_ops(CPU, torch.bfloat16, spare_folder=tmp_path / "file")) is CpuOps
    assert list(temporary.iterdir()) == []  # the library is loaded, its file is gone


# ── never in silence ─────────────────────────────────────────────────────────────────────────────────────────────────


@needs_kernels
def test_without_compiler_or_folder_plain_torch_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tokenloom.kernels")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    found = [select_ops(CPU, torch.bfloat16, spare_folder=tmp_path / "file")]
    monkeypatch.setenv("PATH", str(tmp_path))
    found += [select_ops(CPU, torch.bfloat16), select_ops(CPU, torch.float16)]
    assert {type(ops) for ops in found} == {ReferenceOps}
    reasons = (
        "XDG_CACHE_HOME",
        "no C compiler (cc, gcc): install one",
        "no C kernels for float16: give --dtype",
    )
    for reason, ops, line in zip(reasons, found, caplog.messages, strict=True):
        assert ops.kernels.startswith("plain torch: ") and reason in ops.kernels and reason in line


def test_enforce_reference_disables_the_kernels_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    ops = select_ops(CPU, torch.bfloat16, enforce_reference=True)
    assert type(ops) is ReferenceOps and ops.kernels == "plain torch: --enforce-reference"
    assert caplog.messages == []
    if HERE:
        assert type(select_ops(CPU, torch.bfloat16)) is CpuOps
