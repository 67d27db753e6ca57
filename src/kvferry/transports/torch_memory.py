"""Memory of torch tensors, moved into shared memory in place.

An engine allocates its cache itself and keeps views of it in many places. torch can give
a tensor's storage other memory, and every view of that storage follows. Nobody may read or
write the tensors meanwhile, and whatever knows their old addresses must ask again: an engine
hands its pools over before it computes anything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from kvferry.errors import TransportError
from kvferry.transports import segments


def share(arrays: Iterable[Any]) -> None:
    """Move the storage of each torch tensor in host memory, once; leave other arrays alone."""
    storages = {}
    for array in arrays:
        if hasattr(array, "untyped_storage") and array.device.type == "cpu":
            storage = array.untyped_storage()
            storages[storage.data_ptr()] = storage
    for storage in storages.values():
        if segments.find_shared(storage.data_ptr(), storage.nbytes()) is None:
            _move(storage)


def _move(storage: Any) -> None:
    num_bytes = storage.nbytes()
    problem = segments.room_problem(num_bytes)
    if problem:  # torch would be killed when it touches what is not there.
        raise TransportError(problem)
    sharing = sys.modules["torch"].multiprocessing
    before = sharing.get_sharing_strategy()
    # The other strategy gives memory without a name.
    sharing.set_sharing_strategy("file_system")
    try:
        storage.share_memory_()
    except RuntimeError as error:
        raise TransportError(
            f"torch can't move a pool of {num_bytes} bytes into shared memory ({error}); "
            f"make it with the transport's allocate()"
        ) from error
    finally:
        sharing.set_sharing_strategy(before)
    # torch's own daemon is a child of this process, and may be killed with it.
    segments.sweep_with_us(storage.data_ptr(), num_bytes)
