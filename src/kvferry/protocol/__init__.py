"""The transfer protocol between sources and targets. Sans-IO: events in, actions out."""
