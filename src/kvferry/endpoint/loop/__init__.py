"""The loop: one thread per endpoint that runs the machine, and the ports that it calls."""
