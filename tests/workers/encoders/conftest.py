"""Each model once for all tests of encoders."""

from __future__ import annotations

import pytest

from tokenloom.tests.workers.encoders.media_case import Cases, MediaCase, make_case


@pytest.fixture(scope="session")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    cases = dict[str, MediaCase]()

    def find(name: str) -> MediaCase:
        if name not in cases:
            cases[name] = make_case(name, tmp_path_factory.mktemp("models") / name)
        return cases[name]

    return find
