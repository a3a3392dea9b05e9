"""The version of what is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def tokenloom_version() -> str:
    try:
        return version("tokenloom")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"
