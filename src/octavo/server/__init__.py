"""The HTTP server: ASGI app, protocol structs, handlers, auth and limits. Knows no tensors and no blocks."""
