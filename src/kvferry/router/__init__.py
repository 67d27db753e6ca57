"""The router: an OpenAI API in front of prefill and decode workers.

It pairs a prefill with a decode worker for each request, names the room in which
they meet, passes decode's answer on, and decides what happens when one of them
fails. It holds no model and imports no torch. Everything runs in one event loop.
"""
