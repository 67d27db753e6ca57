"""``kvferry bench``: measurements of transfers, the control path, and what serves."""
