"""Facts about the running server: the event log and its sinks."""
