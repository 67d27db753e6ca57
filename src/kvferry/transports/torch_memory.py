"""Moves the memory of torch tensors into shared memory, in place.

An engine allocates its KV cache itself and keeps views of it in many places. torch can move a
tensor's storage, and every view of that storage follows. Nothing may read or write the tensors
during the move, and addresses that were taken earlier become invalid, so an engine hands over its
pools before it computes anything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from kvferry.errors import TransportError
from kvferry.transports import segments


def share_tensors(arrays: Iterable[Any]) -> None:
    """Move the storage of every torch tensor in host memory, once. Ignore all other arrays."""
    storages = {}
    for array in arrays:
        if hasattr(array, "untyped_storage") and array.device.type == "cpu":
            storage = array.untyped_storage()
            storages[storage.data_ptr()] = storage
    for storage in storages.values():
        if segments.find_shared_file(storage.data_ptr(), storage.nbytes()) is None:
            _move(storage)


def _move(storage: Any) -> None:
    num_bytes = storage.nbytes()
    problem = segments.capacity_problem(num_bytes)
    if problem:  # torch does not reserve the memory, so the first touch would raise SIGBUS.
        raise TransportError(problem)
    multiprocessing = sys.modules["torch"].multiprocessing
    previous = multiprocessing.get_sharing_strategy()
    # The "file_descriptor" strategy gives memory without a name.
    multiprocessing.set_sharing_strategy("file_system")
    try:
        storage.share_memory_()
    except RuntimeError as error:
        raise TransportError(
            f"torch cannot move a pool of {num_bytes} bytes into shared memory ({error}); "
            f"allocate it with the transport's allocate()"
        ) from error
    finally:
        multiprocessing.set_sharing_strategy(previous)
    # torch's own daemon is a child of this process and may be killed with it.
    segments.remove_at_exit(storage.data_ptr(), num_bytes)
