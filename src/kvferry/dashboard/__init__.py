"""Observation of a cluster: traces of rooms, views of endpoints, and the page that shows them.

``steps``, ``clocks``, ``waterfall``, ``views`` and ``cluster`` are pure values and functions;
``routes`` puts them behind HTTP for the discovery service and the router, ``client`` asks there.
"""
