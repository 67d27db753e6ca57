"""The ranks of one instance: processes, how they add up, whether each is well."""
