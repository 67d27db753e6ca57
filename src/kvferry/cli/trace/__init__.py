"""``kvferry trace``: the trace of a room."""
