"""The dashboard: a page, the documents behind it, their client, and drawings of waterfalls."""
