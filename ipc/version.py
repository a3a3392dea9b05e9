"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def tokenloom_version() -> str:
    """Return the installed version; "unknown" in a checkout that was never installed."""
    try:
        return version("tokenloom")
    except PackageNotFoundError:  # a checkout that was never installed
        return "unknown"
