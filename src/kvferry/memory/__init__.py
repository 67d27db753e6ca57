"""An engine's memory as kvferry needs it: its pools, and the pages of its requests. Pure."""
