"""The machine that runs the engines: unpacked payload, entry points and environment of servers."""

from __future__ import annotations

import compileall
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from enum import StrEnum
from pathlib import Path

from gpu_engines.model import ModelSize
from gpu_engines.packing.contents import ROOT
from gpu_engines.packing.pack import MANIFEST

HERE = Path(__file__).parent
# Entry points that the tests' plugins would have if they were installed.
_PLUGINS = {
    "vllm": {"vllm.general_plugins": ["kvferry_one_gpu"]},
    "sglang": {"sglang.srt.plugins": ["kvferry_one_gpu", "kvferry_broken"]},
    "mooncake": {},
}


class DeviceKind(StrEnum):
    """Where the engines run. A CPU is for trying the cases themselves."""

    CUDA = "cuda"
    CPU = "cpu"


class Machine:
    """Prepared folders of one run. ``site`` holds the unpacked payload, if there is one.

    ``models`` has a model of random weights for each of ``sizes``.
    """

    def __init__(
        self,
        engine: str,
        device: DeviceKind,
        payload: Path | None,
        sizes: Iterable[ModelSize] = (),
    ) -> None:
        self.engine = engine
        self.device = device
        self.folder = Path(tempfile.gettempdir()) / "kvferry-gpu-engines"
        self.folder.mkdir(exist_ok=True)
        self.models = {size: self.folder / "-".join(map(str, size)) for size in sizes}
        writing = self._write_models()
        self.site = None if payload is None else _unpacked(payload, self.folder)
        if any(process.wait() for process in writing):
            raise RuntimeError("a model could not be written; the output above says why")
        self._points = Path(tempfile.mkdtemp(prefix="entry-points-", dir=self.folder))
        self._offer_plugins()

    @property
    def is_cuda(self) -> bool:
        """Return whether the engines run on a GPU."""
        return self.device is DeviceKind.CUDA

    def environment(self, *shims: Path) -> dict[str, str]:
        """Return the environment of every process: this checkout, the shims and the payload."""
        path = [*shims, ROOT / "src", ROOT, self._points]
        path += [self.site] if self.site else []
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "UCX_LOG_LEVEL": "error",
            "GLOO_SOCKET_IFNAME": "lo",
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
            # Otherwise Triton's attention kernels round float32 to 10 bits of mantissa, and answers
            # depend on the shape of a batch: logits differ by 0.05, as much as the best two may.
            "TRITON_F32_DEFAULT": "tf32x3",
        }

    def _write_models(self) -> list[subprocess.Popen[bytes]]:
        """Start to write the models that are missing, each in a process of its own."""
        return [
            subprocess.Popen(
                [sys.executable, "-m", "gpu_engines.model", folder, *map(str, size)],
                env={**os.environ, "PYTHONPATH": str(HERE.parent)},
            )
            for size, folder in self.models.items()
            if not (folder / "model.safetensors").exists()
        ]

    def _offer_plugins(self) -> None:
        script = ROOT / "scripts" / "entry-points"
        subprocess.run([sys.executable, script, self._points], check=True)
        for group, names in _PLUGINS[self.engine].items():
            info = self._points / f"kvferry_gpu_engines_{self.engine}-0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: kvferry-gpu-engines-{self.engine}\nVersion: 0\n"
            )
            lines = [f"[{group}]", *(f"{name} = {name}:register" for name in names), ""]
            (info / "entry_points.txt").write_text("\n".join(lines))


def _unpacked(payload: Path, folder: Path) -> Path:
    """Return the folder with a payload's packages; unpack and compile them the first time."""
    manifest = json.loads((payload / MANIFEST).read_text())
    site = folder / f"site-{manifest['digest'][:12]}"
    done = site / ".unpacked"
    if not done.exists():
        archives = [payload / name for name in manifest["archives"]]
        with ProcessPoolExecutor(len(archives)) as pool:
            list(pool.map(_extract, archives, [site] * len(archives)))
        compileall.compile_dir(site, quiet=2, workers=0)
        done.touch()
    return site


def _extract(archive: Path, site: Path) -> None:
    with tarfile.open(archive) as opened:
        for member in opened:
            # Before tarfile, which fails if another process makes the folder at the same time.
            (site / member.name).parent.mkdir(parents=True, exist_ok=True)
            opened.extract(member, site, filter="tar")


def shims(*names: str) -> Sequence[Path]:
    """Return folders below ``shims/`` and of the engines' tests."""
    places = {
        "vllm": HERE / "shims/vllm",
        "sglang": HERE / "shims/sglang",
        "sglang on a CPU": ROOT / "tests_sglang/standins",
        "broken": ROOT / "tests_sglang/broken",
    }
    return [places[name] for name in names]
