"""What runs on the owner's thread: the loop, the runner's ports, and rooms."""
