"""The cluster key: its file, derived keys, and addresses that need one."""

from __future__ import annotations

import os
import pickle
import stat
from pathlib import Path

import pytest
import zmq

from kvferry.errors import InputError
from kvferry.security.keys import ClusterKey, CurvePair, checked_bind_address


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.key"
    ClusterKey.new().write(path)
    return path


def test_a_written_key_can_be_read(tmp_path: Path) -> None:
    key = ClusterKey.new()
    key.write(tmp_path / "key")
    again = ClusterKey.read(tmp_path / "key")
    assert again == key
    assert again.server.secret == key.server.secret
    assert again != ClusterKey.new()


def test_only_the_owner_can_read_the_file(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o644])
def test_a_file_that_others_can_read_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(InputError, match="chmod 600"):
        ClusterKey.read(path)


def test_a_key_is_never_overwritten(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(InputError, match="exists"):
        ClusterKey.new().write(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"kvferry-key-1:",
        b"kvferry-key-1:zz",
        b"kvferry-key-1:" + b"0" * 62,
        b"kvferry-key-1:" + b"0" * 9999,
        b"kvferry-key-2:" + b"0" * 64,
        b"0" * 64,
        b"\xff" * 100,
    ],
)
def test_a_malformed_key_file_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not a cluster key; make a cluster key with"):
        ClusterKey.read(path)


def test_missing_files_folders_and_pipes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        ClusterKey.read(tmp_path / "none")
    with pytest.raises(InputError, match=r"cannot read|is not a file"):
        ClusterKey.read(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(InputError, match="is not a file"):
        ClusterKey.read(tmp_path / "pipe")
    with pytest.raises(InputError, match="check the path"):
        ClusterKey.read("a\0b")
    with pytest.raises(InputError, match="No such file"):
        ClusterKey.new().write(tmp_path / "none" / "key")


def test_the_environment_variable_names_a_file(path: Path) -> None:
    assert ClusterKey.from_environment({}) is None
    assert ClusterKey.from_environment({"KVFERRY_KEY_FILE": str(path)}) == ClusterKey.read(path)
    with pytest.raises(InputError, match="KVFERRY_KEY_FILE is empty"):
        ClusterKey.from_environment({"KVFERRY_KEY_FILE": ""})


def test_each_purpose_has_its_own_key() -> None:
    key = ClusterKey(bytes(range(32)))
    derived = {key.server.secret, key.client.secret, key.server.public, key.client.public, key.http}
    assert len(derived) == 5
    assert zmq.curve_public(key.client.secret) == key.client.public


def test_derived_keys_do_not_change() -> None:
    key = ClusterKey(bytes(range(32)))
    assert key.name == "c04e7852"
    assert key.server.public == b"GHBx(LW#o-1w{?.V!}K?i@uY8NK}BW{YON9K]jMV"
    assert key.http.hex() == "3d16fe71d007407a7cde7eda6fe678d3ccfd8736737dd63986f3227e28d51c9f"


def test_repr_does_not_show_the_secret(path: Path) -> None:
    key = ClusterKey.read(path)
    secret = path.read_text().strip().partition(":")[2]
    shown = f"{key!r} {key} {key.server!r} {key.client!r} {[key.server]}"
    for hidden in (secret, key.server.secret.decode(), key.client.secret.decode(), key.http.hex()):
        assert hidden not in shown
    assert repr(key) == f"<ClusterKey {key.name}>"


def test_a_key_can_be_pickled() -> None:
    key = ClusterKey.new()
    assert pickle.loads(pickle.dumps(key)) == key
    assert isinstance(key.server, CurvePair)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert checked_bind_address(host, 0, None) in ("127.0.0.1", "127.8.8.8", "::1")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "::ffff:192.0.2.7"])
def test_other_addresses_need_a_key(host: str) -> None:
    with pytest.raises(InputError, match="make a cluster key with `kvferry key FILE`"):
        checked_bind_address(host, 0, None)
    assert checked_bind_address(host, 0, ClusterKey.new()) == host


@pytest.mark.parametrize("host", ["", "no.such.host.invalid", "a" * 300, "a\0b", "münchen\ud800"])
def test_an_unknown_host_is_refused(host: str) -> None:
    with pytest.raises(InputError, match="give an IP address"):
        checked_bind_address(host, 0, ClusterKey.new())


@pytest.mark.parametrize("port", [-1, 65536])
def test_an_invalid_port_is_refused(port: int) -> None:
    with pytest.raises(InputError, match="a port is between 0 and 65535"):
        checked_bind_address("127.0.0.1", port, None)
