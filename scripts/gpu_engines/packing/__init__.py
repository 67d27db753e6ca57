"""Pack an engine for a machine without network access: wheels, reduced to what a server reads."""
