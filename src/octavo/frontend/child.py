"""The engine's process: `python -m octavo.frontend.child FD`, started by `link.ChildLink` and by nobody else.

It runs the very same loop as the thread of a single process does, between a socket instead of queues. It listens on
nothing, takes its configuration from the socket, and ends when the socket does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from octavo.errors import OctavoError
from octavo.frontend.link import ChannelOutbox, QueueInbox
from octavo.frontend.wire import (
    Beat,
    Channel,
    Configure,
    Crashed,
    Loaded,
    LoadFailed,
    LoadProgress,
    ToChild,
    to_child_decoder,
)
from octavo.obs import logs

BEAT_INTERVAL_S = 0.5
PROGRESS_INTERVAL_S = 0.05


def main(fd: int) -> int:
    """Loads, serves until told to shut down, and returns the exit status."""
    # A service manager may signal all processes of a service; the parent decides what that means for us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logs.set_up()
    channel = Channel(socket.socket(fileno=fd), to_child_decoder())
    configure = channel.receive()
    if not isinstance(configure, Configure):
        return 1
    inbox = QueueInbox()
    threading.Thread(target=_receive, args=(channel, inbox), name="octavo-inbox", daemon=True).start()
    threading.Thread(target=_beat, args=(channel,), name="octavo-beat", daemon=True).start()
    try:
        from octavo.frontend.build import load_back
        from octavo.loaders.checkpoint import open_checkpoint

        model = configure.config.model
        checkpoint = open_checkpoint(model.model, revision=model.revision, progress=False, offline=True)
        back = load_back(checkpoint, configure.config, _progress(channel))
    except OctavoError as error:
        channel.send(LoadFailed(type(error).__name__, error.message))
        return 1
    except Exception as error:  # noqa: BLE001 - the parent must hear of every failure
        channel.send(LoadFailed(type(error).__name__, str(error)))
        return 1
    try:
        channel.send(Loaded(back.facts))
        back.run(inbox, ChannelOutbox(channel))
    except OSError:
        return 1  # The parent is gone.
    except Exception as error:  # noqa: BLE001 - as above
        with suppress(OSError):
            channel.send(Crashed(f"the engine loop failed: {type(error).__name__}: {error}"))
        return 1
    finally:
        back.close()
    return 0


def _receive(channel: Channel[ToChild], inbox: QueueInbox) -> None:
    """Feeds the inbox. Without a parent there is nobody to work for: exit at once, whatever the loop is doing."""
    while (message := channel.receive()) is not None:
        if not isinstance(message, Configure):
            inbox.put(message)
    os._exit(1)


def _beat(channel: Channel[ToChild]) -> None:
    """Tells the parent that this process is not stopped, however long a step takes."""
    with suppress(OSError):
        while True:
            channel.send(Beat())
            time.sleep(BEAT_INTERVAL_S)


def _progress(channel: Channel[ToChild]) -> Callable[[int, int], None]:
    """Passes progress on, a few times a second."""
    last_s = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if done >= total or now_s - last_s >= PROGRESS_INTERVAL_S:
            last_s = now_s
            channel.send(LoadProgress(done, total))

    return report


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
