"""Moves one request's KV cache from a prefill process to a decode process.

    python examples/two_processes.py

Both use shared memory on the CPU. An engine does what ``prefill`` and ``decode`` do below: it
describes its cache as a layout, passes its pools to an endpoint, and names pages per request.
"""

import math
import multiprocessing

import numpy as np

import kvferry
from kvferry import DiscoveryServer, Layout, SourceEndpoint, TargetEndpoint, attention

TRANSPORT = kvferry.make_transport("shm")
DIGEST = kvferry.digest_of(range(40), model="demo", dtype="uint16")  # identifies what is computed


def new_cache(num_pages, page_tokens):
    """Allocate K and V of every layer as one array, in memory that the transport can share."""
    layout = Layout(attention(layers=2, kv_heads=4, head_dim=8), page_tokens=page_tokens)
    shape = (2, 2, num_pages, page_tokens, 4, 8)  # layers, K and V, ...; two bytes an element
    kv = TRANSPORT.allocate(2 * math.prod(shape)).view(np.uint16).reshape(shape)
    return kv, layout, {"kv": {"k": kv[:, 0], "v": kv[:, 1]}}


def prefill(url):
    """Compute the request chunk by chunk, and push each chunk."""
    kv, layout, pools = new_cache(num_pages=8, page_tokens=8)
    options = {"name": "prefill", "model": "demo", "transport": TRANSPORT, "discovery": url}
    with SourceEndpoint(layout, pools, **options) as source:
        room = source.open("request-1")
        for first, end, pages in [(0, 24, [7, 0, 5]), (24, 40, [2, 4])]:
            kv[:, :, pages] = np.arange(first, end).reshape(-1, 8, 1, 1)  # a model would run here
            room.push((first, end), pages)
        room.close(b"the first token", digest=DIGEST)
        room.wait(timeout_s=30)


def decode(url):
    """Receive the request into the named pages."""
    kv, layout, pools = new_cache(num_pages=4, page_tokens=16)
    options = {"name": "decode", "model": "demo", "transport": TRANSPORT, "discovery": url}
    with TargetEndpoint(layout, pools, **options) as target:
        request = {"prefill": "prefill", "tokens": 40, "pages": [3, 0, 1]}
        room = target.receive("request-1", **request, digest=DIGEST)
        print(room.wait(timeout_s=30))
        print("K of each token:", *kv[0, 0, [3, 0, 1], :, 0, 0].reshape(-1)[:40])


if __name__ == "__main__":
    with DiscoveryServer() as server:  # `kvferry serve discovery` runs a separate one
        other = multiprocessing.get_context("spawn").Process(target=decode, args=[server.url])
        other.start()
        prefill(server.url)
        other.join()
