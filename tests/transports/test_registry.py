"""Transports by name, with packages that exist only in a test's import path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.errors import TransportError
from kvferry.transports.registry import available, transport_class
from kvferry.transports.shm import ShmTransport


class Packages:
    """Installs packages that provide transports."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, package: str, entries: str, code: str = "") -> None:
        info = self._folder / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[kvferry.transports]\n{entries}\n")
        (self._folder / f"{package}.py").write_text(code)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    monkeypatch.syspath_prepend(tmp_path)
    return Packages(tmp_path)


LACKING = """
from kvferry.transports.shm import ShmTransport
class Lacking(ShmTransport):
    @classmethod
    def missing(cls):
        return "install libpigeon, e.g. with apt install libpigeon"
"""


def test_shm_is_always_available() -> None:
    assert transport_class("shm") is ShmTransport
    assert available()["shm"] is None


def test_all_built_in_names_are_known() -> None:
    assert {"shm", "nixl", "mooncake", "cuda"} <= set(available())


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TransportError, match=r"no transport 'pigeon'; choose one of .*nixl, shm"):
        transport_class("pigeon")


def test_another_package_can_add_a_transport(packages: Packages) -> None:
    code = "from kvferry.transports.shm import ShmTransport\nclass Mine(ShmTransport):\n    pass\n"
    packages.add("added_ferry", "added = added_ferry:Mine", code)
    assert transport_class("added").__name__ == "Mine"
    assert available()["added"] is None


def test_the_transport_says_what_is_missing(packages: Packages) -> None:
    packages.add("lacking_ferry", "lacking = lacking_ferry:Lacking", LACKING)
    with pytest.raises(TransportError, match=r"^install libpigeon, e\.g\. with apt install"):
        transport_class("lacking")
    assert available()["lacking"] == "install libpigeon, e.g. with apt install libpigeon"


@pytest.mark.parametrize(
    ("name", "code", "sentence"),
    [
        ("a", "import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("b", "raise OSError('libpigeon.so.1: no such file')", "OSError: libpigeon.so.1"),
        ("c", "", "AttributeError"),
        (
            "d",
            "Mine = 5",
            "d_ferry:Mine, which is not a Transport class; correct the entry point",
        ),
        ("e", "class Mine: pass", "which is not a Transport"),
    ],
)
def test_a_broken_package_is_reported_by_name(
    packages: Packages, name: str, code: str, sentence: str
) -> None:
    packages.add(f"{name}_ferry", f"{name} = {name}_ferry:Mine", code)
    with pytest.raises(TransportError) as caught:
        transport_class(name)
    assert sentence in str(caught.value)
    assert f"{name}_ferry" in str(caught.value)
    found = available()
    assert found[name] == str(caught.value)
    assert found["shm"] is None


def test_two_packages_with_one_name_are_refused(packages: Packages) -> None:
    packages.add("first_ferry", "twice = first_ferry:Mine")
    packages.add("second_ferry", "twice = second_ferry:Mine")
    with pytest.raises(TransportError, match="both provide a transport 'twice'; uninstall one"):
        transport_class("twice")


def test_transports_are_imported_on_request() -> None:
    code = (
        "import sys; from kvferry.transports.registry import transport_class; "
        "transport_class('shm'); "
        "print(sorted(name for name in sys.modules if 'nixl' in name or 'mooncake' in name))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
