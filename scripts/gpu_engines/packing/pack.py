"""Make a payload: download wheels, select their files, and compress them into archives."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from gpu_engines.packing import fat_binary
from gpu_engines.packing.contents import ARCH, CONTENTS, ROOT, Selection, linked, travels

# Archives, so that the GPU machine unpacks them in parallel.
NUM_ARCHIVES = 4
MANIFEST = "payload.json"
# Limit of the project's tree and the carried folder together.
LIMIT_BYTES = 64 << 20
# The interpreter on the GPU machine, and the C libraries that its system satisfies.
PYTHON = "3.12"
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (17, 28, 31, 34, 35))


def pack(engine: str, folder: Path) -> int:
    """Write the payload of an engine into ``folder/ENGINE``; return the exit status."""
    contents = CONTENTS[engine]
    wheels = _downloaded(contents.requirements, folder / "wheels")
    with TemporaryDirectory(dir=folder) as made:
        tree = Path(made)
        for wheel in wheels:
            _unpack(wheel, tree, contents.selections.get(_distribution(wheel), Selection()))
        _prune(tree, contents.selections)
        target = folder / engine
        _compress(tree, target, _versions(wheels))
    total = sum(path.stat().st_size for path in target.iterdir()) + _tree_bytes()
    print(f"{target}: {total / 2**20:.1f} MiB travel with the project's own tree")
    if total > LIMIT_BYTES:
        print(f"more than {LIMIT_BYTES >> 20} MiB: leave more out in {__package__}.contents")
        return 1
    return 0


def _downloaded(requirements: Path, folder: Path) -> list[Path]:
    """Return one wheel for each pinned requirement; download those that are missing."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
    pip += ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--dest", str(folder)]
    pip += [f"--platform={platform}" for platform in PLATFORMS]
    wanted = dict(_pins(requirements))
    if missing := [pin for pin in wanted.items() if pin not in _present(folder)]:
        print(f"downloading {len(missing)} wheels for Python {PYTHON}", flush=True)
        subprocess.run([*pip, *(f"{name}=={version}" for name, version in missing)], check=True)
    present = _present(folder)
    return [present[pin] for pin in wanted.items()]


def _pins(requirements: Path) -> list[tuple[str, str]]:
    lines = [line.strip() for line in requirements.read_text().splitlines()]
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return [(_normal(name), version) for name, version in pins]


def _present(folder: Path) -> dict[tuple[str, str], Path]:
    return {(_distribution(path), path.name.split("-")[1]): path for path in folder.glob("*.whl")}


def _distribution(wheel: Path) -> str:
    return _normal(wheel.name.split("-")[0])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _versions(wheels: Sequence[Path]) -> dict[str, str]:
    return {_distribution(path): path.name.split("-")[1] for path in wheels}


def _unpack(wheel: Path, tree: Path, selection: Selection) -> None:
    """Write the files of a wheel that travel into the tree, as an installer would place them."""
    written: list[Path] = []
    with zipfile.ZipFile(wheel) as opened:
        for info in opened.infolist():
            path = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", info.filename)
            is_other_data = re.match(r"[^/]+\.data/", path)
            if not (info.is_dir() or is_other_data) and travels(path, selection):
                place = tree / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(_without_hashes(path, opened.read(info)))
                written.append(place)
    for changed, (old, new) in selection.replaced.items():
        text = (tree / changed).read_text()
        if text.count(old) != 1:
            raise ValueError(f"{changed} of {wheel.name} has another text; correct its replacement")
        (tree / changed).write_text(text.replace(old, new))
    objects = [path for path in written if ".so" in path.name]
    if selection.roots is not None:
        _keep_linked(objects, selection.roots, tree)
    elif not selection.pruned:
        # Debugging symbols only. Bundles with their own libraries are left as they are, because
        # stripping may break what auditwheel has patched.
        for each in objects:
            subprocess.run(["strip", "--strip-debug", each], check=True, stderr=subprocess.DEVNULL)


def _without_hashes(path: str, data: bytes) -> bytes:
    """Return a wheel's file; a list of files without its hashes, which do not compress."""
    if not path.endswith(".dist-info/RECORD"):
        return data
    return re.sub(rb",sha256=[^,]*,\d*$", b",,", data, flags=re.MULTILINE)


def _keep_linked(objects: Sequence[Path], roots: str, tree: Path) -> None:
    """Delete shared objects that neither match ``roots`` nor are linked to."""
    needed = {str(path.relative_to(tree)): _needed(path) for path in objects}
    for name in needed.keys() - linked(needed, roots):
        (tree / name).unlink()


def _needed(path: Path) -> tuple[str, ...]:
    """Return the file names that a shared object links to."""
    shown = subprocess.run(["readelf", "-d", path], check=True, capture_output=True, text=True)
    return tuple(re.findall(r"\(NEEDED\).*\[(.*)\]", shown.stdout))


def _prune(tree: Path, selections: Mapping[str, Selection]) -> None:
    """Prune CUDA code to one architecture, in place."""
    files = {
        tree / name: only for each in selections.values() for name, only in each.pruned.items()
    }
    data = {path: path.read_bytes() for path in files}
    spares = [spare for each in data.values() if (spare := fat_binary.filler(each, ARCH))]
    spare = min(spares, key=len, default=b"")
    for path, only in files.items():
        path.write_bytes(fat_binary.pruned(data[path], ARCH, only=only, spare=spare))


def _compress(tree: Path, target: Path, versions: Mapping[str, str]) -> None:
    """Write the archives and their manifest."""
    target.mkdir(parents=True, exist_ok=True)
    for old in target.iterdir():
        old.unlink()
    # Each archive gets the next largest file when it is the smallest: similar sizes.
    parts: list[list[Path]] = [[] for _ in range(NUM_ARCHIVES)]
    sizes = [0] * NUM_ARCHIVES
    files = [path for path in tree.rglob("*") if path.is_file()]
    natives = [path for path in files if ".so" in path.name]
    for path in sorted(natives, key=lambda path: -path.stat().st_size):
        smallest = sizes[1:].index(min(sizes[1:])) + 1
        parts[smallest].append(path)
        sizes[smallest] += path.stat().st_size
    # Text compresses best beside other text.
    parts[0] = sorted(set(files) - set(natives))
    archives = [target / f"{number}.tar.xz" for number in range(NUM_ARCHIVES)]
    print(f"compressing {sum(p.stat().st_size for p in files) / 2**20:.0f} MiB", flush=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_archive, archives, parts, [tree] * NUM_ARCHIVES))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in archives)).hexdigest()
    manifest = {"digest": digest, "archives": [p.name for p in archives], "versions": versions}
    (target / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _archive(archive: Path, files: Sequence[Path], tree: Path) -> None:
    with tarfile.open(archive, "w:xz", preset=6) as opened:
        for path in files:
            opened.add(path, str(path.relative_to(tree)))


def _tree_bytes() -> int:
    """Return the size of the project's files that git knows or does not ignore."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.split(b"\0")
    return sum((ROOT / name.decode()).stat().st_size for name in names if name)
