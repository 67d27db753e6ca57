"""``kvferry trace``: the waterfall of a room."""
