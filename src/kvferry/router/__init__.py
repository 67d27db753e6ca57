"""The router: an OpenAI API in front of prefill and decode workers.

For each request it chooses a prefill and a decode worker, names the room of their transfer,
relays the decode worker's response, and decides what to do when one of them fails. It holds no
model and imports no torch. Everything runs in one event loop.
"""
