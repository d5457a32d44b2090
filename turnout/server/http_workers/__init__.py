"""Processes that serve HTTP, where one cannot keep up with the ranks (--api-server-count).

The head, the process that was started, keeps the engine, the requests (supervise/ledger.py) and the listening
socket. Each connection that it accepts it hands to one of the workers in turn (pool.py). These parse,
tokenise, detokenise and stream (worker.py), with the service and the routes of a server of one process, but
with an engine that is reached by messages (remote_engine.py). What tells of a server as a whole, or changes
it, a worker asks of the head's own routes (relay.py).

A worker that ends takes its connections with it, and nothing else: its requests are aborted, and another is
started. Workers end with the head.
"""
