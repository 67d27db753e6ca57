"""The discovery service: where instances say that they are there, and where others find them."""
