"""The built-in discovery service over HTTP: its server side, and the backend of its clients."""
