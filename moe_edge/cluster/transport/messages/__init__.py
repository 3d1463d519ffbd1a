"""The default transport: ZeroMQ over TCP."""
