"""What runs on the owner's thread: the loop, the driver's ports, and rooms."""
