"""A sampled docstring comes with all that its reader needs to know of the definition."""

from __future__ import annotations

from tokenloom.scripts.checks.prose import docstrings, sample, signature

SOURCE = '''
"""Module."""
class Door(Wall, frozen=True):
    """Class."""
    width: float = 0.9
    material: str
    def is_open(self) -> bool:
        """Method."""
    async def close(self, *, softly: bool = True) -> None:
        """Awaited method."""
        def creak():
            """Inner function."""
async def knock(times: int) -> str:
    """Function."""
def undocumented(): ...
'''


def test_a_signature_shows_async_the_class_and_the_fields() -> None:
    shown = {text: signature(node, owner) for node, owner, text in docstrings(SOURCE)}
    assert shown == {
        "Module.": ["module"],
        "Class.": ["class Door(Wall):", "  width: float = 0.9", "  material: str"],
        "Method.": ["class Door(Wall):", "  def is_open(self) -> bool"],
        "Awaited method.": ["class Door(Wall):", "  async def close(self, *, softly: bool=True) -> None"],
        "Inner function.": ["def creak()"],
        "Function.": ["async def knock(times: int) -> str"],
    }


def test_a_sample_is_the_same_for_the_same_seed() -> None:
    drawn = list(sample(7, 18))
    assert len(drawn) == 7 and drawn == list(sample(7, 18)) != list(sample(7, 19))
    assert all(len(each.splitlines()) >= 3 for each in drawn)
