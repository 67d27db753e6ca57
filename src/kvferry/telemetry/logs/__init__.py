"""The log of a process of ours. The library installs nothing; commands and parts do."""
