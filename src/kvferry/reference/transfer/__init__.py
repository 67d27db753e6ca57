"""An engine's ranks as kvferry endpoints: what an integration has to write."""
