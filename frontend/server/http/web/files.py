"""The files of the web pages."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "static"
CHAT_FILES = tuple(sorted(file.name for file in (FOLDER / "chat").iterdir()))
