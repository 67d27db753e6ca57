"""The control plane below the loop: sockets between hosts, lines within one, frames in bundles."""
