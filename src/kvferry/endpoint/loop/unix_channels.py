"""The open Unix-socket channels of an endpoint (``endpoint/control/unix.py``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvferry.endpoint.control.unix import UnixChannel
from kvferry.endpoint.loop.poller import Poller
from kvferry.protocol.codec import MAX_FRAME_BYTES
from kvferry.telemetry.observer import Observer

# More peers of this host use the ZeroMQ control channel.
MAX_CHANNELS = 256
# Limit for the bytes of incomplete frames of all channels together.
MAX_UNFINISHED_BYTES = 4 * MAX_FRAME_BYTES


class UnixChannels:
    """Polls Unix channels and bounds their number and the memory of incomplete frames.

    The bounds hold against an authenticated peer that misbehaves. The protocol repeats frames that
    a closed channel loses.
    """

    def __init__(self, poller: Poller, observer: Observer) -> None:
        self._poller = poller
        self._observer = observer
        self._channels: dict[object, UnixChannel] = {}
        # Channels with queued bytes, which wait to become writable.
        self._full: set[UnixChannel] = set()
        self._unfinished: dict[UnixChannel, int] = {}

    def add(self, channel: UnixChannel) -> None:
        """Watch a channel, or close it if there are too many."""
        if len(self._channels) >= MAX_CHANNELS:
            self._observer.refused("too-many-lines")
            channel.close()
            return
        self._channels[channel.fileno()] = channel
        self._poller.watch(channel.fileno())

    def receive(self, ready: Iterable[object]) -> Iterator[tuple[UnixChannel, list[bytes]]]:
        """Return the frames of ready channels; also channels that are over, without frames."""
        for channel in [self._channels[one] for one in ready if one in self._channels]:
            if channel in self._full:
                channel.resume()
                self._update_writable(channel)
            yield channel, channel.receive()
            yield from self._enforce_limit(channel)

    def _enforce_limit(self, channel: UnixChannel) -> Iterator[tuple[UnixChannel, list[bytes]]]:
        """End the channels with the longest incomplete frames until the rest is within bounds."""
        self._unfinished.pop(channel, None)
        if channel.num_unfinished and not channel.over:
            self._unfinished[channel] = channel.num_unfinished
        while sum(self._unfinished.values()) > MAX_UNFINISHED_BYTES:
            longest = max(self._unfinished, key=lambda one: self._unfinished[one])
            del self._unfinished[longest]
            longest.over = True
            self._observer.refused("unfinished-frames")
            yield longest, []

    def send(self, channel: UnixChannel, messages: Iterable[bytes]) -> None:
        """Send messages, now or when there is room."""
        for message in messages:
            channel.send(message)
        if channel.has_unsent:
            self._update_writable(channel)

    def _update_writable(self, channel: UnixChannel) -> None:
        if channel.has_unsent != (channel in self._full) and channel.fileno() in self._channels:
            self._full ^= {channel}
            self._poller.watch_writable(channel.fileno(), wanted=channel.has_unsent)

    def drop(self, channel: UnixChannel) -> None:
        """Close a channel."""
        if self._channels.pop(channel.fileno(), None) is not None:
            self._poller.unwatch(channel.fileno())
        self._full.discard(channel)
        self._unfinished.pop(channel, None)
        channel.close()

    def drop_ended(self) -> None:
        """Close the channels that are over."""
        for channel in [channel for channel in self._channels.values() if channel.over]:
            self.drop(channel)

    def close(self) -> None:
        """Close all channels."""
        for channel in list(self._channels.values()):
            self.drop(channel)
