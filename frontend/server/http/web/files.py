"""The files of the web pages."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "static"
ASSETS = tuple(  # scripts and styles, as FOLDER/NAME
    sorted(f"{folder}/{file.name}" for folder in ("chat", "docs") for file in (FOLDER / folder).iterdir())
)
