"""Log format of kvferry's processes. The library installs no handler; commands do."""
