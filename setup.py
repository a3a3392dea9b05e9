"""The part of the build that pyproject.toml cannot express: a wheel holds the compiled C kernels and a description
without dead links.

The kernels are compiled into the build folder, never into the checkout: an editable install compiles at first use.
Without a C compiler, or on a processor other than x86-64, the wheel is one for any machine and compiles at first use.
"""

from __future__ import annotations

import platform
import re
import sys
import types
from functools import partial
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
KERNELS = "kernels/cpu"
PREBUILT = Path("tokenloom", KERNELS, "prebuilt")  # in the build folder
OLDEST_GLIBC = 17  # minor version of glibc 2.17, the baseline of the oldest manylinux tag


def build_kernels(folder: Path) -> None:
    """Compile the libraries of all levels; print a line for each, which pip shows with -v, and the omitted ones."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        print("the wheel is built without C kernels: they are for Linux on x86-64")
        return
    package = types.ModuleType("tokenloom_build")  # the folder as a package, without importing torch
    package.__path__ = [str(ROOT / KERNELS)]
    sys.modules[package.__name__] = package
    from tokenloom_build.library_store import build_prebuilt

    for reason in build_prebuilt(folder, partial(print, flush=True)):
        print(f"kernels are left out of the wheel and compiled at first use: {reason}")


class BuildPackage(build_py):
    """Builds the modules and the kernels."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        return [each for each in found if each[1] != "setup"]

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            build_kernels(Path(self.build_lib) / PREBUILT)


class BuildWheel(bdist_wheel):
    """Builds a wheel for any Python and for the C libraries that its kernels need."""

    def run(self) -> None:
        self.run_command("build")
        libraries = (Path(self.get_finalized_command("build").build_lib) / PREBUILT).glob("*.so")
        self._versions = {version for each in libraries for version in glibc_versions(each)}
        self.root_is_pure = not self._versions
        self.distribution.has_ext_modules = lambda: not self.root_is_pure  # else everything goes to .data/purelib
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        if self.root_is_pure:
            return ("py3", "none", "any")
        return ("py3", "none", f"manylinux_2_{max(OLDEST_GLIBC, *self._versions)}_{platform.machine()}")


def glibc_versions(library: Path) -> set[int]:
    """Return N of each version 2.N of the C library whose symbols this library uses, from its string table."""
    return {int(version) for version in re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes())}


def index_description() -> str:
    """Return README.md for the package index, without pictures and with links to files replaced by their names."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^]]*\]\([^)]+\)\n\n", "", text)

    def name_of(link: re.Match[str]) -> str:
        label, target = link.groups()
        return f"`{target}`" if label == target else f"{label}: `{target}`"

    text = re.sub(r"\[([^]]+)\]\((?!https?:)([^)]+)\)", name_of, text)
    return f"{text}\nThe files that are named here lie in the source distribution.\n"


setup(
    long_description=index_description(),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildPackage, "bdist_wheel": BuildWheel},
)
