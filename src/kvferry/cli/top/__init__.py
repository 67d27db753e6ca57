"""``kvferry top``: the cluster in a terminal."""
