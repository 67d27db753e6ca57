"""ARCHITECTURE.md names what is there: paths, rows in their order, threads. Links lead on."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.testing.sim import BREAKS, SCENARIOS
from kvferry.testing.sim.cluster import Machines
from kvferry.transports.base import Transport
from kvferry.transports.transport_set import TransportSet

ROOT = Path(__file__).parents[1]
CODE = ROOT / "src" / "kvferry"
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PATH = re.compile(r"`([\w./*-]+(?:\.py|\.toml|\.md|/))`")

# ---------------------------------------------------------------- paths


def found(name: str, before: Path | None) -> list[Path]:
    """The file of a path: below a root, or for a bare name beside the file named before."""
    beside = [] if before is None or "/" in name else [before, before.parent]
    folders = [*beside, CODE, ROOT]
    return next((there for folder in folders if (there := sorted(folder.glob(name)))), [])


def named(line: str) -> Iterator[tuple[str, list[Path]]]:
    """The paths of a line, and the files that they are."""
    before = None
    for name in PATH.findall(line):
        there = found(name, before)
        if there and "/" in name:
            before = there[0] if there[0].is_dir() else there[0].parent
        yield name, there


def test_every_path_exists() -> None:
    paths = [each for line in TEXT.splitlines() for each in named(line)]
    assert len(paths) > 50
    assert [name for name, there in paths if not there] == []


def test_a_path_that_is_gone_would_be_noticed() -> None:
    line = "| | `endpoint/loop/loop.py`, `sides.py`, `gone.py`, `endpoint/ground.py` | |"
    assert [name for name, there in named(line) if not there] == ["gone.py", "endpoint/ground.py"]


# ---------------------------------------------------------------- rows


class Row:
    """One row of the code map: its name, and the lines that say what is in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: list[str] = []

    @property
    def parts(self) -> set[str]:
        """kvferry's names in it: packages, and modules beside them."""
        paths = [path for line in self.lines for _, there in named(line) for path in there]
        return {path.relative_to(CODE).parts[0].removesuffix(".py") for path in paths}


def rows() -> list[Row]:
    table = TEXT.split("## Code map")[1].split("## Invariants")[0]
    made: list[Row] = []
    for line in table.splitlines():
        if not re.match(r"\| (?!package|-)", line):
            continue
        name, where = (cell.strip() for cell in line.split("|")[1:3])
        if name:
            made.append(Row(name))
        made[-1].lines.append(where)
    return made


def layers() -> dict[str, int]:
    """The place of each part of kvferry in the import rules, from the top."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (rule,) = (contract for contract in contracts if contract["type"] == "layers")
    return {
        part: place
        for place, layer in enumerate(rule["layers"])
        for part in re.findall(r"kvferry\.(\w+)", layer)
        if (CODE / part).is_dir() or (CODE / f"{part}.py").is_file()
    }


def test_the_rows_are_the_layers() -> None:
    assert {part for row in rows() for part in row.parts} == set(layers())


def test_the_rows_are_in_the_order_of_the_layers() -> None:
    place = layers()
    lowest = -1
    for row in rows():
        places = {place[part] for part in row.parts}
        assert min(places) >= lowest, row.name
        lowest = max(places)


# ---------------------------------------------------------------- threads

# Begin like the name of a thread, and are none.
OTHERS = {
    "kvferry-key-1:",
    "kvferry-plan-2",
    "kvferry-{secrets.token_hex(8)}",
}


def texts(path: Path) -> Iterator[str]:
    """The string literals of a module, with ``{...}`` for what is put into them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield ast.unparse(node)[2:-1]
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner
        ):
            yield node.value


def test_the_threads_are_those_of_the_code() -> None:
    all_texts = {text for path in CODE.rglob("*.py") for text in texts(path)}
    names = {text for text in all_texts if re.fullmatch(r"kvferry-[^ ]*", text)}
    assert names >= OTHERS
    there = {re.sub(r"\{[^}]*\}", "*", name) for name in names - OTHERS}
    table = TEXT.split("## Threads")[1].split("\n## ")[0]
    told = {re.sub(r"[A-Z][A-Z/]*", "*", name) for name in re.findall(r"`(kvferry-[^`]+)`", table)}
    assert told == there


# ---------------------------------------------------------------- links


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8"))
    broken = []
    for link in links:
        name, _, anchor = link.partition("#")
        there = (page.parent / name).resolve() if name else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(link)
    assert broken == []


# ---------------------------------------------------------------- invariants

# Callers of transports, as in the invariant: set-up, the mover, and the owner for writes that
# are made at once.
CALLS = {
    "setup.py": {"adopt", "close", "make", "of", "offers", "register"},
    "transport_thread.py": {"close", "connect", "disconnect", "poll", "write"},
    "loop": {"prebind", "check_write", "write_now"},
}


def transport_calls(source: str) -> set[str]:
    """Methods that are called on something named after a transport."""
    methods = {name for kind in (Transport, TransportSet) for name in vars(kind)}
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            whose = ast.unparse(node.func.value).rpartition(".")[2].lower()
            if node.func.attr in methods and "transport" in whose and "thread" not in whose:
                found.add(node.func.attr)
    return found


def test_only_the_named_modules_touch_a_transport() -> None:
    found: dict[str, set[str]] = {}
    for path in (CODE / "endpoint").rglob("*.py"):
        place = path.relative_to(CODE / "endpoint").parts[0]
        found.setdefault(place, set()).update(transport_calls(path.read_text(encoding="utf-8")))
    assert {place: calls for place, calls in found.items() if calls} == CALLS
    assert transport_calls("self._setup.transports.close(); reached.transport.poll()") == {
        "close",
        "poll",
    }
    for name in ("write_now", "check_write", "prebind"):
        assert f"`{name}`" in TEXT


# ---------------------------------------------------------------- counts

REAL = Machines()
OF_THE_RUNNER = ("source_runner", "target_runner", "sessions", "ports")
COUNTS = {
    r"(\d+) (?:deliberately )?broken rules": len(BREAKS),
    r"broken rules, (\d+) of them the runner's": sum(
        replace(one.machines, **{name: getattr(REAL, name) for name in OF_THE_RUNNER}) == REAL
        for one in BREAKS.values()
    ),
    r"(\d+) named (?:situations|scenarios)": len(SCENARIOS),
}


@pytest.mark.parametrize("pattern", COUNTS)
def test_pages_count_right(pattern: str) -> None:
    """Pages state current counts; results keep those of their day."""
    said = {
        path.name: int(number)
        for path in PAGES
        if path.name != "results.md"
        for number in re.findall(pattern, " ".join(path.read_text(encoding="utf-8").split()))
    }
    assert said
    assert set(said.values()) == {COUNTS[pattern]}, said
