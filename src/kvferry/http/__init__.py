"""Limits on connections, request ids and error documents, shared by all of kvferry's servers."""
