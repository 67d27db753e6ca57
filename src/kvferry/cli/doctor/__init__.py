"""``kvferry doctor``: findings about this machine, and what to do about them."""
