"""Fixtures of the commands about models."""

from __future__ import annotations

from tokenloom.tests.frontend.cli.models.hub_commands import hub, models, run

__all__ = ["hub", "models", "run"]
