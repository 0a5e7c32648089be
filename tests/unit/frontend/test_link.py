"""A link outlives its engine; what the engine held must not."""

from __future__ import annotations

import weakref

from octavo.contracts import Inbox, Outbox
from octavo.frontend.link import Hooks, ThreadLink


class Engine:
    """Stands for weights and native threads."""

    def run(self, inbox: Inbox, outbox: Outbox) -> None:
        inbox.receive(None)


def test_a_closed_link_holds_nothing_of_its_engine() -> None:
    engine = Engine()
    link = ThreadLink(engine.run, Hooks(on_output=lambda output: None, on_death=lambda reason: None))
    watched = weakref.ref(engine)
    del engine
    assert watched() is not None
    link.close()
    assert watched() is None
