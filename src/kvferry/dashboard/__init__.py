"""The dashboard: one page, the documents behind it, and drawings of waterfalls.

``routes`` serves them for the discovery service and the router; ``client`` reads them.
"""
