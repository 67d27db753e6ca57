"""The mutation tool: its mutants, its judges and its named mutants."""

from __future__ import annotations

from pathlib import Path

from mutants.judges import JUDGES, judges_of
from mutants.mutate import mutant_of, mutants
from mutants.named import NAMED, named_mutants

ROOT = Path(__file__).parents[1]
SOURCE = '''"""Words."""
LIMIT = 3


class Till:
    def __init__(self) -> None:
        self.coins = 0

    def add(self, coins: int, log: Log) -> None:
        """Words."""
        if coins < 1 and not self.shut:
            log.info("nothing to add")
        self.coins += coins
        self.tell()

    def find(self, coins: list[int]) -> int:
        assert coins
        for coin in coins:
            if coin == min(coins) + 2:
                continue
            return coin
        raise KeyError(f"{len(coins) + 1} coins")
'''
EXPECTED = """
self.coins = 1
return
if (not (coins < 1 and not self.shut)):
if coins < 1 or not self.shut:
if coins <= 1 and not self.shut:
if coins < 2 and not self.shut:
if coins < 1 and self.shut:
pass
pass
if (not (coin == min(coins) + 2)):
if coin == min(coins) - 2:
if coin == max(coins) + 2:
if coin == min(coins) + 3:
break
"""


def test_code_is_mutated_and_prose_is_not() -> None:
    found = mutants("till.py", SOURCE)
    assert [each.after for each in found] == EXPECTED.split("\n")[1:-1]
    lines = SOURCE.splitlines()
    assert all(each.before == lines[each.line - 1].strip() for each in found)


def test_wide_characters_keep_their_place() -> None:
    (mutant,) = mutants("a.py", "def f() -> int:\n    return g('→') and 'é'\n")
    assert mutant.source == "def f() -> int:\n    return g('→') or 'é'\n"


def test_invalid_python_is_no_mutant() -> None:
    assert mutant_of("a.py", "x = 1\n", "broken", "x = = 1\n") is None


def test_every_named_mutant_still_applies() -> None:
    assert [each.kind for each in named_mutants(ROOT)] == [each.name for each in NAMED]


def test_every_module_has_judges_and_every_judge_has_tests() -> None:
    names = {
        path: [judge.name for judge in judges_of(f"src/kvferry/{path}")]
        for path in ("endpoint/runner/runner.py", "endpoint/loop/loop.py", "protocol/source.py")
    }
    assert names == {
        "endpoint/runner/runner.py": ["runner", "sim", "machines"],
        "endpoint/loop/loop.py": ["pair", "pieces", "processes"],
        "protocol/source.py": ["sim", "machines", "parts"],
    }
    for test in (test for judge in JUDGES for test in judge.tests):
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text()
        assert f"def {name.partition('[')[0]}(" in text or not name
