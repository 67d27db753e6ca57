"""How a process of ours writes its log. The library installs nothing; commands and parts do."""
