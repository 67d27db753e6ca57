"""Endpoints: protocol machines joined to transports, copies and sockets."""
