"""The router: tokenizes, queues, chooses a worker, and keeps the authoritative record of each request."""
