"""``kvferry serve``: a cluster or one part of one, until told to stop."""
