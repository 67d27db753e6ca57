"""Index keys, block scales and draft caches between SGLang's own pools.

The tests start no servers, because SGLang supports none of these caches on a CPU.
"""

from __future__ import annotations

from pathlib import Path

from test_6_failures import all_done, run

FORMS = ("index", "scales", "draft", "stages")
REFUSED = {
    "several kinds": "of the kinds dsa, dsa_tail: use another backend",
    "four bits": "--kv-cache-dtype nvfp4: use fp8_e4m3",
    "shuffled scales": "use another --page-size, or --kv-cache-dtype fp8_e4m3",
    "compressed latent": "compressed MLA caches (DeepSeek V4): use another backend",
    "draft and windows": "disable speculative decoding",
}


def test_auxiliary_pools_arrive_or_are_rejected(folder: Path) -> None:
    *results, refused = run(folder, "auxiliary_pools.py")
    forms = [result["form"] for result in results]
    assert {form: forms.count(form) for form in forms} == dict.fromkeys(FORMS, 4)
    assert all_done(results)
    assert [result["touched"] for result in results] == [0] * len(results)
    assert refused.keys() == REFUSED.keys()
    assert all(REFUSED[name] in message for name, message in refused.items())
