"""``kvferry sim``: run the protocol with faults in simulated time."""
