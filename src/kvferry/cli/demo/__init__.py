"""``kvferry demo``: a cluster on this machine, a few questions, and the proof of the answers."""
