"""Index keys, block scales and draft caches between SGLang's own pools.

Without servers: on a CPU, SGLang 0.5.23 computes none of them.
"""

from __future__ import annotations

from pathlib import Path

from test_6_failures import are_done, run

REFUSED = {
    "several kinds": "of the kinds dsa, dsa_tail: use another backend",
    "four bits": "--kv-cache-dtype nvfp4: use fp8_e4m3",
    "shuffled scales": "use another --page-size, or --kv-cache-dtype fp8_e4m3",
    "draft and windows": "disable speculative decoding",
}


def test_auxiliary_pools_arrive_or_are_rejected(folder: Path) -> None:
    *carried, refused = run(folder, "auxiliary_pools.py")
    forms = [each["form"] for each in carried]
    assert {form: forms.count(form) for form in forms} == {"index": 4, "scales": 4, "draft": 4}
    assert are_done(carried)
    assert [each["strange"] for each in carried] == [0] * len(carried)
    assert refused.keys() == REFUSED.keys()
    assert all(REFUSED[name] in said for name, said in refused.items())
