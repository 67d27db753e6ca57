"""Time of a decoding step of the reference engine, by context and batch, on one rank.

    .venv/bin/python benchmarks/serve_engine.py [--model FOLDER] [--threads N] [--device cuda]

The cache is filled with noise, and the requests start as if it had been transferred, so no prompt
is computed. Every step's logprobs must be finite. Times are medians of the steps. CPU time counts
all threads; other load on the machine disturbs it less. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvferry.reference.engine.cache import TORCH_DTYPES
from kvferry.reference.engine.engine import Engine
from kvferry.reference.engine.requests import EngineRequest, EngineRole, Produced, Sample, Sampling
from kvferry.reference.models.find import find_model
from kvferry.reference.options import EngineOptions

CONTEXTS = (64, 512, 1600)
BATCHES = (1, 4, 8)
STEPS, WARM_UP = 8, 2


def fill_with_noise(engine: Engine) -> None:
    memory = engine.ranks.worker.cache.memory.view(TORCH_DTYPES[engine.options.dtype])
    memory.copy_(torch.randn(1 << 20).repeat(-(-len(memory) // (1 << 20)))[: len(memory)])


def start(engine: Engine, batch: int, context: int) -> None:
    """Start requests that have ``context`` tokens in the cache."""
    prompts = np.random.default_rng(0).integers(engine.config.vocab, size=(batch, context))
    sampling = Sampling(logprobs=1)
    for i, prompt in enumerate(prompts.tolist()):
        engine.add(
            EngineRequest(
                id=str(i),
                prompt=tuple(prompt),
                max_tokens=WARM_UP + STEPS + 1,
                role=EngineRole.DECODE,
                sampling=sampling,
                ignore_end=True,
            )
        )
    engine.step()
    for i in range(batch):
        engine.arrived(str(i), Sample(str(i), 1))


def one_step(engine: Engine, batch: int) -> tuple[float, float]:
    """Return the wall and CPU seconds of a step."""
    wall, cpu = time.perf_counter(), time.process_time()
    outputs = engine.step()
    spent = time.perf_counter() - wall, time.process_time() - cpu
    logprobs = [
        value for o in outputs if isinstance(o, Produced) for value in o.sample.top.values()
    ]
    finite = [value for value in logprobs if math.isfinite(value)]
    if len(finite) != batch:
        raise SystemExit(f"a step of {batch} requests gave the logprobs {logprobs}")
    return spent


def case(engine: Engine, batch: int, context: int) -> dict[str, Any]:
    start(engine, batch, context)
    times = [one_step(engine, batch) for _ in range(WARM_UP + STEPS)][WARM_UP:]
    if not engine.idle:
        raise SystemExit("the requests should have ended with the last step")
    wall_ms, cpu_ms = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    print(f"{context:8} {batch:6} {wall_ms:10.1f} {cpu_ms:10.1f} {1e3 * batch / wall_ms:10.1f}")
    return {
        "context": context,
        "batch": batch,
        "step_ms": round(wall_ms, 2),
        "cpu_ms": round(cpu_ms, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds per decoding step of the engine.")
    parser.add_argument("--model", default="", help="a model's folder (default: SmolLM2-135M)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    folder: Path = find_model(args.model).folder
    reach = max(CONTEXTS) + WARM_UP + STEPS + 1 + EngineOptions().page
    options = EngineOptions(
        threads=args.threads, device=args.device, cache_tokens=max(BATCHES) * reach
    )
    with Engine(folder, options) as engine:
        fill_with_noise(engine)
        print(f"{'context':>8} {'batch':>6} {'wall ms':>10} {'CPU ms':>10} {'tokens/s':>10}")
        steps = [case(engine, batch, context) for context in CONTEXTS for batch in BATCHES]
    print(json.dumps({"model": folder.name, "threads": args.threads, "steps": steps}))


if __name__ == "__main__":
    main()
