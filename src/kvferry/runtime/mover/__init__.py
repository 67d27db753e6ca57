"""What runs on the mover's thread: everything that touches a transport."""
