"""What drives a machine, without a thread: the same in endpoints, simulator and explorer."""
