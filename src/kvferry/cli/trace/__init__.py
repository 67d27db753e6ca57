"""``kvferry trace``: the story of a room."""
