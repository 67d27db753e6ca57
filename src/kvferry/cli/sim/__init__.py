"""``kvferry sim``: the protocol played through faults."""
