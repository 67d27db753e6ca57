"""The command line: argument parsing and printing, no decisions of its own."""
